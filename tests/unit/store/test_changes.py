"""Changes of what a Store holds wait in one bounded list. Whoever takes them learns of a loss."""

from __future__ import annotations

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.order import LRU
from kvtier.store.observers.changes import RAM_PLACE, Change, Changes
from kvtier.store.tier_index import TierIndex

KEYS = [ChunkKey(bytes([number]) * 40) for number in range(4)]


def test_changes_come_in_order_and_once() -> None:
    changes = Changes()
    changes.note(RAM_PLACE, KEYS[0], there=True)
    changes.note(RAM_PLACE, KEYS[0], there=False)
    assert changes.waits
    assert changes.take() == [Change(0, KEYS[0], True), Change(0, KEYS[0], False)]
    assert changes.take() == []
    assert not changes.waits


def test_more_than_may_wait_are_lost_and_that_is_told_once() -> None:
    changes = Changes(most=2)
    for key in KEYS:
        changes.note(RAM_PLACE, key, there=True)
    assert changes.waits
    assert changes.take() is None
    changes.note(RAM_PLACE, KEYS[3], there=False)
    assert changes.take() == [Change(0, KEYS[3], False)]


def test_a_chunk_that_a_tier_never_had_is_not_withdrawn_from_it() -> None:
    """A purge of what others wrote names chunks that nobody here knows of."""
    index, changes = TierIndex(1, 4, LRU, None), Changes()
    index.changes = changes
    index.hold(KEYS[0])
    assert index.leave_all(KEYS[:2]) == KEYS[:2]
    assert changes.take() == [Change(1, KEYS[0], True), Change(1, KEYS[0], False)]
