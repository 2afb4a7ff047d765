"""A server's own counts as a document and as Prometheus' text. The dashboard and the alerts name
nothing else."""

import asyncio
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from kvtier.admin import forms, prometheus, status
from kvtier.admin import http as admin
from kvtier.admin.places import bind
from kvtier.admin.status import EVERY_S, History
from kvtier.cli.top import Look, screen
from kvtier.core.lanes import Lane
from kvtier.core.lookup import Served as CoreServed
from kvtier.core.pool import Pool
from kvtier.eviction.adaptive import Adaptive
from kvtier.protocol import admin_proof
from kvtier.server import server
from kvtier.server.registry import SizeClasses
from kvtier.store.reports.zero_hits import ZeroHits
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from kvtier.tiers.away import whole_objects
from kvtier.tiers.base import ForwardingTier
from kvtier.tiers.nvme import index as nvme_index
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.redis import layout as redis_layout
from tests.admin_server import TOKEN
from tests.child_process import DEADLINE_S
from tests.clock import Clock
from tests.stores import SLOT, keys, save

ROOT = Path(__file__).parents[3]


class Peer:
    def __init__(self, leases):
        self.leases = leases


class Served(server.Server):
    def __init__(self, folder):
        self.size_classes = SizeClasses(lambda size: self._store(folder, size), lambda call: call())
        self.counts = Counter(accepted=3, dropped=1)
        self.ready = True
        self.trouble = {}
        self.started = 0.0
        self.connections = cast(Any, {Peer(2)})
        self.lingering = cast(Any, {Peer(1)})

    @staticmethod
    def _store(folder, size):
        lane = Lane("nvme", 1, urgent_bound=8, bound=8)
        place = DiskPlace(folder / "nvme", 1 << 16, 1)
        return Store(Pool(2, size), [(DiskSet([place], size), lane)])

    def size_class(self):
        return self.size_classes.get(SLOT).result(DEADLINE_S)


class OnTwoDisks(Served):
    @staticmethod
    def _store(folder, size):
        lane = Lane("nvme", 2, urgent_bound=8, bound=8)
        places = [DiskPlace(folder / f"disk{at}", 1 << 16, 2) for at in range(2)]
        tier = ForwardingTier(DiskSet(places, size, clock=Clock()))
        return Store(Pool(2, size), [(tier, lane)])


@pytest.fixture
def on_two_disks(tmp_path):
    served = OnTwoDisks(tmp_path)
    yield served
    served.size_classes.close(10.0)


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path)
    yield served
    served.size_classes.close(10.0)


def load(store, run):
    with store.load(run) as lease:
        while lease.poll().coming:
            store.wait(1.0)
        return lease.poll().ready


def settled(store, name, count):
    while store.stats().get(name, 0) < count:
        store.wait(0.01)


def samples(stats):
    """Name and label values -> value, without the size class's label."""
    text = prometheus.exposition(stats).decode()
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "slot_bytes"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def used(served):
    """Two chunks in RAM and four on disk. One load from RAM, two from the disk, one miss, one
    refusal."""
    size_class = served.size_class()
    size_class.owner(bytes(32), "tenant")
    store = size_class.store
    save(store, keys(1, 2))
    assert load(store, keys(1)) == 1
    settled(store, "nvme_stored", 2)
    save(store, keys(3, 4))
    settled(store, "nvme_stored", 4)
    assert load(store, keys(1, 2)) == 2
    assert load(store, keys(9)) == 0
    return store


