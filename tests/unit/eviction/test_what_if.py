"""The curve of other sizes: equal to separate LRUs of those sizes, to the chunk. Bounded, and then
with its error."""

import random
from itertools import takewhile

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.pool import Pool
from kvtier.core.steps import PIECE_CHUNKS
from kvtier.eviction.what_if import SCALES, Curve
from kvtier.store.directory import Directory
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from tests.clock import Clock

SLOT = 4096


def prompts(count, seed):
    draw, runs = random.Random(seed), list[list[ChunkKey]]()
    for number in range(count):
        base = (
            draw.choice(runs[-60:])[: draw.randint(1, 30)] if runs and draw.random() < 0.7 else []
        )
        more = draw.randint(1, 12)
        runs.append(
            [
                *base,
                *(
                    ChunkKey(bytes([number % 256, number >> 8, at, seed]) * 10)
                    for at in range(more)
                ),
            ]
        )
    return runs


def lru_hits(room, runs):
    """Of a Directory of this size, used as a Store uses it."""
    directory, hits = Directory(room), 0
    for run in runs:
        hits += directory.ready_run(run)
        directory.used(run)
        keep, entries = frozenset(run), []
        for key in run:
            if directory.get(key) is None:
                entry = directory.reserve(key, keep)
                if entry is None:
                    break
                entries.append(entry)
        for entry in entries:
            directory.filled((entry,))
        directory.ordered(run)
    return hits


@pytest.mark.parametrize("room", [4, 16, 40, 100])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("spare", [0, 1 << 20])
def test_it_is_equal_to_separate_lrus_to_the_chunk(room, seed, spare, monkeypatch):
    monkeypatch.setattr("kvtier.eviction.what_if._SPARE_PLACES", spare)
    runs = prompts(400, seed)
    curve = Curve(room)
    for session, run in enumerate(runs):
        curve.seen(run, session)
    asked = sum(map(len, runs))
    found = [round(point.ratio * asked) for point in curve.points()]
    assert found == [lru_hits(int(room * scale), runs) for scale in SCALES]
    assert all(point.error == 0 for point in curve.points())


def plain_lru_hits(room, runs):
    """Of a list of chunks by recency, cut at ``room``: a hit ends at the first chunk that is not
    there."""
    held, hits = list[ChunkKey](), 0
    for run in runs:
        hits += len(list(takewhile(held.__contains__, run)))
        held = list(dict.fromkeys([*run, *held]))[:room]
    return hits


@pytest.mark.parametrize("seed", [1, 2])
def test_a_hit_ends_at_a_hole_where_chunks_do_not_follow_each_other(seed, monkeypatch):
    monkeypatch.setattr("kvtier.eviction.what_if._SPARE_PLACES", 0)
    draw = random.Random(seed)
    keys = [ChunkKey(draw.randbytes(40)) for _ in range(60)]
    runs = [draw.sample(keys, draw.randint(1, 6)) for _ in range(300)]
    curve = Curve(8)
    for session, run in enumerate(runs):
        curve.seen(run, session)
    asked = sum(map(len, runs))
    found = [round(point.ratio * asked) for point in curve.points()]
    assert found == [plain_lru_hits(int(8 * scale), runs) for scale in SCALES]


def test_it_is_bounded_and_says_how_far_it_may_be_off():
    whole, sample = Curve(12_500), Curve(50_000)
    assert (whole.part, sample.part) == (1.0, 0.25)
    draw = random.Random(1)
    runs = [ChunkKey(draw.randbytes(40)) for _ in range(40_000)]
    asked = 0
    for number in range(20_000):
        run = [draw.choice(runs) for _ in range(3)]
        asked += 3
        sample.seen(run, number)
    assert len(sample._places) <= 100_000
    assert 0.2 * asked < sum(sample._asked) < 0.3 * asked
    assert all(0 < point.error < 0.05 for point in sample.points() if point.ratio)


def test_chunks_that_are_used_all_the_time_take_no_more_room():
    curve, draw = Curve(1000), random.Random(1)
    cold = [ChunkKey(draw.randbytes(40)) for _ in range(3000)]
    hot = [ChunkKey(draw.randbytes(40)) for _ in range(10)]
    curve.seen(cold, 0)
    for _ in range(3000):
        curve.seen(hot, 1)
        assert len(curve._keys) == len(curve._taken) < 2 * 3010 + 4096 + 4000
    assert list(filter(None, curve._keys)) == [*reversed(cold), *reversed(hot)]
    assert curve._counts == [250, 500, 1000, 2000, 3010, 3010]


def test_before_anything_is_asked_there_is_no_curve():
    assert Curve(10).points() == []


def test_a_store_keeps_one_of_each_place_as_long_as_it_is_read():
    spare, clock = ManualLane(bound=1), Clock()
    store = Store(Pool(8, SLOT), spare=spare, clock=clock)
    spare.run()

    def drive(runs):
        for run in runs:
            with store.load(run):
                pass
            spare.run()

    assert store.follower.read_curve("ram") == [], "the first reader begins it"
    drive(prompts(40, 3))
    curve = Curve(8)
    for session, run in enumerate(prompts(40, 3)):
        curve.seen(run, session)
    assert store.follower.read_curve("ram") == curve.points() != []
    clock.now += 601
    drive(prompts(1, 3))
    assert store.follower.read_curve("ram") == [], "nobody has read it for ten minutes"
    drive(prompts(40, 3))
    assert store.follower.read_curve("ram") == curve.points(), "it begins anew"


def test_a_long_prompt_is_followed_in_pieces_with_the_same_result():
    runs = [*prompts(3, 3), [ChunkKey(bytes([at % 251, at >> 8]) * 20) for at in range(700)]]
    curve = Curve(100)
    for number, run in enumerate([*runs, *runs]):
        steps = sum(1 for _ in curve.seen.steps(run, number))
        assert steps > len(run) // PIECE_CHUNKS
    found = [round(point.ratio * 2 * sum(map(len, runs))) for point in curve.points()]
    assert found == [plain_lru_hits(int(100 * scale), [*runs, *runs]) for scale in SCALES]
