"""The curve of all sizes is exact. Its knee is where a trace has one, and what it says is enough is
enough for a Store with the production rules."""

import itertools
import random

import pytest

from kvtier.bench.traces.curve import POINT, Curve
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Cache, simulate, unhinted
from kvtier.core.chunk import ChunkKey


def requests(runs):
    return [
        Request(float(at), tuple(ChunkKey(f"{each:040}".encode()) for each in run))
        for at, run in enumerate(runs)
    ]


def rounds(documents, times, chunks=4):
    """So many documents, each asked for in turn, so many times."""
    return [[1000 * each + at for at in range(chunks)] for each in range(documents)] * times


def conversations(count, seed):
    draw, fresh, runs = random.Random(seed), itertools.count(10), list[list[int]]()
    for _ in range(count):
        base = draw.choice(runs[-50:]) if runs and draw.random() < 0.7 else [1, 2]
        keep = draw.randint(1, len(base)) if draw.random() < 0.2 else len(base)
        runs.append([*base[:keep], *itertools.islice(fresh, draw.randint(1, 8))])
    return runs


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_hits_what_a_store_with_lru_of_each_size_hits(seed):
    trace = requests(conversations(400, seed))
    curve = Curve(trace)
    for slots in (1, 2, 7, 30, 100, 101, 500, curve.largest - 1, curve.largest, 10 * curve.unique):
        real = simulate(unhinted(trace), Cache(slots, policy="lru"))
        assert round(curve.ratio(slots) * curve.asked) == real.hits, slots
    assert curve.ratio(curve.largest - 1) < curve.ratio(curve.largest) == curve.ratio(10**9)


def test_documents_that_come_round_have_their_knee_at_the_room_for_all_of_them():
    curve = Curve(requests(rounds(50, 10)))
    assert (curve.knee(), curve.enough(10**9), curve.largest) == (200, 200, 200)
    assert curve.ratio(199) < curve.ratio(200) == pytest.approx(0.9)


def test_what_is_enough_is_enough_for_two_tiers_with_the_production_rules():
    trace = requests(conversations(4000, 5))
    curve = Curve(trace)
    ram = curve.enough(curve.knee() // 2)
    nvme = curve.enough(10**9, ram)
    real = simulate(unhinted(trace), Cache(ram, nvme))
    assert nvme > ram
    assert real.hits / real.asked >= curve.ratio(curve.knee(ram)) - 2 * POINT