def test_the_document_the_metrics_and_the_screen_say_what_happened(served):
    assert not any(name.startswith("kvtier_held") for name, *_ in samples(status.read(served)))
    used(served)
    stats, shown = status.read(served), samples(status.read(served))
    assert shown["kvtier_ready",] == 1
    assert (shown["kvtier_held_chunks", "ram"], shown["kvtier_held_bytes", "nvme"]) == (2, 4 * SLOT)
    assert (shown["kvtier_loads_total", "ram"], shown["kvtier_loads_total", "nvme"]) == (1, 2)
    assert (shown["kvtier_asked_chunks_total",], shown["kvtier_slots", "ready"]) == (4, 2)
    assert shown["kvtier_connection_events_total", "dropped"] == 1
    assert (shown["kvtier_leases",], shown["kvtier_lane_queued", "writes", "nvme"]) == (3, 0)
    frame = screen(Look(stats))
    assert "75.0% of 4 chunks asked for were hits" in frame
    assert re.search(r"^nvme +4 ", frame, re.MULTILINE)
    assert stats.connections == status.ConnectionStatus(1, 1, 3, 3, 0, 1, 0)
    (size_class,) = stats.size_classes
    found = (size_class.slot_bytes, size_class.slots, size_class.asked, size_class.namespaces)
    assert found == (SLOT, 2, 4, 1)
    ram, nvme = size_class.tiers
    assert (ram.held, ram.loads, ram.stores, ram.lane) == (2, 1, 4, None)
    assert (nvme.held, nvme.loads, nvme.stores, nvme.misses) == (4, 2, 4, 0)
    assert (nvme.bytes_read, nvme.bytes_written) == (2 * SLOT, 4 * SLOT)
    assert nvme.lane == status.LaneStatus(0, 0, 0)
    assert stats.memory.process > 1 << 20
    assert stats.memory.pools >= 2 * SLOT


def test_what_was_not_there_is_counted_by_reason(served):
    store = used(served)
    store.decline(keys(1), "slower")
    store.invalidate(keys(3, 4))
    assert load(store, keys(3, 4)) == 0
    (size_class,) = status.read(served).size_classes
    assert (size_class.missed, size_class.declined) == ({"cold": 1, "forgotten": 2}, {"slower": 1})
    shown = samples(status.read(served))
    assert shown["kvtier_missed_chunks_total", "cold"] == 1
    assert shown["kvtier_missed_chunks_total", "forgotten"] == 2
    assert shown["kvtier_declined_chunks_total", "slower"] == 1
    assert "computed: 50% forgotten, 25% cold, 25% slower" in screen(Look(status.read(served)))


def test_each_of_several_disks_has_its_counts_and_one_that_fails_is_named(on_two_disks, tmp_path):
    store, bad = used(on_two_disks), tmp_path / "disk0"
    for first in range(10, 30, 2):
        save(store, keys(first, first + 1))
        settled(store, "nvme_stored", first - 4)
    os.truncate(bad / "slots.kvtier", 0)
    for first in range(10, 30, 2):
        load(store, keys(first, first + 1))
    report = status.read(on_two_disks)
    shown = samples(report)

    def told(what):
        return [shown[f"kvtier_disk_{what}", str(tmp_path / f"disk{at}"), "nvme"] for at in (0, 1)]

    assert told("away") == [1, 0] and told("failed_writes_total") == [0, 0]
    failed, none = told("failed_reads_total")
    assert failed >= 3 and none == 0
    left, held = told("held_chunks")
    assert left == 0 and held >= 8
    for what in ("read", "written"):
        parts = told(f"{what}_bytes_total")
        assert sum(parts) == shown[f"kvtier_{what}_bytes_total", "nvme"] and min(parts) > 0
    (said,) = report.trouble
    assert f"{bad} (its reads or writes fail" in said and "disk1" not in said
    assert f"TROUBLE: {said}" in screen(Look(report))
    on_disk = report.size_classes[0].tiers[1].disks
    assert [(one.disk, one.away) for one in on_disk] == [(str(bad), True), (on_disk[1].disk, False)]


