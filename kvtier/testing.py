"""Parts of tests of kvtier and of your own tiers, shipped, and as public as the library:
:func:`check_tier`, the promises of :mod:`kvtier.tiers.base` as a test, for every tier, yours too;
:class:`DictTier`, correct and in memory; and :class:`ManualLane`, which tests turn by hand."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import shake_128

from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.lanes import Lane
from kvtier.core.tenant import UNOWNED, owner_of, tenant
from kvtier.tiers.base import ForwardingTier, Tier

Make = Callable[[], Tier]
Runs = Sequence[Sequence[ChunkKey]]
_RUN_CHUNKS = 6
_THREADS = 4
_GUARD_BYTES = 64
_LEAST_CHUNKS = 8
_FILLED_CHUNKS = 256
_TURNS = 40
_ONE, _OTHER = owner_of(bytes(32), "one"), owner_of(bytes(32), "other")


def check_tier(make: Make, *, chunk_bytes: int, reopen: Make | None = None) -> None:
    """Check every promise of :class:`~kvtier.tiers.base.Tier`. Raises AssertionError with the
    promise that is broken.

    Args:
        make: opens a tier of at least 8 chunks that holds nothing.
        chunk_bytes: size of the chunks to use. It need not be a multiple of anything.
        reopen: opens again what the last tier from ``make`` kept when it was closed. None for a
            tier that keeps nothing. Not for tiers that others share, whose order is not theirs to
            keep.
    """
    runs = [_keys(prompt, _RUN_CHUNKS) for prompt in range(_THREADS)]
    for check in (
        _check_face,
        _check_bytes,
        _check_find,
        _check_delete,
        _check_names,
        _check_owners,
        _check_capacity,
        _check_threads,
        _check_race,
    ):
        with closing(_Checked(make(), chunk_bytes)) as tier:
            check(tier, runs)
    if reopen is not None:
        _check_restart(make, reopen, runs, chunk_bytes)


def content(key: ChunkKey, chunk_bytes: int) -> memoryview:
    """Make the chunk of a key, unlike every other key's, in a read-only buffer not page-aligned."""
    return memoryview(shake_128(key).digest(chunk_bytes))


def _keys(prompt: int, chunks: int) -> list[ChunkKey]:
    return ChunkLayout(bytes(32), 1, 1, (1,)).keys([prompt] * chunks)


def _promise(kept: bool, words: str) -> None:
    if not kept:
        raise AssertionError(f"broken promise: {words}")


class _Checked(ForwardingTier):
    def __init__(self, inner: Tier, chunk_bytes: int) -> None:
        super().__init__(inner)
        self.found = list(inner.recovered())
        self._chunk_bytes = chunk_bytes

    def aligned(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self._chunk_bytes))[: self._chunk_bytes]

    def content(self, key: ChunkKey) -> memoryview:
        return content(key, self._chunk_bytes)

    def put(self, *keys: ChunkKey, owner: int = UNOWNED) -> None:
        for key in keys:
            held = self.write(key, self.content(key), owner)
            _promise(held, "a write within capacity is True")

    def holds(self, *keys: ChunkKey) -> bool:
        return all(self._holds(key) for key in keys)

    def _holds(self, key: ChunkKey) -> bool:
        into = self.aligned()
        _promise(self.may_read(key), "a tier whose medium answers may be read")
        held = self.read(key, into)
        _promise(held is not None, "a medium that answers is never None")
        _promise(
            held is False or into == self.content(key),
            "a read is True only with exactly the bytes written",
        )
        return bool(held)


def _check_face(tier: _Checked, _: Runs) -> None:
    _promise(tier.name != "", "name is a word")
    _promise(
        tier.capacity >= _LEAST_CHUNKS,
        f"capacity is a number of chunks, here {_LEAST_CHUNKS} or more",
    )
    _promise(tier.shared in (True, False), "shared is a bool")
    _promise(tier.keeps_owners in (True, False), "keeps_owners is a bool")
    _promise(tier.chunk_room >= 0 and tier.fixed_room >= 0, "room is a number of bytes")
    _promise(tier.resize(tier.capacity) == tier.capacity, "a tier has room for its capacity")
    _promise(
        tier.trouble == "" and not tier.open_breakers and not tier.owed,
        "a tier whose medium answers is well",
    )
    _promise(not tier.found, "a tier that holds nothing recovers nothing")


