"""What the simulation found, each bug as its smallest history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.chunk import ChunkKey
from kvtier.lease import Match
from kvtier.pool import Pool
from kvtier.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.trust.clients import LAYOUT, SLOT, right

OWN, OTHER = LAYOUT.keys([1, 1]), LAYOUT.keys([2, 2])


def full_shared_tier() -> tuple[Store, DictTier, ManualLane]:
    """A Store whose share of a shared tier is full, while another server has written a run of its own there."""
    tier, lane = DictTier(2, shared=True), ManualLane()
    store = Store(Pool(4, SLOT), [(tier, lane)])
    with store.save(OWN) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = right(key)
        lease.commit()
    lane.run()
    tier.held |= {key: right(key) for key in OTHER}
    return store, tier, lane


def test_a_full_share_makes_room_for_what_another_server_wrote() -> None:
    """It was given up instead: a server with a full share never hit on others' chunks, and deleted them for all."""
    store, tier, lane = full_shared_tier()
    with store.load(OTHER) as lease:
        lane.run()
        assert lease.poll() == Match(2, 0)
        assert [bytes(view) for view in lease.views()] == [right(key) for key in OTHER]
    assert tier.held.keys() >= set(OTHER)
    store.check()


def test_what_left_for_it_is_deleted_by_itself() -> None:
    """It stayed until the tier's next write or delete: a store that only loads never came to rest."""
    store, tier, lane = full_shared_tier()
    store.load(OTHER).close()
    lane.run()
    store.check(idle=True)
    assert tier.held.keys() == set(OTHER)


class Meanwhile(DictTier):
    """The next read misses, because of what others do in the middle of it."""

    during: Callable[[], None] | None = None

    def read(self, key: ChunkKey, into: memoryview) -> bool:
        during, self.during = self.during, None
        if during is None:
            return super().read(key, into)
        during()
        return False


def test_a_probe_that_misses_does_not_disown_what_was_written_meanwhile() -> None:
    """It did: the tier's place was taken for nobody, until the same chunk was saved again."""
    tier, lane = Meanwhile(2), ManualLane()
    store = Store(Pool(4, SLOT), [(tier, lane)])

    def save() -> None:
        with store.save(OWN) as lease:
            for key, view in zip(lease.keys, lease.views(), strict=True):
                view[:] = right(key)
            lease.commit()
        lane.run()

    def forget_and_save() -> None:
        store.forget(OWN)
        lane.run()
        save()

    save()
    tier.during = forget_and_save
    store.decline(OWN, "slower")
    lane.run()
    assert store.stats()["dict_held"] == len(tier.held) == 2


@pytest.mark.xfail(reason="a clear deletes what the index knows, and a failed read has made it forget")
def test_a_clear_reaches_what_a_failed_read_disowned() -> None:
    """A chunk that a shared tier could not read for a moment outlives the clear, and is found by asking again."""
    tier, lane = Meanwhile(2, shared=True), ManualLane()
    store = Store(Pool(1, SLOT), [(tier, lane)])
    for keys in (OWN[:1], OTHER[:1]):
        with store.save(keys) as lease:
            lease.views()[0][:] = right(keys[0])
            lease.commit()
        lane.run()
    tier.during = lane.run
    with store.load(OWN[:1]) as load:
        lane.run()
        assert load.poll() == Match(0, 0)
    store.clear()
    lane.run()
    assert not tier.held
