"""Doubles for tests: :class:`DictTier`, correct and in memory, :class:`FaultyTier`, whose medium
fails, and :class:`ManualLane`, which tests turn by hand.

Both tiers keep every promise of :mod:`kvtier.tiers.base`. A faulty medium makes a tier forget,
never lie.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Literal

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Work
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.base import Tier
from kvtier.tiers.forwarding import ForwardingTier

Call = Literal["write", "read"]


class Fault(StrEnum):
    """Of the bytes of one call."""

    FAIL = "fail"
    """Refused at once: a write stores nothing, a read is None and leaves the chunk where it is."""
    SHORT = "short"
    """Only the first half arrives."""
    TORN = "torn"
    """The first half arrives. The rest is what was there before."""
    CORRUPT = "corrupt"
    """One bit is wrong."""


Plan = Callable[[Call, ChunkKey], Fault | None]
"""The fault of each write and read, or None. Called from any thread."""


class DictTier(Tier):
    """Chunks in a dict. ``held`` is the medium: pass one tier's to the next to start again with
    what it kept. Threads: all methods from any thread."""

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


class FaultyTier(ForwardingTier):
    """``inner`` behind a medium that fails as ``plan`` says (see :func:`seeded`), and a checksum
    that finds it out.

    A FAIL is False, of a read None, at once. Any other fault of a write is acknowledged, as a disk
    acknowledges a write that it loses. The next read finds the damage, drops the chunk and is a
    miss. Any other fault of a read is found out at once. After a failed read ``into`` holds
    rubbish, so that a caller who uses it is caught. ``injected`` counts faults.

    Threads: as ``inner``. The plan must be safe for that too.
    """

    def __init__(self, inner: Tier, plan: Plan) -> None:
        super().__init__(inner)
        self.injected: Counter[str] = Counter()
        self._plan = plan
        self._written: dict[ChunkKey, bytes] = {}

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        fault = self._next("write", key)
        if fault is Fault.FAIL:
            return False
        self._written[key] = _digest(data)
        if self.inner.write(key, _damaged(data, fault), owner):
            return True
        self._written.pop(key, None)
        return False

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        fault = self._next("read", key)
        if fault is Fault.FAIL:
            into[:] = _rubbish(into.nbytes)
            return None
        if (
            self.inner.read(key, into)
            and fault is None
            and self._written.get(key) in (None, _digest(into))
        ):
            return True
        self.inner.delete(key)
        self._written.pop(key, None)
        into[:] = _rubbish(into.nbytes)
        return False

    def delete(self, key: ChunkKey) -> None:
        self.inner.delete(key)
        self._written.pop(key, None)

    def _next(self, call: Call, key: ChunkKey) -> Fault | None:
        fault = self._plan(call, key)
        if fault is not None:
            self.injected[f"{call} {fault}"] += 1
        return fault


def seeded(seed: int, rate: float, faults: Sequence[Fault] = tuple(Fault)) -> Plan:
    """Each call suffers a fault with probability ``rate``. It depends on the seed, the key, and
    which write or read of that key it is - not on how threads interleave."""
    calls: Counter[tuple[Call, ChunkKey]] = Counter()
    lock = threading.Lock()

    def plan(call: Call, key: ChunkKey) -> Fault | None:
        with lock:
            calls[call, key] += 1
            nth = calls[call, key]
        drawn = hashlib.sha256(f"{seed} {call} {nth} ".encode() + key).digest()
        if int.from_bytes(drawn[:8], "little") >= rate * 2**64:
            return None
        return faults[drawn[8] % len(faults)]

    return plan


def _damaged(data: memoryview, fault: Fault | None) -> memoryview:
    half = data.nbytes // 2
    if fault is Fault.SHORT:
        return data[: max(1, half)]
    rubbish = bytearray(data)
    if fault is Fault.TORN:
        rubbish[half:] = _rubbish(data.nbytes - half)
    elif fault is Fault.CORRUPT:
        rubbish[half] ^= 1
    else:
        return data
    return memoryview(rubbish)


def _rubbish(size: int) -> bytes:
    return b"\xa5" * size


def _digest(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class ManualLane:
    """Queues like :class:`kvtier.core.lanes.Lane`, runs nothing by itself. Single-threaded."""

    threads = 1
    failures = 0

    def __init__(self, *, urgent_bound: int = 1024, bound: int = 1024) -> None:
        self._bounds = {True: urgent_bound, False: bound}
        self.queues: dict[bool, list[Work]] = {True: [], False: []}
        self.closed = False

    @property
    def queued(self) -> tuple[int, int]:
        return len(self.queues[True]), len(self.queues[False])

    @property
    def is_idle(self) -> bool:
        return not len(self)

    def __len__(self) -> int:
        return sum(self.queued)

    def submit(self, work: Work, *, urgent: bool = False) -> bool:
        if self.closed or len(self.queues[urgent]) >= self._bounds[urgent]:
            return False
        self.queues[urgent].append(work)
        return True

    def turn(self, index: int = 0) -> None:
        """Run the ``index``-th queued work, urgent work first."""
        urgent = self.queues[True]
        queue, place = (
            (urgent, index) if index < len(urgent) else (self.queues[False], index - len(urgent))
        )
        queue.pop(place)()

    def run(self) -> None:
        """Until nothing is queued, with what the work itself queues."""
        while len(self):
            self.turn()

    def close(self, timeout_s: float) -> bool:
        self.run()
        self.closed = True
        return True
