"""What an engine's own Store shows on vLLM's /metrics: the names and values that a server's
/metrics has."""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvtier.admin import prometheus
from kvtier.admin.status import ConnectionStatus, MemoryStatus, Stats
from kvtier.assemble import assemble
from kvtier.client.client import Client
from kvtier.config.keys import places
from kvtier.config.load import load
from kvtier.connectors.vllm.stats import Figures, TierMetrics, TierStats
from kvtier.connectors.vllm.versions import hit_sources
from kvtier.core.chunk import ChunkLayout
from kvtier.core.lanes import Lane
from kvtier.core.lookup import Served
from kvtier.core.pool import Pool
from kvtier.eviction.adaptive import Adaptive
from kvtier.started import Started
from kvtier.store.reports import status
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from tests.clock import Clock

pytestmark = pytest.mark.vllm

SLOT = 4096
LAYOUT = ChunkLayout(bytes(32), 1, 1, (SLOT,))
OWN_OF_A_SERVER = {
    "kvtier_namespaces",
    "kvtier_slots",
    "kvtier_zero_hits",
    "kvtier_missed_chunks",
    "kvtier_declined_chunks",
}
"""An engine tells hits and misses as vllm:kvtier_*, with the reasons that only it knows."""


class Shown:
    """vLLM's side: another process, which gets dictionaries."""

    def __init__(self, folder=None, **config):
        self.registry = CollectorRegistry()
        kinds = {
            kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)
        }
        extra = config | ({"nvme_path": str(folder), "nvme_bytes": 1 << 20} if folder else {})
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
        )
        self.metrics = TierMetrics(vllm_config, kinds, ["engine"], {0: ["0"], 1: ["1"]})

    def samples(self, engine="0"):
        return {
            (
                sample.name,
                *sorted(value for name, value in sample.labels.items() if name != "engine"),
            ): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.labels["engine"] == engine and not sample.name.endswith("_created")
        }


def servers(store):
    """The same Store as a server shows it."""
    nothing = ConnectionStatus(0, 0, 0, 0, 0, 0, 0)
    told = Stats("0", 0.0, True, [], MemoryStatus(0, 0), nothing, [status.read(store)], [])
    return {
        (
            sample.name,
            *sorted(value for name, value in sample.labels.items() if name != "slot_bytes"),
        ): sample.value
        for family in text_string_to_metric_families(prometheus.exposition(told).decode())
        for sample in family.samples
        if "slot_bytes" in sample.labels and family.name not in OWN_OF_A_SERVER
    }


@pytest.fixture
def store(tmp_path):
    lane = Lane("nvme", 1, urgent_bound=8, bound=8)
    place = DiskPlace(tmp_path / "nvme", 1 << 16, 1)
    store = Store(Pool(2, SLOT), [(DiskSet([place], SLOT), lane)])
    yield store
    store.close()


def keys(*tokens):
    return LAYOUT.keys(tokens)


def use(store, first):
    """Saves, spills, evictions, promotions, loads and misses. At rest afterwards."""
    for token in (first, first + 2):
        with store.save(keys(token, token + 1)) as lease:
            lease.commit()
        while store.stats()["nvme_stored"] < store.stats()["saved"]:
            store.wait(0.01)
    store.served(Served(30, {"ram": 5, "nvme": 10}, keys(first, 99), 10, 0))
    for run in (keys(first, first + 1), keys(first + 2), keys(99)):
        store.lookup(run)
        with store.load(run) as lease:
            while lease.poll().coming:
                store.wait(1.0)


def used_twice(store, folder):
    """What the engine shows of a store that it has used, and its samples."""
    shown, clock = Shown(folder), Clock()
    figures = Figures(store, clock)
    for first in (10, 20):
        use(store, first)
        clock.now += 1.0
        shown.metrics.observe(TierStats(data=figures.new()).to_dict())
    ours, theirs = shown.samples(), servers(store)
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)
    return shown, ours


def test_an_engine_shows_what_a_server_shows(store, tmp_path):
    shown, ours = used_twice(store, tmp_path)
    assert ours["kvtier_loads_total", "nvme"] > 0 and ours["kvtier_evictions_total", "ram"] > 0
    assert ours["kvtier_hit_tokens_total", "nvme"] == 20
    assert (ours["kvtier_asked_tokens_total",], ours["kvtier_ideal_tokens_total",]) == (60, 50)
    assert ours["kvtier_lifetime_written_bytes", "nvme"] == 8 * SLOT
    assert ours["kvtier_drive_writes_per_day", "nvme"] == pytest.approx(8 / 14)
    assert not any(
        value for (name, *_), value in shown.samples("1").items() if "capacity" in name
    ), "another engine's"


