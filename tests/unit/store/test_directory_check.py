"""What the index says about itself where a rule of it is broken."""

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.store.directory import Directory
from tests.stores import filled

A, B, C, D = (ChunkKey(name.encode().ljust(40, b".")) for name in "ABCD")
OWNER = 7


def saved(directory, *keys):
    for key in keys:
        filled(directory, key, owner=OWNER)


def has_another_slot(directory):
    entry = directory.get(A)
    assert entry is not None
    entry.slot = 1


def leaves_the_order(directory):
    """The slot before it is free."""
    saved(directory, B)
    directory.invalidate(A)
    directory.order.discard(B)


def has_more_slots_than_its_quota(directory):
    directory._used[OWNER] = 3


def has_more_of_a_tier_than_its_quota(directory):
    for key in (A, B, C):
        directory.tiers[0].hold(key, OWNER)


def is_kept_without_a_time(directory):
    directory.keep([A], 10)
    directory.order.kept.stays.clear()


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (has_another_slot, "slot 0 belongs to a chunk that is ready and not there"),
        (leaves_the_order, "the eviction order differs from the READY chunks"),
        (has_more_slots_than_its_quota, "an owner has more than its 2 slots"),
        (has_more_of_a_tier_than_its_quota, "an owner has more than its 2 chunks of tier 0"),
        (is_kept_without_a_time, "0 chunks are kept, 1 of one owner"),
    ],
)
def test_a_broken_rule_is_named(breaks, says):
    directory = Directory(4, [4], share=0.5)
    saved(directory, A)
    directory.check(idle=True)
    breaks(directory)
    with pytest.raises(StateError, match=says):
        directory.check()


def test_a_tier_that_has_yet_to_delete_is_not_at_rest():
    directory = Directory(1, [1])
    directory.tiers[0].found([A, B])
    directory.check()
    with pytest.raises(StateError, match="tier 0 still writes 0, deletes 1 chunks"):
        directory.check(idle=True)
    directory.tiers[0].deleted([A])
    directory.check(idle=True)
