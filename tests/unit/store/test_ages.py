"""How old the coldest chunk of a place is."""

from kvtier.core.chunk import ChunkLayout
from kvtier.store.directory import Directory
from kvtier.store.observers import ages as ages_module
from kvtier.store.observers.ages import Ages
from tests.stores import filled

KEYS = ChunkLayout(bytes(32), 1, 1, (4096,)).keys(range(4000))


def test_nobody_counts_before_somebody_shares():
    ages = Ages(100)
    ages.used(KEYS)
    assert ages.coldest(KEYS) is None and not ages._used


def test_what_was_there_before_counts_as_used_when_counting_began():
    ages = Ages(100)
    ages.begin(7)
    ages.begin(8)
    ages.used(KEYS[:1])
    ages.begin(9)
    assert (ages.coldest(KEYS[:1]), ages.coldest(KEYS[1:])) == (8, 7)
    ages.begin(0)
    ages.begin(12)
    assert ages.coldest(KEYS[:1]) == 12


def test_of_many_chunks_a_sample_is_known_and_it_is_bounded():
    ages = Ages(10_000_000)
    ages.begin(1)
    ages.used(KEYS)
    assert 20 < len(ages._used) < 150, "one in 64"
    known = next(key for key in KEYS if key in ages._used)
    ages.begin(2)
    ages.used([known])
    unknown = [key for key in KEYS if key[0] & 63][:50]
    assert ages.coldest([*unknown, known]) == 2
    assert ages.coldest(unknown) is None


def test_who_was_dropped_from_the_sample_is_as_old_as_the_youngest_of_these():
    ages = Ages(100)
    for turn, part in enumerate((KEYS[:1000], KEYS[1000:2000], KEYS[2000:3000]), start=1):
        ages.begin(turn)
        ages_module._USED_CHUNKS, before = 1500, ages_module._USED_CHUNKS
        ages.used(part)
        if turn == 2:
            ages.used(KEYS[999:1000])
        ages_module._USED_CHUNKS = before
    assert KEYS[999] in ages._used and KEYS[1000] not in ages._used, "who was used last stays"
    assert len(ages._used) == 1500
    found = (ages.coldest(KEYS[:1]), ages.coldest(KEYS[1999:2000]), ages.coldest(KEYS[2999:]))
    assert found == (2, 2, 3)


def test_a_directory_says_when_its_coldest_chunk_was_used():
    directory, ages = Directory(4, [4]), Ages(8)
    directory.observers.add(ages)

    def coldest():
        return ages.coldest(directory.order), ages.coldest(directory.tiers[0].order)

    for turn, key in enumerate(KEYS[:3], start=1):
        ages.begin(turn)
        entry = filled(directory, key)
        directory.used([key])
        directory.spill_begun(entry, 0)
        directory.spill_ended(entry, 0, stored=True)
    assert coldest() == (1, 1)
    ages.begin(9)
    directory.used(KEYS[:1])
    assert coldest() == (2, 2)
    directory.invalidate(KEYS[1])
    directory.invalidate(KEYS[2])
    directory.invalidate(KEYS[0])
    assert coldest() == (None, None)


def test_a_directory_counts_what_finds_no_free_room():
    directory = Directory(2, [1])
    for key in KEYS[:2]:
        entry = filled(directory, key)
        assert directory.spill_begun(entry, 0) is not None
        directory.spill_ended(entry, 0, stored=True)
    assert directory.crowded == [0, 1]
    assert directory.reserve(KEYS[2], ()) is not None
    assert directory.reserve(KEYS[3], KEYS[:3]) is None
    assert directory.crowded == [2, 1]
