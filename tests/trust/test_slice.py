"""The slice of the trust suites that every change has to pass: what ``make trust`` runs, without
what other tests run (engines, parts, fuzz) and without the mutants. A figure that depends on the
code alone has to be the one that README tells.

``python -m tests.trust --only NAME`` runs one by hand, the module of each suite takes longer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache

import pytest

from kvtier.tiers.nvme.index import RECORD_BYTES
from tests.conftest import ROOT
from tests.trust.__main__ import SLICE, SUITES, Finding
from tests.trust.compared import differences
from tests.trust.corruption import SUPERBLOCK_BYTES

EVENTS = {
    "saved",
    "aborted saves",
    "served",
    "served from below",
    "erased",
    "engines died",
    "crashes",
    "power cuts",
    "closed in the middle",
    "clean restarts",
    "kept over a restart",
    "filled again",
    "opening refused",
}
FAULTS = {
    "write fails",
    "write short",
    "write torn",
    "write repeated",
    "read fails",
    "read damaged",
    "find fails",
    "plain slow",
    "bit rot",
    "a disk fails",
    "a disk hangs",
    "a disk vanishes",
    "a disk comes back empty",
    "disk slow",
    "disk full",
    "sync fails",
    "disk write fails",
    "disk write short",
    "disk write damaged",
    "disk read fails",
    "disk read short",
    "disk read damaged",
    "record write fails",
    "record write short",
    "redis connection lost",
    "redis answers too late",
    "redis goes away",
    "redis full",
    "redis evicts",
}
HEADER_BITS = 8 * 80
"""Of a value in Redis and of an object."""
MEMORY_GROWTH_KIB = 50_000


def simulated(found):
    assert found.seeds == SLICE.seeds
    assert found.detail["events"].keys() >= EVENTS, "what never happens is not tested"
    assert found.detail["injected"].keys() >= FAULTS


def killed(found):
    assert found.faults >= SLICE.kills
    kinds = {"server", "engine of a server", "engine with a store"}
    assert found.detail["by_kind"].keys() == kinds, "what never died is not tested"
    recovered = found.detail["chunks_recovered"]
    assert recovered["server"] > 0 and recovered["engine with a store"] > 0


def cut(found):
    assert found.cases == SLICE.cuts
    assert found.faults > 20 * SLICE.cuts
    chunks = found.detail["chunks"]
    assert min(chunks[what] for what in ("found", "served", "corrupt", "certain")) > SLICE.cuts


def damaged(bits):
    def check(found):
        assert found.cases >= found.faults >= bits

    return check


def fuzzed(found):
    assert found.cases >= SLICE.frames and found.faults > 100
    assert found.detail["counts"]["dropped"] > 100
    assert found.detail["memory_growth_kib"] <= MEMORY_GROWTH_KIB


CHECKS: dict[str, Callable[[Finding], None]] = {
    "kills": killed,
    "simulation": simulated,
    "cuts": cut,
    "nvme": damaged(SLICE.nvme_bits + 8 * (SUPERBLOCK_BYTES + RECORD_BYTES)),
    "redis": damaged(SLICE.redis_bits + HEADER_BITS),
    "objects": damaged(SLICE.object_bits + HEADER_BITS),
    "wire": fuzzed,
}
"""Suite -> that it did what it is for."""
MARKS = {"kills": [pytest.mark.redis, pytest.mark.whole], "redis": [pytest.mark.redis]}
"""``make test`` leaves out the kills, which take as long as all others."""
SUITE = pytest.mark.parametrize(
    "suite", [pytest.param(name, marks=MARKS.get(name, [])) for name in CHECKS]
)


@cache
def finding(suite):
    return SUITES[suite](SLICE)


@SUITE
@pytest.mark.timeout(2400)  # the kills alone take four minutes on a quick host
def test_no_promise_is_broken(suite, caplog):
    caplog.set_level("CRITICAL")
    found = finding(suite)
    assert found.violations == []
    CHECKS[suite](found)


@SUITE
def test_the_figures_are_those_that_readme_tells(suite, caplog):
    caplog.set_level("CRITICAL")
    assert differences([asdict(finding(suite))], ROOT / "bench/results/trust.json") == []
