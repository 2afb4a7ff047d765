"""What the trust suite found, each bug as its smallest history."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvtier.core.errors import TierError
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.descriptors import descriptors
from tests.nvme_place import chunk_folder, room
from tests.trust.clients import LAYOUT, SLOT, right
from tests.trust.tier_faults import nothing_more_to_open

OWN, OTHER = LAYOUT.keys([1, 1]), LAYOUT.keys([2, 2])


def full_shared_tier():
    """A Store whose share of a shared tier is full, while another server has written a run of its
    own there."""
    tier, lane = DictTier(2, shared=True), ManualLane()
    store = Store(Pool(4, SLOT), [(tier, lane)])
    with store.save(OWN) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = right(key)
        lease.commit()
    lane.run()
    tier.held |= {key: right(key) for key in OTHER}
    return store, tier, lane


def test_a_full_share_makes_room_for_what_another_server_wrote():
    """It was given up instead: a server with a full share never hit on others' chunks, and deleted
    them for all."""
    store, tier, lane = full_shared_tier()
    with store.load(OTHER) as lease:
        lane.run()
        assert lease.poll() == Progress(2, 0)
        assert [bytes(view) for view in lease.views()] == [right(key) for key in OTHER]
    assert tier.held.keys() >= set(OTHER)
    store.check()


def test_what_left_for_it_is_deleted_by_itself():
    """It stayed until the tier's next write or delete: a store that only loads never came to
    rest."""
    store, tier, lane = full_shared_tier()
    store.load(OTHER).close()
    lane.run()
    store.check(idle=True)
    assert tier.held.keys() == set(OTHER)


class Meanwhile(DictTier):
    """The next read misses, because of what others do in the middle of it, or cannot be made
    then."""

    during: Callable[[], None] | None = None
    answer: bool | None = False

    def read(self, key, into):
        during, self.during = self.during, None
        if during is None:
            return super().read(key, into)
        during()
        return self.answer


def test_a_probe_that_misses_does_not_disown_what_was_written_meanwhile():
    """It did: the tier's place was taken for nobody, until the same chunk was saved again."""
    tier, lane = Meanwhile(2), ManualLane()
    store = Store(Pool(4, SLOT), [(tier, lane)])

    def save():
        with store.save(OWN) as lease:
            for key, view in zip(lease.keys, lease.views(), strict=True):
                view[:] = right(key)
            lease.commit()
        lane.run()

    def forget_and_save():
        store.invalidate(OWN)
        lane.run()
        save()

    save()
    tier.during = forget_and_save
    store.decline(OWN, "slower")
    lane.run()
    assert store.stats()["dict_held"] == len(tier.held) == 2


def test_a_clear_reaches_what_a_tier_could_not_read():
    """A chunk that a shared tier could not read for a moment outlived the clear, and was found by
    asking again."""
    tier, lane = Meanwhile(2, shared=True), ManualLane()
    store = Store(Pool(1, SLOT), [(tier, lane)])
    for keys in (OWN[:1], OTHER[:1]):
        with store.save(keys) as lease:
            lease.views()[0][:] = right(keys[0])
            lease.commit()
        lane.run()
    tier.during, tier.answer = lane.run, None
    with store.load(OWN[:1]) as load:
        lane.run()
        assert load.poll() == Progress(0, 0)
    store.invalidate_all()
    lane.run()
    assert not tier.held


def test_loads_given_up_behind_a_tier_that_hangs_leave_its_room_to_others():
    """What nobody waited for any more kept its slots until the tier went on: all of RAM, and no
    chunk was cached."""
    tier, lane = DictTier(8, held={key: right(key) for key in OWN}), ManualLane()
    store = Store(Pool(2, SLOT), [(tier, lane)])
    with store.load(OWN) as load:
        assert load.poll() == Progress(0, 2)
    with store.save(OTHER) as save:
        assert len(save.slots) == 2
    lane.run()
    store.check(idle=True)


@pytest.mark.parametrize("work", ["a probe", "a look at what leaves next"])
def test_what_is_forgotten_while_a_lane_is_full_of_other_work_is_deleted(work):
    """The sweep was refused, and nothing but the tier's next write made up for it: an erase that
    erased nothing."""
    tier, lane = DictTier(8, held={key: right(key) for key in (*OWN, *OTHER)}), ManualLane(bound=1)
    store = Store(Pool(2, SLOT), [TierSpec(tier, lane, on_evict=work != "a probe")])
    if work == "a probe":
        store.decline(OTHER, "slower")
    else:
        with store.save(OTHER) as lease:
            lease.commit()
    assert len(lane) == 1, work
    store.invalidate(OWN)
    lane.run()
    assert not tier.held.keys() & set(OWN)
    assert sum(store.lookup(OWN).progress) == 0
    store.check(idle=True)


# ---- out of descriptors --------------------------------------------------------------------------


@pytest.mark.parametrize("free", range(4))
def test_a_tier_that_gets_no_descriptor_says_so_in_its_own_words_and_keeps_none(tmp_path, free):
    """It raised a bare OSError, from letting go of what it had, which needed one more."""
    before = descriptors()
    with (
        nothing_more_to_open(os.getpid(), free),
        pytest.raises(TierError, match="Too many open files"),
    ):
        chunk_folder(tmp_path / "tier", room(4, SLOT), SLOT)
    assert descriptors() == before
    chunk_folder(tmp_path / "tier", room(4, SLOT), SLOT).close()


def test_a_tier_closed_without_a_free_descriptor_keeps_nobody_out_of_its_folder(tmp_path):
    """It kept the lock until the process ended, because letting go needed one more descriptor."""
    tier = chunk_folder(tmp_path / "tier", room(4, SLOT), SLOT)
    assert tier.write(OWN[0], memoryview(right(OWN[0])))
    with nothing_more_to_open(os.getpid()):
        tier.close(OWN[:1])
    again = chunk_folder(tmp_path / "tier", room(4, SLOT), SLOT)
    assert again.held() == OWN[:1]
    again.close()


def test_a_pool_that_gets_no_descriptor_says_so_in_its_own_words():
    """It raised a bare OSError."""
    before = descriptors()
    with nothing_more_to_open(os.getpid()), pytest.raises(TierError, match="Too many open files"):
        Pool(4, SLOT)
    assert descriptors() == before
