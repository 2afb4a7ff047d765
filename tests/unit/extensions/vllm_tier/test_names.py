"""What names an engine's chunks under vLLM's OffloadingConnector: by vLLM's own configuration
objects."""

import shutil

import pytest

from kvtier.bench.model import make_model
from kvtier.core.chunk import fingerprint
from kvtier.extensions.vllm_tier.tier import engine_identity
from tests.unit.extensions.vllm_tier.tiering import engine_config, make_spec


def named(model, **more):
    """vLLM's scheduler has ``vllm_config`` where it makes the tiers, as this has."""
    vllm_config = engine_config(model, [], **more)
    return engine_identity(make_spec(vllm_config))


def test_equal_engines_have_one_name_wherever_their_model_lies(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    one = named(model)
    assert "start" not in one["engine"]
    assert one == named(copy, max_num_seqs=7)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"max_model_len": 512},
        {"extra": {"blocks_per_chunk": 4}},
        {"extra": {"canonical_layout": True}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"tensor_parallel_size": 2},
    ],
    ids="-".join,
)
def test_what_decides_bytes_is_in_the_name(model, other):
    assert fingerprint(named(model)) != fingerprint(named(model, **other))


def test_weights_replaced_under_one_name_have_another(tmp_path):
    folder = make_model(tmp_path / "model", "tiny", seed=0)
    before = named(folder)
    shutil.rmtree(folder)
    make_model(folder, "tiny", seed=1)
    after = named(folder)
    assert before["engine"]["weights"] != after["engine"]["weights"]
    assert "start" not in after["engine"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"enable_lora": True, "max_lora_rank": 8}, "adapters by their names"),
        ({"prefix_caching_hash_algo": "xxhash"}, "may give two prompts one key"),
        ({"load_format": "dummy"}, "are not local files"),
    ],
)
def test_what_is_only_a_name_is_of_use_to_one_start(model, caplog, more, words):
    from importlib.util import find_spec

    if "xxhash" in more.values() and find_spec("xxhash") is None:
        pytest.skip("vLLM wants xxhash for it")
    one, two = named(model, **more), named(model, **more)
    assert one["engine"]["start"] != two["engine"]["start"]
    assert words in caplog.text


def test_a_caller_that_has_no_configuration_gets_a_name_of_this_start(model, caplog):
    spec = make_spec(engine_config(model, []))
    assert [*engine_identity(spec)] == ["start"]
