"""What Mooncake's library answers is believed as far as it makes sense. No library has to be
installed: one of ours stands in its place, in the real process and behind the real tier."""

import socket
from contextlib import closing

import pytest

from kvtier.extensions.mooncake.tier import MooncakeStore, MooncakeTier
from kvtier.tiers.away.object_layout import ObjectForm
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
