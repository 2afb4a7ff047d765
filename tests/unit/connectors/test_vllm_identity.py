"""An engine's identity: everything that decides KV bytes, and no name of machine, path or
process."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.connectors.vllm.identity import begin, identity
from kvtier.core.chunk import fingerprint


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model-1.safetensors").write_bytes(b"one" * 100_000)
    (place / "model-2.safetensors").write_bytes(b"two" * 100_000)
    return place


def model(folder, **other):
    config = {
        "hidden_size": 64,
        "_name_or_path": str(folder),
        "rope_parameters": {"rope_theta": 1e4},
    }
    config["model"] = {
        "hidden_size": 64,
        "_name_or_path": str(folder),
    }  # as an EAGLE draft's configuration has it
    given = {
        "hf_config": SimpleNamespace(to_dict=config.copy),
        "model": str(folder),
        "model_weights": "",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "use_mla": False,
        "multimodal_config": None,
        "seed": 0,
    } | other
    return SimpleNamespace(**given)


def engine(folder, **other):
    given = {
        "model_config": model(folder),
        "cache_config": SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, nnodes_within_dp=1
        ),
        "speculative_config": None,
        "load_config": SimpleNamespace(load_format="auto"),
    } | other
    return SimpleNamespace(**given)


def rank(**other):
    return SimpleNamespace(**{"model": {"rotary": "a", "attention": "b"}, "weights": None} | other)


def print_of(given, ranks=None):
    return fingerprint(identity(given, ranks or {(0, 0): rank()}))


def test_the_same_engine_has_the_same_fingerprint_wherever_its_model_lies(folder, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert print_of(engine(folder)) == print_of(engine(folder)) == print_of(engine(other))


def test_a_configuration_with_infinite_numbers_has_a_fingerprint(folder):
    """Nemotron-H and Falcon-H1 have ``time_step_limit: [0, Infinity]``."""

    def limited(last):
        config = {"hidden_size": 64, "time_step_limit": (0.0, last)}
        return engine(folder, model_config=model(folder, hf_config=_of(config)))

    def _of(config):
        return SimpleNamespace(to_dict=config.copy)

    told = [print_of(limited(last)) for last in (float("inf"), float("-inf"), 1.0)]
    assert len(set(told)) == 3
    assert told[0] == print_of(limited(float("inf")))


@pytest.mark.parametrize(
    "other",
    [
        {"model_config": {"dtype": "float16"}},
        {"model_config": {"quantization": "fp8"}},
        {"model_config": {"hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 128})}},
        {
            "model_config": {
                "multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_resize": False})
            }
        },
        {"cache_config": SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=False)},
        {"parallel_config": SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)},
        {"parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)},
    ],
    ids=["dtype", "quantization", "configuration", "media processor", "cache dtype", "tp", "pp"],
)
def test_what_the_configuration_decides_is_in_it(folder, other):
    changed = {
        key: model(folder, **value) if isinstance(value, dict) else value
        for key, value in other.items()
    }
    assert print_of(engine(folder, **changed)) != print_of(engine(folder))


class TestWeights:
    @pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors"])
    @pytest.mark.parametrize(("first", "last"), [(0, 1), (100_000, 200_000), (299_999, 300_000)])
    def test_of_local_files_the_content_counts(self, folder, name, first, last):
        before, file = print_of(engine(folder)), folder / name
        content = bytearray(file.read_bytes())
        content[first:last] = b"X" * (last - first)
        file.write_bytes(content)
        assert print_of(engine(folder)) != before

    def test_their_names_and_sizes_count(self, folder):
        before = print_of(engine(folder))
        (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
        renamed = print_of(engine(folder))
        (folder / "model-1.safetensors").write_bytes(b"one" * 100_001)
        assert len({before, renamed, print_of(engine(folder))}) == 3

    def test_a_draft_model_s_count_too(self, folder, tmp_path):
        drafts = [Path(shutil.copytree(folder, tmp_path / name)) for name in ("draft", "other")]
        (drafts[1] / "model-1.safetensors").write_bytes(b"other")
        configs = [SimpleNamespace(draft_model_config=model(draft)) for draft in drafts]
        prints = {
            print_of(engine(folder, speculative_config=config)) for config in (None, *configs)
        }
        assert len(prints) == 3

    @pytest.mark.parametrize(
        "other",
        [
            {"model_config": {"model_weights": "s3://bucket/model"}},
            {"load_config": SimpleNamespace(load_format="dummy")},
            {"load_config": SimpleNamespace(load_format="tensorizer")},
            {"load_config": SimpleNamespace(load_format="a_plugin_of_somebody")},
        ],
        ids=["streamed", "dummy", "tensorizer", "plug-in"],
    )
    def test_of_weights_that_lie_elsewhere_what_was_loaded_counts(self, folder, other):
        """The folder's files are there, and are not what is loaded."""
        changed = {
            key: model(folder, **value) if isinstance(value, dict) else value
            for key, value in other.items()
        }
        given = engine(folder, **changed)
        one, two = ({(0, 0): rank(weights=digest)} for digest in ("one", "two"))
        assert print_of(given, one) == print_of(given, one)
        assert len({print_of(given, one), print_of(given, two), print_of(engine(folder), one)}) == 3

    def test_their_place_and_revision_count_with_what_was_loaded(self, folder):
        ranks = {(0, 0): rank(weights="same")}
        places = [("s3://a", "1"), ("s3://b", "1"), ("s3://a", "2")]
        prints = {
            print_of(
                engine(folder, model_config=model(folder, model_weights=place, revision=revision)),
                ranks,
            )
            for place, revision in places
        }
        assert len(prints) == 3

    def test_a_folder_without_weights_is_no_checkpoint(self, folder):
        for file in folder.glob("*.safetensors"):
            file.unlink()
        one, two = ({(0, 0): rank(weights=digest)} for digest in ("one", "two"))
        assert print_of(engine(folder), one) != print_of(engine(folder), two)

    def test_every_rank_s_count(self, folder):
        given = engine(folder, model_config=model(folder, model_weights="s3://a"))
        one, two = (
            {(0, 0): rank(weights="a"), (0, 1): rank(weights=digest)} for digest in ("b", "c")
        )
        assert print_of(given, one) != print_of(given, two)

    @pytest.mark.parametrize("unread", [0, 1])
    def test_what_can_be_read_nowhere_makes_the_keys_this_start_s_own(self, folder, unread, caplog):
        given = engine(folder, model_config=model(folder, model_weights="s3://bucket/model"))
        ranks = {(0, place): rank(weights=None if place == unread else "read") for place in (0, 1)}
        with caplog.at_level(logging.WARNING, "kvtier"):
            assert print_of(given, ranks) != print_of(given, ranks)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2, "once a start"
        assert "s3://bucket/model" in told[0] and "this start of the engine only" in told[0]


