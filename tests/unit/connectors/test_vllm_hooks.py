"""What the connector's class decides itself: who of an engine's processes speaks, and what is off in an older vLLM."""

from __future__ import annotations

import importlib
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def module() -> Any:
    """The connector's module. vLLM warns while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("kvtier.connectors.vllm.connector")


def made(module: Any, role: str) -> Any:
    """A connector of an engine with one worker, as vLLM makes it."""
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_connector_extra_config={})
    config = SimpleNamespace(
        max_concurrent_batches=1,
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(world_size=1, rank=0, data_parallel_index=0),
    )
    return module.KVTierConnector(config, getattr(module.KVConnectorRole, role), SimpleNamespace(num_blocks=4))


@pytest.fixture
def steps(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What a connector does about its log while it is made, in order."""
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 64\nenable_p2p: true\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "lmcache.yaml"))
    monkeypatch.setattr(module.layout, "block_tokens", lambda _: 16)
    done: list[Any] = []
    monkeypatch.setattr(module.versions, "log_like_vllm", done.append)
    monkeypatch.setattr(module, "tell", lambda remarks: done.append(list(remarks)))
    return done


def test_the_scheduler_says_what_was_read_once_its_log_is_vllms(module: Any, steps: list[Any]) -> None:
    made(module, "SCHEDULER")
    level, told = steps
    assert level == "INFO"
    assert [(remark.level, remark.text.partition("=")[0]) for remark in told] == [
        (logging.INFO, "LMCache key chunk_size"),
        (logging.WARNING, "LMCache keys that kvtier does not serve: enable_p2p"),
    ]


def test_workers_do_not_say_it_again(module: Any, steps: list[Any]) -> None:
    made(module, "WORKER")
    assert steps == ["INFO"]


@pytest.mark.parametrize("by_layer", [True, False])
def test_loads_by_layer_need_the_hook_that_confirms_them(
    module: Any, steps: list[Any], monkeypatch: pytest.MonkeyPatch, by_layer: bool
) -> None:
    monkeypatch.setattr(module, "_BY_LAYER", by_layer)
    worker = made(module, "WORKER")
    layered: list[bool] = []
    worker._worker = SimpleNamespace(load=lambda _, **how: layered.append(how["layered"]))
    worker.bind_connector_metadata(module.StepMetadata(None))
    mode = SimpleNamespace(name="PIECEWISE")
    worker.start_load_kv(SimpleNamespace(cudagraph_runtime_mode=mode, attn_metadata={"layer": None}))
    assert layered == [by_layer]


@pytest.mark.parametrize("by_layer", [True, False])
def test_slots_are_cut_by_layer_only_where_such_loads_are_confirmed(
    module: Any, steps: list[Any], monkeypatch: pytest.MonkeyPatch, by_layer: bool
) -> None:
    monkeypatch.setattr(module, "_BY_LAYER", by_layer)
    cuts, given = ((4096, 8192), (1, 2)), dict[str, Any]()
    layout = SimpleNamespace(slot_bytes=8192)
    monkeypatch.setattr(module.layout, "chunk_layout", lambda *_: (layout, ((0, True),)))
    monkeypatch.setattr(module.layout, "layer_cuts", lambda *_: cuts)
    monkeypatch.setattr(module.layout, "why_no_prefixes", lambda *_: "")
    monkeypatch.setattr(module, "assemble", lambda *_: None)
    monkeypatch.setattr(module, "SchedulerHalf", lambda *_, **more: given.update(more))
    made(module, "SCHEDULER").set_xfer_handshake_metadata_pp_aware({})
    assert given["cuts"] == (cuts if by_layer else None)


@pytest.mark.parametrize("workers_first", [True, False])
def test_a_worker_gives_empty_statistics_where_the_scheduler_is_not_asked_without(
    module: Any, steps: list[Any], monkeypatch: pytest.MonkeyPatch, workers_first: bool
) -> None:
    monkeypatch.setattr(module, "_WORKERS_FIRST", workers_first)
    given = made(module, "WORKER").get_kv_connector_stats()
    assert given == (module.TierStats() if workers_first else None)
    assert made(module, "SCHEDULER").get_kv_connector_stats() is None


def test_the_newest_vllm_has_every_hook(module: Any) -> None:
    assert module._BY_LAYER
    assert not module._WORKERS_FIRST
    assert module.versions.limits(module.KVConnectorBase_V1) == []
