""":class:`DictTier`, correct and in memory, and :class:`ManualLane`, which tests turn by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.base import Tier


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