def test_a_model_that_cannot_be_looked_at_makes_the_keys_this_start_s_own(folder):
    ranks = {(0, 0): rank(), (0, 1): rank(model=None)}
    assert print_of(engine(folder), ranks) != print_of(engine(folder), ranks)


def test_kv_scales_that_the_first_prompts_decide_make_the_keys_this_start_s_own(folder):
    given = engine(
        folder, cache_config=SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)
    )
    assert print_of(given) != print_of(given)


def test_weights_that_are_replaced_while_an_engine_starts_make_the_keys_this_start_s_own(folder):
    begin(engine(folder))
    (folder / "model-1.safetensors").write_bytes(b"new" * 100_000)
    assert print_of(engine(folder)) != print_of(engine(folder))


@pytest.mark.parametrize(
    ("repository", "lasts"), [("acme/model", True), ("stranger/code", False), ("", True)]
)
def test_code_of_another_repository_makes_the_keys_this_start_s_own(folder, repository, lasts):
    """A hub's model names its own repository before its classes. Its files are named by content."""
    told = {"AutoConfig": f"{repository}--own.Config" if repository else "own.Config"}
    config = SimpleNamespace(to_dict=dict, auto_map=told)
    given = model(
        "acme/model", hf_config=config, trust_remote_code=True, model_weights="s3://a/model"
    )
    ranks = {(0, 0): rank(weights="read")}
    found = [print_of(engine(folder, model_config=given), ranks) for _ in range(2)]
    assert (found[0] == found[1]) is lasts
