"""What the connector's class decides itself: who of an engine's processes speaks, and what is off
in an older vLLM."""

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.autoconfig.facts import GIB, Facts, Memory, Model
from kvtier.autoconfig.plan import make_plan
from kvtier.core.fact import known
from kvtier.load_policy.prefill import PrefillTime

pytestmark = pytest.mark.vllm
module: Any = importlib.import_module("kvtier.connectors.vllm.connector")


def made(role):
    """A connector of an engine with one worker, as vLLM makes it."""
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_connector_extra_config={})
    config = SimpleNamespace(
        max_concurrent_batches=1,
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            world_size=1, rank=0, data_parallel_index=0, nnodes_within_dp=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    return module.KVTierConnector(
        config, getattr(module.KVConnectorRole, role), SimpleNamespace(num_blocks=4)
    )


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """What a connector does about its log while it is made, in order."""
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 64\nenable_p2p: true\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "lmcache.yaml"))
    from kvtier.connectors.vllm.groups import Group, Kind

    groups = module.layout.KeptGroups((Group(0, Kind.FULL, 16),), (frozenset(),))
    monkeypatch.setattr(module.layout, "kept", lambda *_, **__: groups)
    done: list[Any] = []
    monkeypatch.setattr(module.versions, "log_like_vllm", done.append)
    monkeypatch.setattr(module, "tell", lambda remarks: done.append(list(remarks)))
    return done


def test_an_engine_that_is_planned_starts_with_the_plans_prefill_time(steps, monkeypatch):
    facts = Facts(
        memory=Memory(available=known(100 * GIB, "test"), cgroup_headroom=known(1 << 62, "test")),
        model=Model(
            active_parameters=known(7_000_000_000, "test"), attention_flops=known(200_000, "test")
        ),
    )
    plan = make_plan(facts)
    monkeypatch.setenv("KVTIER_AUTO", "true")
    monkeypatch.setattr("kvtier.autoconfig.start.plan_for_engine", lambda *_, **__: plan)
    _, prefill = made("SCHEDULER")._planned()
    assert plan.prefill.per_depth > 0
    assert prefill.seconds(512, 30_000) == plan.prefill.seconds(512, 30_000)


@pytest.mark.parametrize("auto", [True, False])
def test_an_engine_plans_no_tiers_of_a_server_and_none_without_the_switch(
    steps, monkeypatch, caplog, auto
):
    """The server may have all the room by then. The estimate of the prefill is the engine's own."""
    if auto:
        monkeypatch.setenv("KVTIER_AUTO", "true")
        monkeypatch.setenv("KVTIER_SERVER", "unix:///run/kvtier/kvtier.sock")
    estimate = PrefillTime(1e-4, 1e-9)
    monkeypatch.setattr("kvtier.autoconfig.start.prefill_for_engine", lambda _: estimate)
    monkeypatch.setattr(
        "kvtier.autoconfig.start.plan_for_engine", lambda *_: pytest.fail("it does")
    )
    connector = made("SCHEDULER")
    with caplog.at_level(logging.INFO, "kvtier"):
        config, prefill = connector._planned()
    assert config is connector._config
    assert prefill.seconds(512, 30_000) == estimate.seconds(512, 30_000)
    told = "the tiers are the server's (unix:///run/kvtier/kvtier.sock)" in caplog.text
    assert told == auto


def test_the_scheduler_says_what_was_read_once_its_log_is_vllms(steps):
    made("SCHEDULER")
    level, told = steps
    assert level == "INFO"
    assert [(remark.level, remark.text.partition("=")[0]) for remark in told] == [
        (logging.INFO, "LMCache key chunk_size"),
        (logging.WARNING, "LMCache key enable_p2p"),
    ]


def test_workers_do_not_say_it_again(steps):
    made("WORKER")
    assert steps == ["INFO"]


@pytest.mark.parametrize("names", [True, False])
def test_a_failed_load_is_told_by_name_or_where_vllm_cannot_by_its_blocks(
    steps, monkeypatch, names
):
    monkeypatch.setattr(module, "_NAMES_FAILED_LOADS", names)
    worker = made("WORKER")
    worker._worker = SimpleNamespace(
        transfers=lambda: ({"one", "two"}, {"two"}),
        ends=SimpleNamespace(take_blocks=lambda: ({4, 5}, {6})),
    )
    told = worker.get_transfer_results(set())
    assert (told.finished_recving, told.failed_recving) == ({"one", "two"}, {"two"})
    assert worker.get_finished(set()) == (None, {"one", "two"})
    assert worker.get_block_ids_with_load_errors() == ({6} if names else {4, 5, 6})


def test_a_store_that_cannot_be_made_in_a_running_engine_turns_the_cache_off(
    steps, monkeypatch, caplog
):
    """Beside other connectors layouts come with a report: then nothing may end the engine."""
    connector = made("SCHEDULER")
    layouts = {(0, 0): module.RankLayout(4096, {"device": "cpu", "row_bytes": [4096]})}
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    assert connector.get_num_new_matched_tokens(object(), 0) == (None, False)
    assert connector.has_pending_push_work()
    assert connector.build_connector_meta(object()).asks_layout

    def refused(*_):
        raise module.KVTierError("no room for a chunk")

    monkeypatch.setattr(module, "why_no_prefixes", lambda *_: "")
    monkeypatch.setattr(module.layout, "chunk_layout", refused)
    connector.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta=module.StepReport(layouts=layouts))
    )
    assert connector.get_num_new_matched_tokens(object(), 0) == (0, False)
    assert not connector.has_pending_push_work()
    assert (
        caplog.text.count("kvtier keeps and serves nothing in this engine: no room for a chunk")
        == 1
    )


@pytest.mark.parametrize("workers_first", [True, False])
def test_a_worker_gives_empty_statistics_where_the_scheduler_is_not_asked_without(
    steps, monkeypatch, workers_first
):
    monkeypatch.setattr(module, "_WORKERS_FIRST", workers_first)
    given = made("WORKER").get_kv_connector_stats()
    assert given == (module.TierStats() if workers_first else None)
    assert made("SCHEDULER").get_kv_connector_stats() is None


def test_the_newest_vllm_has_every_hook():
    assert module._NAMES_FAILED_LOADS
    assert not module._WORKERS_FIRST
    assert module.versions.limits(module.KVConnectorBase_V1) == []