def _check_bytes(tier: _Checked, runs: Runs) -> None:
    """Check that the written bytes are read, into any memory, and nothing beside them."""
    one, other, *_ = runs[0]
    _promise(not tier.holds(one), "a key never written is a miss")
    aligned = tier.aligned()
    aligned[:] = tier.content(one)
    _promise(tier.write(one, aligned), "a write of page-aligned memory is True")
    _promise(aligned == tier.content(one), "a write leaves its data as it was")
    _promise(
        tier.write(other, tier.content(other)), "a write of unaligned, read-only memory is True"
    )
    _promise(tier.holds(one, other, one, other), "what was written is found, every time")
    for start in (_GUARD_BYTES, _GUARD_BYTES + 1):
        room = memoryview(bytearray(b"\xee" * (len(aligned) + 2 * _GUARD_BYTES)))
        into = room[start : start + len(aligned)]
        _promise(
            tier.read(one, into) is True and into == aligned, "a read fills memory of any alignment"
        )
        beside = bytes(room[:start]) + bytes(room[start + len(aligned) :])
        _promise(beside == b"\xee" * (2 * _GUARD_BYTES), "a read touches nothing but `into`")
    _promise(tier.write(one, aligned), "a second write of a held key is True")
    _promise(tier.holds(one), "a second write of a held key leaves it whole")


def _check_find(tier: _Checked, runs: Runs) -> None:
    keys = runs[0]
    _promise(
        tier.find(keys) == 0 and tier.find([]) == 0,
        "find is 0 where nothing is held, and for no keys",
    )
    before, after = keys[:2], keys[3:]
    tier.put(*before, *after)
    _promise(tier.find(keys) == len(before), "find stops at the first gap")
    _promise(tier.find(after) == len(after), "find counts a run that is held whole")
    _promise(tier.find(keys[2:]) == 0, "find is 0 when the first key is not held")


def _check_delete(tier: _Checked, runs: Runs) -> None:
    one, other, *_ = runs[0]
    tier.delete(one)
    tier.put(one, other)
    tier.delete(one)
    _promise(not tier.holds(one) and tier.find([one]) == 0, "what was deleted is a miss")
    _promise(tier.holds(other), "a delete takes no other chunk")
    tier.put(one)
    _promise(tier.holds(one), "a deleted key can be written anew")


def _check_names(tier: _Checked, runs: Runs) -> None:
    """Check that nearly equal keys (another model's, another parent's) are other keys."""
    one, other, *_ = runs[0]
    tier.put(one, other)
    for near in (other[:-1] + b"\xff", b"\xff" + other[1:], other[:16] + bytes(24)):
        key = ChunkKey(near)
        _promise(
            tier.find([key]) == 0 and not tier.holds(key), "a key is matched whole or not at all"
        )
        tier.delete(key)
    _promise(tier.holds(other), "a delete of a nearly equal key takes nothing")


def _check_owners(tier: _Checked, runs: Runs) -> None:
    """Check that a tier that keeps owners says whose a chunk is while it has it."""
    keys = runs[0]
    if not tier.keeps_owners:
        tier.put(keys[0])
        _promise(
            list(tier.owners(keys)) == [UNOWNED] * len(keys),
            "a tier that keeps no owners says that its chunks have none",
        )
        return
    whose = [_ONE, _OTHER, UNOWNED, _ONE]
    for key, owner in zip(keys, whose, strict=False):
        tier.put(key, owner=owner)
    _promise(
        list(tier.owners(keys)) == [*whose, UNOWNED, UNOWNED],
        "a chunk has the owner it was written for, or none",
    )
    _promise(tier.holds(*keys[:4]), "a chunk is whole, whose ever it is")
    if tier.shared:
        found, whole = tier.held_of(tenant("one"))
        _promise(
            sorted(found) == [*sorted([keys[0], keys[3]])] and not whole,
            "held_of is the owner's, and says that it left what has no owner",
        )
        _promise(sorted(tier.held_of(None)[0]) == sorted(keys[:4]), "held_of None is everything")
    tier.delete(keys[1])
    tier.put(keys[1], owner=_ONE)
    whose[1] = _ONE
    _promise(list(tier.owners(keys[:4])) == whose, "what is written anew is whose it is now")


def _check_capacity(tier: _Checked, _: Runs) -> None:
    """Check that all of ``capacity`` is there, and a delete frees its room. For small tiers."""
    if tier.capacity <= _FILLED_CHUNKS:
        first, *others, last = _keys(7, tier.capacity + 1)
        tier.put(first, *others)
        tier.delete(first)
        tier.put(last)
        _promise(tier.holds(*others, last), "a tier evicts nothing by itself")


