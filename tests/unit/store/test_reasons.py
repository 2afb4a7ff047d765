"""Why a chunk is missing: what is remembered of those that left, and of first chunks under other
salts."""

import pytest

from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.store.directory import Directory
from kvtier.store.observer import Left
from kvtier.store.reports.miss_reasons import FirstChunks, Marks, Past

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