def test_an_engine_shows_each_of_several_disks_whatever_its_folders_name(tmp_path):
    places = [DiskPlace(tmp_path / name, 1 << 16, 1) for name in ("disk0", "disk|1")]
    lane = Lane("nvme", 2, urgent_bound=8, bound=8)
    store = Store(Pool(2, SLOT), [(DiskSet(places, SLOT), lane)])
    ours = used_twice(store, tmp_path)[1]
    for place in places:
        assert ours["kvtier_disk_written_bytes_total", str(place.folder), "nvme"] > 0
        assert ours["kvtier_disk_away", str(place.folder), "nvme"] == 0
    store.close()


def test_an_engine_shows_what_other_sizes_and_settings_would_have_hit():
    """Ten prompts of six chunks come round in turn, in RAM with room for eight chunks."""
    spare, shown, clock = ManualLane(bound=4), Shown(), Clock()
    store = Store(Pool(8, SLOT), [], Adaptive().orders(), spare=spare)
    figures = Figures(store, clock)
    shown.metrics.observe(TierStats(data=figures.new()).to_dict())  # it is counted from now on
    clock.now += 1.1
    spare.run()
    assert not any(value for (name, *_), value in shown.samples().items() if "whatif" in name), (
        "nothing is known yet"
    )
    for first in [*range(100, 200, 10)] * 3:
        run = keys(*range(first, first + 6))
        store.load(run).close()
        with store.save(run) as lease:
            lease.commit()
        spare.run()
        clock.now += 1.1
        shown.metrics.observe(TierStats(data=figures.new()).to_dict())
    ours, theirs = shown.samples(), servers(store)
    assert ours["kvtier_whatif_hit_ratio", "1", "ram"] == 0
    assert ours["kvtier_whatif_hit_ratio", "8", "ram"] == pytest.approx(2 / 3, abs=1e-6)
    assert ours["kvtier_policy_asked_chunks_total",] == 180
    assert ours["kvtier_policy_rules", "lru"] == 1
    assert ours["kvtier_policy_hit_chunks_total", "lru"] == 0
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)
    assert {name for name, *_ in theirs} >= {
        "kvtier_whatif_hit_ratio",
        "kvtier_policy_hit_chunks_total",
        "kvtier_policy_rules",
    }
    store.close()


def test_what_vllm_has_added_up_in_between_is_the_same(store, tmp_path):
    """vLLM aggregates what comes while it does not look: counts are sums, gauges the last."""
    at_once, later, clock = Shown(tmp_path), Shown(tmp_path), Clock()
    figures, held = Figures(store, clock), TierStats()
    for first in (10, 20, 30):
        use(store, first)
        clock.now += 1.0
        told = TierStats(data=figures.new())
        at_once.metrics.observe(told.to_dict())
        held = held.aggregate(told)
    later.metrics.observe(held.to_dict())
    assert later.samples() == pytest.approx(at_once.samples())
    assert {"ram_held": 2, "nvme_held": 12}.items() <= held.reduce().items()
    assert not any("|" in name for name in held.reduce()), "vLLM's log has no room for histograms"


def test_series_are_there_before_the_first_step(tmp_path):
    there = Shown(tmp_path).samples()
    assert (
        there["kvtier_evictions_total", "nvme"] == there["kvtier_spill_seconds_count", "nvme"] == 0
    )
    assert there["kvtier_load_seconds_count", "ram"] == there["kvtier_lookup_seconds_count",] == 0
    assert (
        there["vllm:kvtier_missed_chunks_total", "salt"]
        == there["vllm:kvtier_loaded_chunks_total", "nvme"]
        == there["vllm:kvtier_hints_total", "bad"]
        == 0
    )
    assert ("kvtier_corrupt_chunks_total", "ram") not in there
    for name in ("asked_tokens_total", "ideal_tokens_total", "saved_compute_tokens_total"):
        assert there[f"kvtier_{name}",] == 0
    for name in ("hit_tokens_total", "capacity_bytes", "held_bytes", "written_bytes_total"):
        assert there[f"kvtier_{name}", "ram"] == there[f"kvtier_{name}", "nvme"] == 0
    for name in ("lifetime_written_bytes", "drive_writes_per_day", "open_breakers"):
        assert there[f"kvtier_{name}", "nvme"] == 0 and (f"kvtier_{name}", "ram") not in there
    assert there["kvtier_lane_queued", "nvme", "reads"] == 0
    assert there["kvtier_whatif_hit_ratio", "8", "ram"] == 0


