"""What Mooncake's library answers is believed as far as it makes sense. No library has to be
installed: one of ours stands in its place, in the real process and behind the real tier. And
``mooncake_url``: what is understood, and what is refused in which words."""

import socket
from contextlib import closing

import pytest

from kvtier.config.keys import describe
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.extensions.mooncake.tier import MooncakeStore, MooncakeTier
from kvtier.extensions.mooncake.url import MooncakeUrl, masked, parse
from kvtier.tiers.away.whole_objects import ObjectForm
from tests.tier_chunks import CHUNK_BYTES, KEYS, NAMESPACE, chunk, holds

LIBRARY = """
class MooncakeDistributedStore:
    setup = register_buffer = lambda self, *words: 0
    close = lambda self: None
    batch_is_exist = batch_remove = lambda self, names, *more: {answer}
    put_from = get_into = lambda self, *words: {answer}
"""


@pytest.fixture
def master():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("answer", ["[1] * 11", "[]", "None", "['x'] * 6", "[None] * 6", "{}"])
def test_garbage_of_the_library_is_a_fault_that_is_counted_and_never_a_hit(
    answer, master, tmp_path, monkeypatch
):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(LIBRARY.replace("{answer}", answer))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    store = MooncakeStore(f"mooncake://127.0.0.1:{master}", CHUNK_BYTES, 1)
    with closing(MooncakeTier(store, ObjectForm("", NAMESPACE), CHUNK_BYTES)) as tier:
        faults = tier.counts["failed_finds"]
        assert faults == 1, "the greeting already"
        assert tier.find(KEYS[:6]) == 0
        assert holds(tier, KEYS[0]) is None
        assert not tier.write(KEYS[0], chunk(KEYS[0]))
        assert tier.counts["failed_finds"] == 2
        assert tier.counts["failed_reads"] == 1 or tier.open_breakers


SECRET = "5ec3e75ec3e75ec3e7"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mooncake://master", MooncakeUrl("master", 50051)),
        ("mooncake://master?", MooncakeUrl("master", 50051)),
        ("Mooncake://10.0.0.1:6000/", MooncakeUrl("10.0.0.1", 6000)),
        ("mooncake://[::1]:6000?bytes=2TiB", MooncakeUrl("[::1]", 6000, 2 << 40)),
        (
            "mooncake://m?segment=16GiB&protocol=rdma&device=mlx5_0,mlx5_1&host=10.0.0.7",
            MooncakeUrl(
                "m", 50051, 256 << 30, 16 << 30, "rdma", "mlx5_0,mlx5_1", own_host="10.0.0.7"
            ),
        ),
        (
            "mooncake://m?metadata=http://m:8080/metadata&segment=0",
            MooncakeUrl("m", 50051, metadata="http://m:8080/metadata"),
        ),
    ],
)
def test_what_is_understood(text, found):
    assert parse(text) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("master:50051", "the scheme is not mooncake; expected mooncake://master:50051"),
        ("redis://master:50051", "the scheme is not mooncake"),
        (f"mooncake://user:{SECRET}@master", "Mooncake takes no credentials"),
        ("mooncake://", "the master's address is none"),
        ("mooncake://master:0", "the master's address is none"),
        ("mooncake://master:65536", "the master's address is none"),
        ("mooncake://master?bytes", "behind the . is no parameter=value"),
        ("mooncake://master?size=1GiB", "an unknown parameter; known are bytes, segment, protocol"),
        ("mooncake://master?bytes=much", "the parameter bytes is no size; expected such as"),
        ("mooncake://master?segment=-1", "the parameter segment is no size"),
        ("mooncake://master?protocol=udp", "the parameter protocol has a wrong value"),
        ("mooncake://master?metadata=nowhere", "the parameter metadata has a wrong value"),
        ("mooncake://master?bytes=1GiB&bytes=2GiB", "a parameter comes twice"),
    ],
)
def test_what_is_refused_and_in_which_words(text, words):
    with pytest.raises(ConfigError, match=words) as raised:
        load(env={"KVTIER_MOONCAKE_URL": text})
    assert SECRET not in str(raised.value) and SECRET not in masked(text)


def test_a_file_has_it_in_a_section_of_its_own(tmp_path):
    (tmp_path / "kvtier.yaml").write_text("mooncake:\n  url: mooncake://master?bytes=64GiB\n")
    config = load(tmp_path / "kvtier.yaml", env={})
    assert config.value("mooncake_url") == "mooncake://master?bytes=64GiB"
    (row,) = [row for row in describe(config) if row.key == "mooncake_url"]
    assert (row.path, row.value) == ("mooncake.url", "mooncake://master?bytes=64GiB")