def test_what_other_sizes_and_policies_would_hit_is_shown(tmp_path):
    served, spare = Served(tmp_path), ManualLane(bound=1)
    store = Store(Pool(8, SLOT), orders=Adaptive().orders(), spare=spare)
    spare.run()
    served.size_classes = SizeClasses(lambda size: store, lambda call: call())
    served.size_class()
    assert "under LRU" not in screen(Look(status.read(served))), "nothing was asked for yet"
    for _ in range(3):
        for token in range(12):
            store.load(keys(token)).close()
            spare.run()
    (size_class,) = status.read(served).size_classes
    curve = size_class.tiers[0].what_if
    assert curve == {"0.25": 0, "0.5": 0, "1": 0, "2": 0.666667, "4": 0.666667, "8": 0.666667}
    found = (size_class.policy, size_class.policy_asked, size_class.policy_hits["lru"])
    assert found == ("lru", 36, 0)
    shown = samples(status.read(served))
    assert shown["kvtier_whatif_hit_ratio", "2", "ram"] == 0.666667
    assert shown["kvtier_policy_asked_chunks_total",] == 36
    rules = (shown["kvtier_policy_rules", "lru"], shown["kvtier_policy_rules", "keep90_4x"])
    assert rules == (1, 0)
    assert shown["kvtier_policy_hit_chunks_total", "lru"] == 0
    assert shown["kvtier_policy_saved_chunks_total", "lru"] == 0
    frame = screen(Look(status.read(served)))
    assert (
        "ram of 32 KiB under LRU, vLLM's own hits among them: +32 KiB = +66.7 points; "
        "beyond 64 KiB it adds nothing\n" in frame
    )
    assert (
        "policy: lru rules, 0.0% of all 36 chunks of prompts in RAM, vLLM's own hits among them; "
        "the others, in points (and saved compute): keep90_4x +0.0 (0.00 x), keep" in frame
    )
    served.size_classes.close(10.0)


def test_an_hour_is_kept_and_no_more(served):
    store, history = used(served), History(served)
    history.keep()
    store.served(CoreServed(100, {"ram": 40}, keys(9), 10))
    for _ in range(400):
        history.keep()
    kept = history.told().moments
    assert len(kept) * EVERY_S == 3610.0
    assert (kept[-1].asked_tokens, kept[-1].hit_tokens) == (100, 40)
    assert kept[-1].loads.keys() == {"ram", "nvme"}


@pytest.mark.parametrize(
    ("engines", "models"),
    [
        (["process 7"], []),
        (["/models/tiny/, process 7", "tiny, process 8"], ["tiny"]),
        ([f"org/m{number}, process 7" for number in range(9)], ["m8", "m7", "m6", "m5"]),
    ],
)
def test_the_models_that_came_last_are_named(served, engines, models):
    size_class = served.size_class()
    for number, engine in enumerate(engines):
        size_class.owner(bytes([number]) * 32, "", engine)
    report = status.read(served)
    assert report.size_classes[0].models == models
    named = {key for key in samples(report) if key[0] == "kvtier_model_info"}
    assert named == {("kvtier_model_info", name) for name in models}


def test_a_late_hit_saves_more_compute_than_an_early_one_and_all_say_it(served):
    store = used(served)
    assert "saved compute -" in screen(Look(status.read(served))), "no prompt got its blocks"
    early, late = 5000, 30_500  # the second follows as many tokens that the engine has
    store.served(CoreServed(early, {"ram": early}, keys(9), 10))
    store.served(CoreServed(late, {}, keys(9), 10, late))
    shown = samples(status.read(served))
    saved, asked = (shown[f"kvtier_{what}_compute_tokens_total",] for what in ("saved", "asked"))
    assert saved == pytest.approx(early + early * early / 2 / 30_500, abs=1)
    assert asked - saved == pytest.approx(late + late * 1.5, abs=1), (
        "each takes 2 to 3 times as long"
    )
    frame = screen(Look(status.read(served)))
    assert "hit rate 14.1% of 35,500 tokens" in frame and "saved compute 6.6%" in frame


