"""The two tables of vLLM's configuration: closed over every class of every tested version, and
what is in neither counts."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm import versions
from kvtier.connectors.vllm.identity import Walk, identity
from kvtier.connectors.vllm.naming.fields import (
    DECIDES,
    DOES_NOT,
    ENVIRONMENT_DOES_NOT,
    FAMILIES,
    SECTIONS,
)
from kvtier.core.chunk import fingerprint
from tests.unit.connectors.vllm_fields import RECORDED, Classes, read

ROOT = Path(__file__).parents[3]
ALL: dict[str, Classes] = json.loads(RECORDED.read_text(encoding="utf-8"))
INSTALLED = {
    "0.29.0": ROOT / ".venv-old" / "vllm-0.29.0",
    "0.33.0": ROOT / ".venv-next" / "vllm-0.33.0",
}


def walk(classes, name="VllmConfig", section="vllm_config"):
    """``section.field`` of every field that :class:`Walk` can come to."""
    for field, inner in classes[name].items():
        place = f"{section}.{field}"
        yield place
        if inner in classes and place not in DOES_NOT:
            yield from walk(classes, inner, SECTIONS.get(field, field))


@pytest.mark.parametrize("version", versions.TESTED)
def test_every_field_is_in_exactly_one_table(version):
    found = set(walk(ALL[version]))
    assert len(found) > 250
    assert found <= DECIDES | DOES_NOT.keys(), "decide what these do, and say why"
    assert not DECIDES & DOES_NOT.keys()


def test_the_tables_hold_no_field_that_no_version_has():
    found = {place for classes in ALL.values() for place in walk(classes)}
    told = DECIDES | DOES_NOT.keys()
    assert told - found == set()


@pytest.mark.vllm
def test_the_recorded_classes_are_vllm_s():
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    site = Path(spec.submodule_search_locations[0]).parent
    version = versions.running().partition("+")[0]
    compared = {version: site} | {
        version: site for version, site in INSTALLED.items() if (site / "vllm").is_dir()
    }
    for one, place in compared.items():
        found = {name: fields for name, fields in read(place).items() if fields}
        assert found == ALL[one]


@pytest.mark.vllm
def test_the_walk_comes_to_the_fields_that_the_sources_have():
    from vllm.config import CacheConfig, LoRAConfig, MultiModalConfig, ParallelConfig

    for kind in (CacheConfig, LoRAConfig, MultiModalConfig, ParallelConfig):
        version = versions.running().partition("+")[0]
        assert {one.name for one in dataclasses.fields(kind)} == set(ALL[version][kind.__name__])


MUST_DECIDE = [
    "model_config.dtype", "model_config.hf_config", "model_config.quantization",
    "model_config.quantization_config", "model_config.model_class_overrides",
    "model_config.code_revision", "model_config.disable_sliding_window", "model_config.model_impl",
    "multimodal_config.mm_processor_kwargs", "multimodal_config.video_pruning_rate",
    "multimodal_config.video_pruning_method", "multimodal_config.media_io_kwargs",
    "cache_config.cache_dtype", "cache_config.mamba_ssm_cache_dtype", "cache_config.sliding_window",
    "cache_config.kv_cache_dtype_skip_layers", "parallel_config.tensor_parallel_size",
    "parallel_config.pipeline_parallel_size", "parallel_config.worker_cls",
    "parallel_config.decode_context_parallel_size", "load_config.load_format",
    "load_config.model_loader_extra_config", "attention_config.backend",
    "kernel_config.moe_backend", "lora_config.lora_dtype", "lora_config.target_modules",
    "lora_config.max_lora_rank", "lora_config.fully_sharded_loras",
    "lora_config.enable_tower_connector_lora", "speculative_config.method",
    "speculative_config.quantization", "speculative_config.draft_model_config",
    "compilation_config.mode", "compilation_config.custom_ops", "compilation_config.pass_config",
]  # fmt: skip
"""Said by hand, so that a field that moves to the other table is seen."""


@pytest.mark.parametrize("place", MUST_DECIDE)
def test_a_field_that_decides_changes_the_fingerprint(place):
    assert place in DECIDES
    section, _, field = place.partition(".")

    def told(value):
        config = SimpleNamespace(**{section: SimpleNamespace(**{field: value})})
        parts = Walk()
        return fingerprint(parts.of(getattr(config, section), section))

    assert told("one") != told("other")


STAYS_WARM = [
    "model_config.max_model_len", "model_config.seed", "model_config.served_model_name",
    "model_config.model", "model_config.tokenizer", "scheduler_config.max_num_seqs",
    "scheduler_config.max_num_batched_tokens", "scheduler_config.async_scheduling",
    "scheduler_config.policy", "cache_config.block_size", "cache_config.gpu_memory_utilization",
    "cache_config.num_gpu_blocks", "cache_config.enable_prefix_caching",
    "cache_config.num_gpu_blocks_override", "parallel_config.data_parallel_rank",
    "parallel_config.master_port", "vllm_config.instance_id", "vllm_config.observability_config",
]  # fmt: skip


@pytest.mark.parametrize("place", STAYS_WARM)
def test_a_restart_with_what_does_not_decide_is_warm(place):
    assert DOES_NOT[place]
    section, _, field = place.partition(".")
    one, other = (Walk().of(SimpleNamespace(**{field: v}), section) for v in ("one", "other"))
    assert one == other == {}


class TestWalk:
    def test_a_field_of_neither_table_counts_and_is_told(self):
        parts = Walk()
        found = parts.of(SimpleNamespace(dtype="float16", wholly_new=3), "model_config")
        assert found == {"dtype": "float16", "wholly_new": 3}
        assert parts.unknown == ["model_config.wholly_new"]

    def test_a_value_without_a_name_of_its_own_makes_names_of_this_start(self):
        parts = Walk()
        parts.of(SimpleNamespace(model_class_overrides={"A": object()}), "model_config")
        assert len(parts.unnamed) == 1
        assert "model_config.model_class_overrides" in parts.unnamed[0]

    def test_a_lambda_has_no_name_and_a_function_has(self):
        parts = Walk()
        named = parts.of(SimpleNamespace(additional_config={"a": re.compile}), "vllm_config")
        assert named == {"additional_config": {"a": "re.compile"}}
        assert not parts.unnamed
        parts.of(SimpleNamespace(additional_config={"a": lambda: None}), "vllm_config")
        assert parts.unnamed

    def test_something_that_contains_itself_ends(self):
        parts, inside = Walk(), dict[str, Any]()
        inside["again"] = inside
        parts.of(SimpleNamespace(additional_config=inside), "vllm_config")
        assert "nested" in parts.unnamed[0]

    def test_a_file_whose_content_decides_is_read(self, tmp_path):
        scales = tmp_path / "scales.json"
        found = []
        for content in ("1", "2"):
            scales.write_text(content)
            given = SimpleNamespace(mm_encoder_fp8_scale_path=str(scales))
            found.append(Walk().of(given, "multimodal_config"))
        assert found[0] != found[1]

    @pytest.mark.vllm
    def test_an_engine_that_takes_adapters_shares_chunks_with_one_that_does_not(self):
        from vllm.config import LoRAConfig

        def told(lora):
            found = Walk().of(SimpleNamespace(lora_config=lora), "vllm_config")
            return dict(found.get("lora_config", {}))

        assert told(None) == told(LoRAConfig(max_loras=4, max_cpu_loras=8)) == {}
        assert told(LoRAConfig(max_lora_rank=64)) != {}


class TestEnvironment:
    def told(self, monkeypatch, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
        model = SimpleNamespace(
            hf_config=config, model="somewhere", model_weights="s3://a", revision=None
        )
        given = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(),
            load_config=SimpleNamespace(load_format="auto"),
        )
        ranks: Any = {(0, 0): SimpleNamespace(model={}, weights="w")}
        found = identity(given, ranks)
        assert "start" not in found
        return found["environment"]

    @pytest.mark.vllm
    def test_a_switch_that_chooses_kernels_counts(self, monkeypatch):
        before = self.told(monkeypatch)
        for name in ("VLLM_CPU_INT4_W4A8", "VLLM_MLA_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE",
                     "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"):  # fmt: skip
            assert name not in ENVIRONMENT_DOES_NOT
            with monkeypatch.context() as patch:
                assert self.told(patch, **{name: "1"}) != before

    @pytest.mark.vllm
    def test_places_ports_and_what_a_cluster_says_do_not(self, monkeypatch):
        before = self.told(monkeypatch)
        others = {
            "VLLM_PORT": "8001",
            "VLLM_HOST_IP": "10.0.0.7",
            "VLLM_CACHE_ROOT": "/elsewhere",
            "VLLM_SERVICE_HOST": "10.0.0.1",
            "TORCH_PORT_8000_TCP_ADDR": "10.0.0.2",
            "TORCHINDUCTOR_CACHE_DIR": "/elsewhere",
            "TRITON_CACHE_DIR": "/elsewhere",
            "HOME": "/elsewhere",
        }
        assert self.told(monkeypatch, **others) == before
        assert not FAMILIES.match("HOME")


@pytest.mark.vllm
def test_no_variable_that_vllm_s_import_sets_counts():
    """A process that was forked with another environment does not have them."""
    code = (
        "import os, json; before = set(os.environ); import vllm, vllm.platforms; "
        "vllm.platforms.current_platform; print(json.dumps(sorted({*os.environ} - before)))"
    )
    env = {name: value for name, value in os.environ.items() if not FAMILIES.match(name)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    assert [one for one in found if FAMILIES.match(one) and one not in ENVIRONMENT_DOES_NOT] == []


def test_what_vllm_has_of_new_settings_is_one_line(caplog):
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=dict), model="m", model_weights="s3://a", revision=None,
        of_tomorrow=1, of_the_day_after=2,
    )  # fmt: skip
    given = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(),
        load_config=SimpleNamespace(load_format="auto"),
    )
    ranks: Any = {(0, 0): SimpleNamespace(model={}, weights="w")}
    with caplog.at_level(logging.INFO, "kvtier"):
        identity(given, ranks)
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2
    assert "chunks are named by software " in told[1]
    assert "model_config.of_the_day_after, model_config.of_tomorrow" in told[0]
