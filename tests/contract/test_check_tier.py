"""check_tier passes what keeps its promises, names the promise that is broken, and the shipped
tiers are as told."""

import threading

import pytest

from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.tenant import UNOWNED
from kvtier.testing import DictTier, check_tier

SIZE = 1000
KEYS = ChunkLayout(bytes(32), 1, 1, (SIZE,)).keys(range(200))
DATA = memoryview(bytes(range(250)) * 4)


@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_dict_tier_keeps_every_promise(size):
    medium: dict[ChunkKey, bytes] = {}

    def make():
        medium.clear()
        return DictTier(16, held=medium)

    check_tier(make, chunk_bytes=size, reopen=lambda: DictTier(16, held=medium))


class Lies(DictTier):
    def read(self, key, into):
        held = bool(super().read(key, into))
        into[-1] ^= held
        return held


class Invents(DictTier):
    def read(self, key, into):
        return bool(super().read(key, into)) or key not in KEYS


class NeverNow(DictTier):
    def read(self, key, into):
        return None


class MatchesDigestsOnly(DictTier):
    def write(self, key, data, owner=UNOWNED):
        return super().write(ChunkKey(key[:32]), data)

    def read(self, key, into):
        return bool(super().read(ChunkKey(key[:32]), into))

    def find(self, keys):
        return super().find([ChunkKey(key[:32]) for key in keys])

    def delete(self, key):
        super().delete(ChunkKey(key[:32]))


class Evicts(DictTier):
    def write(self, key, data, owner=UNOWNED):
        if len(self.held) >= self.capacity - 1:
            self.held.pop(next(iter(self.held)))
        return super().write(key, data, owner)


class KeepsTheDeleted(DictTier):
    def delete(self, key):
        pass


class CountsPastGaps(DictTier):
    def find(self, keys):
        return sum(key in self.held for key in keys)


class ChangesItsData(DictTier):
    def write(self, key, data, owner=UNOWNED):
        held = super().write(key, data, owner)
        if not data.readonly:
            data[0] ^= 1
        return held


class WritesOnce(DictTier):
    def write(self, key, data, owner=UNOWNED):
        return key not in self.held and super().write(key, data, owner)


class ReadsReusedRoom(DictTier):
    """Slots without a checksum: a read looks up its slot, lets somebody write meanwhile, then
    copies."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.slots = [bytearray(SIZE) for _ in range(self.capacity)]
        self.free = list(range(self.capacity))
        self.at: dict[ChunkKey, int] = {}
        self.written = threading.Event()

    def write(self, key, data, owner=UNOWNED):
        if key not in self.at and super().write(key, data, owner):
            slot = self.free.pop()
            self.slots[slot][:] = data
            self.at[key] = slot
            self.written.set()
        return key in self.at

    def read(self, key, into):
        slot = self.at.get(key)
        if slot is None:
            return False
        self.written.clear()
        self.written.wait(0.02)  # returns with the write, which a busy host lets come late
        into[:] = self.slots[slot]
        return True

    def delete(self, key):
        super().delete(key)
        if key in self.at:
            self.free.append(self.at.pop(key))


class OneForAll(DictTier):
    """Threads share one place on the way in."""

    def write(self, key, data, owner=UNOWNED):
        self.__dict__["way"] = data
        threading.Event().wait(0.001)
        return super().write(key, self.__dict__["way"])


class Nameless(DictTier):
    def __init__(self, capacity, **more):
        super().__init__(capacity, **more, name="")


class LosesOrder(DictTier):
    def recovered(self):
        return sorted(super().recovered())


class LosesOneAtStart(DictTier):
    def recovered(self):
        return super().recovered()[1:]


class ForgetsOwners(DictTier):
    keeps_owners = True


class OwnsWithoutKeeping(DictTier):
    def owners(self, keys):
        return [1] * len(keys)


class IsLeftAlone(DictTier):
    def may_read(self, key):
        return False


class LosesRoom(DictTier):
    def resize(self, chunks):
        return chunks - 1


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (OwnsWithoutKeeping, "its chunks have none"),
        (IsLeftAlone, "may be read"),
        (LosesRoom, "room for its capacity"),
        (Lies, "exactly the bytes written"),
        (Invents, "exactly the bytes written|never written"),
        (NeverNow, "never None"),
        (MatchesDigestsOnly, "matched whole"),
        (Evicts, "evicts nothing"),
        (KeepsTheDeleted, "deleted is a miss"),
        (CountsPastGaps, "first gap"),
        (ChangesItsData, "leaves its data"),
        (WritesOnce, "second write"),
        (ReadsReusedRoom, "exactly the bytes written"),
        (OneForAll, "exactly the bytes written"),
        (Nameless, "name is a word"),
        (ForgetsOwners, "the owner it was written for"),
        (LosesOrder, "order given to close"),
        (LosesOneAtStart, "exactly what was held"),
    ],
)
def test_a_broken_promise_is_named(broken, words):
    medium: dict[ChunkKey, bytes] = {}

    def make():
        medium.clear()
        return broken(16, held=medium)

    with pytest.raises(AssertionError, match=words):
        check_tier(make, chunk_bytes=SIZE, reopen=lambda: broken(16, held=medium))