def test_a_server_that_never_hits_says_why_everywhere(served, caplog):
    size_class, clock = served.size_class(), Clock()
    store = size_class.store
    size_class.zero_hits = ZeroHits.of(store.status(), store.pool.slots, clock)
    save(size_class.store, keys(1, 2))
    for number in range(2000):
        assert load(size_class.store, keys(7, number)) == 0
    size_class.check_hits()
    assert samples(status.read(served))["kvtier_zero_hits",] == 0, "too soon"
    clock.now = 600.0
    size_class.check_hits()
    size_class.check_hits()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "0 of 4,000 chunks asked for were hits in 10 min: 100% cold: never seen before"
    )
    assert samples(status.read(served))["kvtier_zero_hits",] == 1
    assert f"NO HITS: {said}" in screen(Look(status.read(served)))
    assert load(size_class.store, keys(1)) == 1
    size_class.check_hits()
    assert samples(status.read(served))["kvtier_zero_hits",] == 0


def test_every_series_is_there_before_anything_happens(served):
    served.size_class()
    there = samples(status.read(served))
    tokens = [f"{what}_tokens_total" for what in ("asked", "ideal", "asked_compute")]
    for name in (*tokens, "saved_compute_tokens_total", "lookup_seconds_count"):
        assert there[f"kvtier_{name}",] == 0
    for tier in ("ram", "nvme"):
        for name in ("hit_tokens_total", "evictions_total", "written_bytes_total"):
            assert there[f"kvtier_{name}", tier] == 0
        assert there["kvtier_whatif_hit_ratio", "0.25", tier] == 0
    for name in ("lifetime_written_bytes", "drive_writes_per_day", "open_breakers"):
        assert there[f"kvtier_{name}", "nvme"] == 0 and (f"kvtier_{name}", "ram") not in there
    for reason in ("cold", "evicted", "corrupt", "forgotten", "saving", "tier_down"):
        assert there["kvtier_missed_chunks_total", reason] == 0
    assert not any(name.startswith("kvtier_disk_") for name, *_ in there), "there is one folder"


def names_in(text):
    return set(re.findall(r"kvtier_[a-z_]+", text))


def known(served):
    used(served)
    served.size_class().owner(bytes(32), "", "tiny, process 7")
    store = served.size_class().store
    store.decline(keys(1), "slow")
    return {name for name, *_ in samples(status.read(served))}


