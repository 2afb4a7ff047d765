"""Why a chunk is missing: what is remembered of those that left, and of first chunks under other
salts. A cache that never hits is noticed once, and says why."""

import pytest

from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.store.directory import Directory
from kvtier.store.observer import Left
from kvtier.store.reports.miss_reasons import FirstChunks, Marks, Past
from kvtier.store.reports.zero_hits import ZeroHits, room
from tests.clock import Clock

LAYOUT = ChunkLayout(fingerprint({"model": "test"}), 1, 1, (4096,))


def keys(count, start=0):
    return LAYOUT.keys(range(start, start + count))


def test_a_chunk_nobody_saw_is_cold_and_one_that_left_says_how():
    past = Past(Directory(8))
    run = keys(4)
    for key, how in zip(run, Left, strict=False):
        past.missing(key, how)
    assert [past.why(key) for key in run] == ["evicted", "corrupt", "forgotten", "cold"]
    past.missing(run[0], Left.FORGOTTEN)
    assert past.why(run[0]) == "forgotten", "the last departure counts"


def test_memory_is_fixed_and_the_oldest_departures_fade():
    marks = Marks(64)
    every = keys(4000)
    for key in every:
        marks.put(key, Left.EVICTED)
    assert len(marks) == 64
    remembered = [bool(marks.get(key)) for key in every]
    assert sum(remembered) == 64, "no place is left empty, and none is used twice"
    assert not any(remembered[:3000])
    assert all(remembered[-4:]), "four newcomers find four places, even in one set"


@pytest.mark.parametrize(("room", "places"), [(1, 1 << 15), (50_000, 100_000), (10**9, 1 << 20)])
def test_it_remembers_twice_what_there_is_room_for_within_bounds(room, places):
    assert len(Past(Directory(1, [room - 1]))._marks) == places


PLAIN = (b"", b"", b"")


@pytest.mark.parametrize(
    ("saved", "asked", "part"),
    [
        (PLAIN, (b"tenant", b"", b""), "salt"),
        ((b"one", b"", b""), (b"two", b"", b""), "salt"),
        ((b"one", b"", b""), PLAIN, "salt"),
        (PLAIN, (b"", b"adapter", b""), "adapter"),
        ((b"one", b"adapter", b""), (b"one", b"other", b""), "adapter"),
        ((b"", b"", b"cat"), (b"", b"", b"dog"), "media"),
        (PLAIN, PLAIN, ""),
        (PLAIN, (b"tenant", b"adapter", b""), ""),
    ],
)
def test_tokens_known_under_another_salt_adapter_or_image_say_which(saved, asked, part):
    first = FirstChunks()
    first.saved(b"content1", saved)
    assert first.differs(b"content1", asked) == part
    assert first.differs(b"content2", asked) == "", "other tokens are new, not a mismatch"


def test_extras_cannot_be_mistaken_for_each_other():
    first = FirstChunks()
    first.saved(b"content1", (b"a", b"bc", b""))
    assert first.differs(b"content1", (b"ab", b"c", b"")) == ""
    assert first.differs(b"content1", (b"*", b"bc", b"")) == "salt"


ROOM = room(512, {})


def detector(clock, **more):
    return ZeroHits(ROOM, **more, chunks=100, seconds=600.0, clock=clock)


def test_it_speaks_once_when_both_enough_time_and_enough_chunks_have_gone_by():
    clock = Clock()
    zero = detector(clock)
    assert not zero.counted(4000, 0, 9, {"cold": 4000}), "too soon"
    clock.now = 900.0
    assert not zero.counted(99, 0, 9, {"cold": 99}), "too few"
    assert zero.counted(4096, 0, 9, {"cold": 160, "evicted": 3936})
    assert zero.verdict == (
        "0 of 4,096 chunks asked for were hits in 15 min: 96% evicted: RAM holds 512 chunks, "
        "there is no lower tier, "
        "and what is used again needs more: raise ram_bytes, or give nvme_path"
    )
    clock.now = 9000.0
    assert not zero.counted(9000, 0, 9, {"cold": 9000}), "said once"


def test_a_hit_ends_it_and_begins_a_new_window():
    clock = Clock(600.0)
    zero = ZeroHits(ROOM, chunks=100, seconds=600.0, clock=clock)
    clock.now = 1200.0
    assert zero.counted(200, 0, 1, {"cold": 200})
    assert not zero.counted(210, 1, 1, {"cold": 209})
    assert zero.verdict == ""
    clock.now = 1799.0
    assert not zero.counted(500, 1, 1, {"cold": 209, "salt": 290})
    clock.now = 1801.0
    assert zero.counted(510, 1, 1, {"cold": 209, "salt": 300})
    assert "0 of 300 chunks" in zero.verdict and "100% salt" in zero.verdict


def test_a_cache_that_nobody_filled_is_not_blamed():
    clock = Clock()
    zero = detector(clock)
    clock.now = 900.0
    assert not zero.counted(4000, 0, 0, {"cold": 4000})
    assert zero.counted(4000, 0, 0, {"short": 4000}), (
        "nothing can be saved of prompts that are too short"
    )
    assert "lower chunk_tokens" in zero.verdict


def test_chunks_of_another_model_that_lie_in_the_tiers_are_told_of():
    clock = Clock()
    zero = detector(clock, found=7000)
    clock.now = 900.0
    assert zero.counted(4000, 0, 0, {"cold": 4000})
    assert (
        "7,000 chunks lay in the tiers at the start" in zero.verdict
        and "another model" in zero.verdict
    )


@pytest.mark.parametrize(
    "reason",
    [
        "cold",
        *(how.name.lower() for how in Left),
        "tier_down",
        "saving",
        "salt",
        "adapter",
        "media",
        "slower",
        "unasked",
        "deadline",
        "refused",
        "short",
    ],
)
def test_every_reason_has_words(reason):
    clock = Clock()
    zero = detector(clock)
    clock.now = 900.0
    assert zero.counted(100, 0, 1, {reason: 100})
    assert f"100% {reason}: " in zero.verdict and len(zero.verdict.split(f"{reason}: ")[1]) > 30
    assert "{" not in zero.verdict