def _check_threads(tier: _Checked, runs: Runs) -> None:
    def lane(keys: Sequence[ChunkKey]) -> None:
        for turn in range(16):
            key = keys[turn % 2]
            tier.put(key)
            _promise(tier.holds(key), "threads do not disturb each other")
            tier.delete(key)
            _promise(not tier.holds(key), "what a thread deleted is a miss for it")

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lane, runs))


def _check_race(tier: _Checked, runs: Runs) -> None:
    """Check reads of a key while it is deleted and its room is taken: whole or a miss."""
    key, *others = runs[0]
    over = threading.Event()

    def read_on() -> None:
        while not over.is_set():
            tier.holds(key)

    with ThreadPoolExecutor(_THREADS) as pool:
        readers = [pool.submit(read_on) for _ in range(_THREADS - 1)]
        try:
            for turn in range(_TURNS):
                other = others[turn % 2]
                tier.put(key)
                _promise(tier.holds(key), "a read beside other reads finds what is held")
                tier.delete(key)
                tier.put(other)
                tier.delete(other)
        finally:
            over.set()
        for reader in readers:
            reader.result()


def _check_restart(make: Make, reopen: Make, runs: Runs, chunk_bytes: int) -> None:
    """Check that held chunks are held again, with their owners, and deleted ones are not. The order
    given to close comes back. Keys that are not held do not matter."""
    one, other = runs[0], runs[1]
    with closing(_Checked(make(), chunk_bytes)) as tier:
        tier.put(*one[:4], owner=_ONE)
        tier.put(*other[:4])
        tier.delete(other[3])
    with closing(_Checked(reopen(), chunk_bytes)) as tier:
        _promise(
            sorted(tier.found) == sorted([*one[:4], *other[:3]]),
            "after a restart exactly what was held is held, each key once",
        )
        whose = [_ONE if tier.keeps_owners else UNOWNED] * 4 + [UNOWNED] * 3
        _promise(list(tier.owners([*one[:4], *other[:3]])) == whose, "a restart keeps the owners")
        _promise(tier.holds(*tier.found), "what is recovered can be read")
        tier.put(other[3])
        _promise(tier.holds(one[0]), "a write after a restart takes no chunk's room")
    tier = _Checked(make(), chunk_bytes)
    tier.put(*one[:4], *other[:4])
    coldest_first = [one[3], other[3], other[2], one[2], one[1], other[1], other[0], one[0]]
    tier.close([one[5], *coldest_first])
    with closing(_Checked(reopen(), chunk_bytes)) as tier:
        _promise(tier.found == coldest_first, "a restart keeps the order given to close")


class DictTier(Tier):
    """Tier of chunks in a dict. ``held`` is the medium: pass one tier's to the next to start again
    with what it kept. Threads: all methods from any thread."""

    def __init__(
        self,
        capacity: int,
        *,
        name: str = "dict",
        shared: bool = False,
        held: dict[ChunkKey, bytes] | None = None,
    ) -> None:
        self.name, self.capacity, self.shared = name, capacity, shared
        self.held: dict[ChunkKey, bytes] = {} if held is None else held
        self._lock = threading.Lock()

    def recovered(self) -> Sequence[ChunkKey]:
        return list(self.held)

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        with self._lock:
            if key not in self.held and len(self.held) >= self.capacity:
                return False
            self.held[key] = bytes(data)
            return True

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        with self._lock:
            data = self.held.get(key)
            if data is None or len(data) != into.nbytes:
                return False
            into[:] = data
            return True

    def find(self, keys: Sequence[ChunkKey]) -> int:
        with self._lock:
            return next(
                (count for count, key in enumerate(keys) if key not in self.held), len(keys)
            )

    def delete(self, key: ChunkKey) -> None:
        with self._lock:
            self.held.pop(key, None)

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        with self._lock:
            for key in coldest_first:
                if key in self.held:
                    self.held[key] = self.held.pop(key)


class ManualLane(Lane):
    """Lane that has no thread and runs nothing by itself. Single-threaded."""

    def __init__(self, *, urgent_bound: int = 1024, bound: int = 1024) -> None:
        super().__init__("manual", 0, urgent_bound=urgent_bound, bound=bound)
        self.threads = 1

    def __len__(self) -> int:
        return sum(self.queued)

    def turn(self, index: int = 0) -> None:
        urgent = self.queues[True]
        queue, place = (
            (urgent, index) if index < len(urgent) else (self.queues[False], index - len(urgent))
        )
        work = queue[place]
        del queue[place]
        work()

    def run(self) -> None:
        while len(self):
            self.turn()

    def close(self, timeout_s: float) -> bool:
        self.run()
        return super().close(timeout_s)
