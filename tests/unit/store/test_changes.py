"""Changes of what a Store holds wait in one bounded list. Whoever takes them learns of a loss."""

from contextlib import nullcontext

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import RAM_PLACE, Change
from kvtier.store.directory import Directory
from kvtier.store.observer import Left
from kvtier.store.observers.changes import Changes

KEYS = [ChunkKey(bytes([number]) * 40) for number in range(4)]


def watching(directory=None):
    return Changes(directory or Directory(1), nullcontext(), ["ram", "nvme"])


def test_changes_come_in_order_and_once():
    changes = watching()
    changes.came(RAM_PLACE, KEYS[0])
    changes.left(RAM_PLACE, KEYS[0], Left.EVICTED)
    assert changes.has_changes
    assert changes.changes() == [Change(0, KEYS[0], True), Change(0, KEYS[0], False)]
    assert changes.changes() == []
    assert not changes.has_changes


def test_more_than_may_wait_are_lost_and_that_is_told_once(monkeypatch):
    monkeypatch.setattr("kvtier.store.observers.changes._WAITING_CHANGES", 2)
    changes = watching()
    for key in KEYS[:3]:
        changes.came(RAM_PLACE, key)
    assert changes.has_changes
    assert changes.changes() is None
    changes.left(RAM_PLACE, KEYS[3], Left.EVICTED)
    assert changes.changes() == [Change(0, KEYS[3], False)]


def test_a_chunk_that_a_tier_never_had_is_not_withdrawn_from_it():
    directory = Directory(1, [4])
    index, changes = directory.tiers[0], watching(directory)
    index.hold(KEYS[0])
    assert index.leave_all(KEYS[:2]) == KEYS[:2]
    assert changes.changes() == [Change(1, KEYS[0], True), Change(1, KEYS[0], False)]


def test_a_chunk_that_comes_to_ram_comes_again_to_the_tier_that_holds_it():
    directory = Directory(1, [4, 4])
    changes = watching(directory)
    directory.tiers[1].hold(KEYS[0])
    assert changes.changes() == [Change(2, KEYS[0], True)]
    changes.came(RAM_PLACE, KEYS[0])
    assert changes.changes() == [Change(0, KEYS[0], True), Change(2, KEYS[0], True)]
