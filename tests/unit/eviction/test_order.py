"""The order of leaving: what a policy is told by the Directory and the Store, so that one that
remembers can work."""

from collections import Counter

import pytest

from kvtier.eviction.adaptive import Orders
from kvtier.eviction.order import Segments, Setting
from kvtier.store.directory import Directory
from kvtier.testing import DictTier
from tests.stores import filled, keys, over, save

A, B, C, D = (keys(number)[0] for number in range(4))


class Twice(Segments):
    """Half of its room is for what was used, or came back after it had left. ``uses``: how often
    it was told of some."""

    def __init__(self, room):
        super().__init__(room, Setting(0.5, 4.0))
        self.uses = 0

    def used(self, run):
        self.uses += 1
        super().used(run)


def keeping(made):
    """Policies of this kind, each kept for the test to look at."""

    def make(room):
        made.append(Twice(room))
        return made[-1]

    return make


@pytest.mark.parametrize("steps", [1, 4])
def test_to_be_stored_is_no_use_however_many_steps_it_takes(steps):
    made: list[Twice] = []
    store, _ = over(slots=8, orders=Orders(keeping(made)))
    run = keys(1, 2, 3, 4)
    for step in range(steps):
        save(store, run[: (step + 1) * 4 // steps])
    (policy,) = made
    assert (len(policy._once), len(policy._again), policy.uses) == (4, 0, 0)
    store.load(run).close()
    assert (len(policy._once), len(policy._again), policy.uses) == (0, 4, 1)


def test_what_left_for_room_is_remembered_and_what_was_forgotten_is_not():
    policy = Twice(2)
    directory = Directory(2, policy=lambda room: policy)
    for key in (A, B):
        filled(directory, key)
    directory.invalidate(B)
    filled(directory, B)
    filled(directory, C)
    assert A in policy._ghosts and B not in policy._ghosts
    filled(directory, A)
    assert list(policy._again) == [A]


def test_a_tier_tells_its_own_policy_the_same():
    made: list[Twice] = []
    orders = Orders(keeping(made), keeping(made))
    store, (lane,) = over(DictTier(2), slots=8, orders=orders)
    for token in (1, 2, 3):
        save(store, keys(token), lane)
    assert [policy.room for policy in made] == [8, 2]
    assert set(made[1]._ghosts) == set(keys(1))
    store.load(keys(2)).close()
    assert list(made[1]._again) == keys(2)


def test_a_pinned_chunk_stays_known_is_passed_over_and_becomes_the_hottest_of_its_kind():
    policy = Twice(3)
    directory = Directory(3, policy=lambda room: policy)
    a, *_ = [filled(directory, key) for key in (A, B, C)]
    directory.used([B])
    directory.pin(a)
    assert list(policy) == [A, C, B]
    filled(directory, D)
    assert [directory.get(A), directory.get(C)] == [a, None]
    directory.unpin((a,))
    assert list(policy) == [D, A, B], "it was read, and not used again"
    directory.check(idle=True)


def test_evictions_walk_over_a_chunk_that_is_read_for_long_only_once():
    directory = Directory(64)
    for number in range(64):
        entry = filled(directory, keys(1000 + number)[0])
        if number < 32:
            directory.pin(entry)
    looks = Counter[str]()
    real = directory.order

    class Counted:
        def __getattr__(self, name):
            return getattr(real, name)

        def coldest(self):
            looks["keys"] += 1
            return real.coldest()

        def __iter__(self):
            for key in real:
                looks["keys"] += 1
                yield key

    directory.order = Counted()  # type: ignore[assignment]
    for number in range(16):
        filled(directory, keys(2000 + number)[0])
    assert looks["keys"] == 1 + 32 + 16
    directory.order = real
    directory.check()


def test_where_all_is_read_nobody_walks():
    directory = Directory(4, share=0.5)
    entries = [filled(directory, key, owner=1 + (key in (C, D))) for key in (A, B, C, D)]
    for entry in entries[:2]:
        directory.pin(entry)
    assert directory.reserve(keys(9)[0], (), owner=1) is None, (
        "its own are read, others' are not its to take"
    )
    for entry in entries[2:]:
        directory.pin(entry)
    directory.order = None  # type: ignore[assignment]
    assert directory.reserve(keys(9)[0], (), owner=2) is None


def test_a_policy_learns_of_new_room():
    made: list[Twice] = []
    directory = Directory(4, [6], policy=keeping(made))
    directory.resize(2, 10)
    directory.tiers[0].limit(3, 10)
    assert [policy.room for policy in made] == [2, 3]
    directory.slots.gave_back(directory.slots.leaving(10))
    directory.resize(3)
    assert made[0].room == 3
