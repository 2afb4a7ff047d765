"""The order of leaving: what a policy is told by the Directory and the Store, so that one that
remembers can work."""

from collections import Counter, OrderedDict
from itertools import chain

import pytest

from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.eviction.adaptive import Orders
from kvtier.store.directory import Directory
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "eviction"}), 1, 1, (SLOT,))
A, B, C, D = (LAYOUT.keys([number])[0] for number in range(4))


class Twice:
    """A policy that remembers: what was used, or came back after it had left, stays before all
    else."""

    def __init__(self, room):
        self.room = room
        self.new: OrderedDict[ChunkKey, int] = OrderedDict()
        self.again: OrderedDict[ChunkKey, int] = OrderedDict()
        self.left: set[ChunkKey] = set()
        self.told: Counter[str] = Counter()

    def add(self, run, owner=0):
        for key in run:
            back = key in self.again or key in self.left
            self.discard(key)
            (self.again if back else self.new)[key] = owner

    def owner(self, key):
        return self.new.get(key, 0) or self.again.get(key, 0)

    def used(self, run):
        self.told["used"] += 1
        for key in reversed(run):
            if key in self:
                owner = self.owner(key)
                self.discard(key)
                self.again[key] = owner

    def ordered(self, run):
        for key in reversed(run):
            for part in (self.new, self.again):
                if key in part:
                    part.move_to_end(key)

    def evicted(self, run):
        for key in run:
            self.told["evicted"] += 1
            self.discard(key)
            self.left.add(key)

    def discard(self, key):
        self.new.pop(key, None)
        self.again.pop(key, None)
        self.left.discard(key)

    def coldest(self):
        return next(iter(self), None)

    def keeps(self, key):
        return key in self.again

    def cool(self, run):
        self.told["cool"] += 1

    def keep(self, run, seconds):
        self.told["keep"] += 1

    def tick(self, now):
        self.told["tick"] += 1

    def resize(self, room):
        self.room = room

    def __contains__(self, key):
        return key in self.new or key in self.again

    def __len__(self):
        return len(self.new) + len(self.again)

    def __iter__(self):
        return chain(self.new, self.again)


def keeping(made):
    """Policies of this kind, each kept for the test to look at."""

    def make(room):
        made.append(Twice(room))
        return made[-1]

    return make


@pytest.mark.parametrize("steps", [1, 4])
def test_to_be_stored_is_no_use_however_many_steps_it_takes(steps):
    made: list[Twice] = []
    store = Store(Pool(8, SLOT), orders=Orders(keeping(made)))
    run = LAYOUT.keys([1, 2, 3, 4])
    for step in range(steps):
        with store.save(run[: (step + 1) * 4 // steps]) as lease:
            lease.commit()
    (policy,) = made
    assert (len(policy.new), len(policy.again), policy.told["used"]) == (4, 0, 0)
    store.load(run).close()
    assert (len(policy.new), len(policy.again), policy.told["used"]) == (0, 4, 1)


def test_what_left_for_room_is_remembered_and_what_was_forgotten_is_not():
    policy = Twice(2)
    directory = Directory(2, policy=lambda room: policy)
    for key in (A, B):
        fill(directory, key)
    directory.invalidate(B)
    fill(directory, B)
    fill(directory, C)
    assert A in policy.left and B not in policy.left
    fill(directory, A)
    assert list(policy.again) == [A]


def test_a_tier_tells_its_own_policy_the_same():
    made: list[Twice] = []
    tier, lane = DictTier(2), ManualLane(bound=8)
    store = Store(Pool(8, SLOT), [(tier, lane)], Orders(keeping(made), keeping(made)))
    for token in (1, 2, 3):
        with store.save(LAYOUT.keys([token])) as lease:
            lease.commit()
        lane.run()
    assert [policy.room for policy in made] == [8, 2]
    assert made[1].left == set(LAYOUT.keys([1]))
    store.load(LAYOUT.keys([2])).close()
    assert list(made[1].again) == LAYOUT.keys([2])


def test_a_pinned_chunk_stays_known_is_passed_over_and_becomes_the_hottest_of_its_kind():
    policy = Twice(3)
    directory = Directory(3, policy=lambda room: policy)
    a, *_ = [fill(directory, key) for key in (A, B, C)]
    directory.used([B])
    directory.pin(a)
    assert list(policy) == [A, C, B]
    fill(directory, D)
    assert [directory.get(A), directory.get(C)] == [a, None]
    directory.unpin((a,))
    assert list(policy) == [D, A, B], "it was read, and not used again"
    directory.check(idle=True)


def test_evictions_walk_over_a_chunk_that_is_read_for_long_only_once():
    directory = Directory(64)
    for number in range(64):
        entry = fill(directory, LAYOUT.keys([1000 + number])[0])
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
        fill(directory, LAYOUT.keys([2000 + number])[0])
    assert looks["keys"] == 1 + 32 + 16
    directory.order = real
    directory.check()


def test_where_all_is_read_nobody_walks():
    directory = Directory(4, share=0.5)
    entries = [fill(directory, key, owner=1 + (key in (C, D))) for key in (A, B, C, D)]
    for entry in entries[:2]:
        directory.pin(entry)
    assert directory.reserve(LAYOUT.keys([9])[0], (), owner=1) is None, (
        "its own are read, others' are not its to take"
    )
    for entry in entries[2:]:
        directory.pin(entry)
    directory.order = None  # type: ignore[assignment]
    assert directory.reserve(LAYOUT.keys([9])[0], (), owner=2) is None


def test_a_policy_learns_of_new_room():
    made: list[Twice] = []
    directory = Directory(4, [6], policy=keeping(made))
    directory.resize(2, 10)
    directory.tiers[0].limit(3, 10)
    assert [policy.room for policy in made] == [2, 3]
    directory.slots.gave_back(directory.slots.leaving(10))
    directory.resize(3)
    assert made[0].room == 3


def fill(directory, key, owner=0):
    entry = directory.reserve(key, (), owner=owner)
    assert entry is not None
    directory.filled((entry,))
    return entry