def test_nothing_is_told_again_before_a_second_is_over_or_when_nothing_has_changed(store):
    clock = Clock()
    figures = Figures(store, clock)
    assert figures.new() and figures.new() == {}
    store.lookup(keys(1))
    clock.now += 1.1
    assert TierStats(data=figures.new()).reduce() == {"ram_held": 0, "nvme_held": 0}
    clock.now += 0.9
    use(store, 1)
    assert figures.new() == {}
    clock.now += 0.2
    assert any(name.startswith("times|spill|nvme") for name in figures.new())
    clock.now += 1.1
    assert figures.new() == {}


def test_an_engine_of_a_server_tells_what_it_sees_of_it(tmp_path):
    address = f"unix://{tmp_path}/no-such-socket"
    shown = Shown(server=address)
    config = load(env={}, flags={"server": address})
    client = assemble(Started(config), LAYOUT)
    assert isinstance(client, Client)
    try:
        client.counts.update(unanswered=3, lost=1)
        shown.metrics.observe(TierStats(data=Figures(client, Clock()).new()).to_dict())
        # Among other connectors the settings are not kvtier's alone, and nobody knows that a server
        # has the cache.
        unknown = Shown(connectors=[])
        unknown.metrics.observe(TierStats(data=Figures(client, Clock()).new()).to_dict())
    finally:
        client.close()
    assert unknown.samples()["kvtier_server_lost_total",] == 1
    there = shown.samples()
    assert (there["kvtier_server_unanswered_total",], there["kvtier_server_lost_total",]) == (3, 1)
    assert not any(name.startswith("kvtier_capacity") for name, *_ in there), (
        "tiers are the server's to tell"
    )


@pytest.mark.parametrize(
    "flags", [{}, {"nvme": True}, {"server": "tcp://127.0.0.1:1", "server_unencrypted": True}]
)
def test_places_are_the_tiers_that_are_made(flags, tmp_path):
    own = {"nvme_path": str(tmp_path), "nvme_bytes": 1 << 20} if flags.pop("nvme", False) else {}
    config = load(env={}, flags={"ram_bytes": 1 << 20} | flags | own)
    store = assemble(Started(config), LAYOUT)
    assert isinstance(store, Store)
    try:
        assert places(config) == [tier.tier for tier in status.read(store).tiers]
    finally:
        store.close()


def test_metrics_that_are_made_twice_in_a_process_do_not_meet(tmp_path):
    """vLLM takes its own out of Prometheus' registry before it makes them again. kvtier has to do
    it for its own."""
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    for _ in range(2):
        importlib.import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics()
        TierMetrics(
            config, {kind: kind for kind in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
        )
    assert REGISTRY.get_sample_value("kvtier_capacity_bytes", {"engine": "0", "tier": "ram"}) == 0
    Shown(tmp_path)
    assert (
        REGISTRY.get_sample_value("kvtier_capacity_bytes", {"engine": "0", "tier": "ram"}) is None
    )


def test_every_gauge_is_one_number_of_several_front_ends():
    """With ``--api-server-count`` each process has its own value. Prometheus shows them all, with
    process ids, unless it is told which one counts."""
    modes = dict[str, str]()

    def gauge(name, *words, multiprocess_mode="all", **more):
        modes[name] = multiprocess_mode
        more["registry"] = CollectorRegistry()
        return Gauge(name, *words, **more)

    registry = CollectorRegistry()
    kinds: dict[Any, Any] = {
        kind: partial(kind, registry=registry) for kind in (Counter, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    TierMetrics(config, {**kinds, Gauge: gauge}, ["engine"], {0: ["0"]})
    assert {"vllm:kvtier_zero_hits", "kvtier_capacity_bytes"} <= modes.keys()
    assert set(modes.values()) == {"mostrecent"}


def test_a_hit_comes_from_the_medium_that_its_tier_tells():
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    places = {"ram": 1, "nvme": 2, "redis": 4, "mooncake": 8, "object": 16, "remote": 32}
    assert hit_sources(places) == {
        CacheHitSource.HOST: 1,
        CacheHitSource.DISK: 2,
        CacheHitSource.P2P: 4 + 8,
        CacheHitSource.EXTERNAL_UNSPECIFIED: 16 + 32,
    }


def test_a_count_that_falls_takes_nothing_back_and_is_told_when_it_has_grown():
    clock, counts = Clock(), dict[str, int]()
    figures = Figures(SimpleNamespace(status=lambda: None, counts=counts), clock)
    told = list[float]()
    for counts["lost"] in (5, 3, 0, 6):
        clock.now += 1.0
        told += figures.new().values()
    assert told == [5, 1]