def test_the_dashboard_names_metrics_that_exist(on_two_disks):
    board = json.loads((ROOT / "deploy/grafana/kvtier.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = names_in(" ".join(queries))
    assert asked <= known(on_two_disks) | {"kvtier_sglang_pages_total", "kvtier_tier_chunks_total"}
    assert len(asked) > 20
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_the_alerts_name_metrics_that_exist(served):
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    there = known(served)
    for rule in group["rules"]:
        assert names_in(rule["expr"]) <= there, rule["alert"]
        assert names_in(rule["expr"])
        assert {"summary", "do"} <= rule["annotations"].keys()


def test_the_page_for_operations_names_what_exists_and_every_alert(on_two_disks):
    text = (ROOT / "deploy/OPERATIONS.md").read_text()
    of_an_engine = {f"kvtier_server_{name}_total" for name in ("unanswered", "lost")}
    there = known(on_two_disks) | of_an_engine
    histograms = {name.removesuffix("_bucket") for name in there if name.endswith("_bucket")}
    assert names_in(text) <= there | histograms
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    assert set(re.findall(r"`(Kvtier\w+)`", text)) == {rule["alert"] for rule in group["rules"]}
    _, table = text.split("## Incidents")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert all(len(row) == 4 for row in rows) and all(names_in(row[1]) for row in rows[2:])


def test_the_page_for_operations_names_the_formats():
    text = (ROOT / "deploy/OPERATIONS.md").read_text()
    assert f"| NVMe (`index.kvtier`) | {nvme_index.FORMAT_VERSION} |" in text
    assert f"| Redis (`...:{redis_layout.FORMAT_VERSION}:...`) |" in text
    assert f"| bucket (`kvtier-{whole_objects.FORMAT_VERSION}/`) |" in text


async def _asked(served, path, *, far=False, token=""):
    """What is answered at a port of this host, or (``far``) at one that others reach too."""
    served.loop = asyncio.get_running_loop()
    port = bind("http://127.0.0.1:0", token=False, tls=None)._replace(local=not far)
    async with (
        admin.beside(served, port, TOKEN.encode(), admin.Around((), forms.Configuration([]))),
        ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.get(port.url + path) as answer,
    ):
        return answer.status, await answer.json()


def test_a_server_that_starts_or_stops_is_live_and_not_ready(served):
    served.ready = False
    not_ready = {"live": True, "ready": False, "trouble": []}
    assert asyncio.run(_asked(served, "/healthz/live")) == (200, not_ready)
    assert asyncio.run(_asked(served, "/healthz/ready")) == (503, not_ready)
    assert asyncio.run(_asked(served, "/healthz")) == (503, not_ready)
    served.ready = True
    assert asyncio.run(_asked(served, "/healthz"))[0] == 200


@pytest.mark.parametrize("path", ["/healthz", "/healthz/live", "/healthz/ready"])
def test_beyond_loopback_only_who_has_the_token_is_told_what_is_wrong(served, path):
    said = ["redis at 10.0.0.7:6379 is away", "engine gpu-7 is not followed"]
    served.trouble = {str(at): words for at, words in enumerate(said)}
    hidden = ["2 in trouble; ask with the token, or see the server's log"]

    def trouble(**how):
        status_, health = asyncio.run(_asked(served, path, **how))
        assert status_ == (200 if served.ready or path.endswith("live") else 503)
        return health["trouble"]

    assert trouble() == trouble(far=True, token=TOKEN) == said
    assert trouble(far=True) == trouble(far=True, token=TOKEN[1:]) == hidden
    served.trouble = {}
    assert trouble(far=True) == []


def test_a_clock_that_is_set_makes_no_old_request_valid_again(served, monkeypatch):
    """Two hours later, when it was forgotten that the request was served, the clock goes back. Who
    signs again is served at once."""
    clock, steady = Clock(1e9), Clock()
    monkeypatch.setattr("kvtier.admin.http.time.time", clock)
    monkeypatch.setattr("kvtier.admin.http.time.monotonic", steady)
    path = "/v1/configuration"

    async def scenario():
        served.loop, told = asyncio.get_running_loop(), list[int]()
        port = bind("http://127.0.0.1:0", token=False, tls=None)
        around = admin.Around((), forms.Configuration([]))
        async with admin.beside(served, port, TOKEN.encode(), around), ClientSession() as session:

            async def ask(headers):
                async with session.get(port.url + path, headers=headers) as answer:
                    told.append(answer.status)
                    return answer.headers[admin_proof.START_HEADER]

            def sign(start):
                signed = admin_proof.signed(TOKEN.encode(), "GET", path, b"", clock(), start)
                return {"Authorization": signed}

            first = sign(await ask({}))
            await ask(first)
            for both in (clock, steady):
                both.now += 7200.0
            await ask(sign(await ask({})))  # it forgets what was served long ago
            clock.now -= 7200.0
            await ask(sign(await ask(first)))
            clock.now += 20.0  # as clocks are nudged
            await ask(sign(await ask({})))
        return told

    assert asyncio.run(scenario()) == [401, 200, 401, 200, 401, 200, 401, 200]


def test_a_bug_is_an_answer_in_words(served, caplog):
    del served.started
    status_, problem = asyncio.run(_asked(served, "/v1/stats"))
    assert (status_, problem["what"]) == (500, "internal error")
    assert "a bug: GET /v1/stats" in caplog.text
