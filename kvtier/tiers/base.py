"""Tier: what every tier below RAM promises. :func:`kvtier.testing.check_tier` tests it.

Tiers differ in what they can do. That is data on the tier: an attribute, or a method whose default
does no harm. No caller asks for a tier's class.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from kvtier.core.chunk import ChunkKey
from kvtier.core.report import DiskStatus
from kvtier.core.tenant import UNOWNED


class Tier(ABC):
    """Keeps whole chunks by key. A key names the bytes and a chunk never changes: there is no
    update.

    Threads: ``write``, ``read`` and ``delete`` come from several lane threads at once. The Store
    never runs two writes, or a write and a delete, of the *same* key at once. A ``read`` may race
    with a ``delete`` of its key.

    Faults: no method raises for an I/O error. A failed write is ``False``. A failed read is
    ``False`` or ``None``, and both are a miss. Tiers count faults and log the first of a kind.

    Order and room are the Directory's: it never asks a tier to hold more than ``capacity`` chunks,
    so a tier evicts nothing by itself.

    The attributes below, but for such a ``capacity``, never change while the tier is open. The
    properties may be read by any thread at any time.
    """

    name: str
    capacity: int
    """Room in chunks. 0 while a tier that was away at the start does not know it. Changes on any
    thread, with parts of the tier that fail or come back."""
    shared: bool = False
    """Whether other processes write here too. :meth:`find` asks for their chunks."""
    keeps_owners: bool = False
    """Whether each chunk's owner (:mod:`kvtier.core.tenant`) is stored with it, for a restart."""
    asks_for_owners: bool = False
    """Whether :meth:`owners` costs a request a chunk. Then it is asked only of chunks that a tenant
    wants to be dropped, and until then they have no owner."""
    comes_whole: bool = False
    """Whether reads take the CPU, which copies need too. Then a hit comes no sooner in parts."""
    chunk_room: int = 0
    """Bytes that a chunk takes of a budget that several Stores divide. 0: no such budget."""
    fixed_room: int = 0
    """Bytes that the empty tier takes of such a budget."""

    # ---- chunks ----------------------------------------------------------------------------------

    def recovered(self) -> Sequence[ChunkKey]:
        """Keys held from before the start, coldest first. Called once, before any other method."""
        return self.lost_and_found()[1]

    @abstractmethod
    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        """Store the chunk. Returns True if a later ``read`` finds it whole, False if no part of it
        is held. A chunk that is held already keeps its owner, or gets this one. Raises StateError
        for a chunk of a size that the tier does not take."""

    @abstractmethod
    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        """Fill ``into``, as long as the chunk that was written. Returns True only when it holds
        exactly the bytes written for this key, checksum verified. Else ``into`` is undefined.

        Returns False if the tier does not hold the chunk, or has dropped it because it was bad.
        Returns None for "not now": the chunk may well be there, and stays known, so that a later
        delete reaches it. A medium that answers never gives None."""

    def may_read(self, key: ChunkKey) -> bool:
        """Return whether a ``read`` of this chunk is worth a slot. False while the machine that has
        it is left alone because it failed. When that machine is due to be tried again, one caller
        gets True.

        A tier that may be None for long has a :class:`~kvtier.tiers.breaker.Breaker` for each
        machine and asks it here. Called under the Store's lock, so it must not wait."""
        return True

    @abstractmethod
    def find(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading ``keys`` that are held now, 0 for a fault. May block: for
        lane threads only.

        A far tier may assume that runs have no gaps. A chunk that is counted but not there is a
        miss when it is read."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> None:
        """Forget the chunk if held, and free its room at once."""

    def lost_and_found(self) -> tuple[Sequence[ChunkKey], Sequence[ChunkKey]]:
        """Return chunks that ceased to be held without a call that asked for it, and chunks that
        are held again, coldest first, since the last call. Updates ``capacity``. May block: for
        lane threads only."""
        return [], []

    @abstractmethod
    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Release everything. A persistent tier keeps chunks and order for the next start."""

    # ---- owners ----------------------------------------------------------------------------------

    def owners(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return the owners of these chunks, 0 where there is none, the chunk is not held, or the
        tier cannot tell now. May block: called at the start and by lane threads."""
        return [UNOWNED] * len(keys)

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """Return the chunks of a shared tier that ``owner`` may drop
        (:func:`kvtier.core.tenant.may`), whoever wrote them, and whether these are all. They are
        not for a fault, for want of time, for chunks without an owner, and for a tier that cannot
        search. Takes seconds: for lane threads only."""
        return [], not self.shared

    # ---- room ------------------------------------------------------------------------------------

    def resize(self, chunks: int) -> int:
        """Set the room to ``chunks``, at most ``capacity``. Returns the room that there is now:
        less where it could not be had, more where it is in use. Running writes may exceed it. May
        block: called by one thread, never on a loop."""
        return chunks

    # ---- health ----------------------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        return {}

    @property
    def by_disk(self) -> Sequence[DiskStatus]:
        """Counts of each disk, for a tier on several disks."""
        return ()

    @property
    def nodes_away(self) -> Sequence[str]:
        """Addresses, without passwords, of machines that are left alone because they failed."""
        return ()

    @property
    def open_breakers(self) -> int:
        return len(self.nodes_away)

    @property
    def is_apart(self) -> bool:
        """Whether the tier also has chunks of this model in a size that is of no use here."""
        return False

    @property
    def trouble(self) -> str:
        """Fault that waiting does not heal, in words, or ""."""
        return ""

    @property
    def owed(self) -> int:
        """Number of deletions that wait until the tier can be reached."""
        return 0


def _forwarding(tier: type[ForwardingTier]) -> type[ForwardingTier]:
    for name in {**Tier.__annotations__, **vars(Tier)}:
        if not name.startswith("_") and name not in vars(tier):
            setattr(tier, name, property(attrgetter(f"inner.{name}")))
    return tier


@_forwarding
class ForwardingTier(Tier):
    """Tier that passes every call to ``inner``, and closes it. Threads: as ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        return self.inner.write(key, data, owner)

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        return self.inner.read(key, into)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        return self.inner.find(keys)

    def delete(self, key: ChunkKey) -> None:
        self.inner.delete(key)

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        self.inner.close(coldest_first)


EVENTS = (
    *("writes", "reads", "misses", "bytes_written", "bytes_read"),
    *("failed_writes", "failed_reads", "corrupt", "refused"),
)
AWAY_EVENTS = (*EVENTS, "failed_finds", "failed_deletes", "breaker_trips")


class EventCounts:
    """Counts of events by name, with a log line for the first of a kind. ``place``: the tier's name
    in the log. Threads: any."""

    def __init__(self, events: Iterable[str], logger: logging.Logger, place: str) -> None:
        self.values = dict.fromkeys(events, 0)
        self._logger, self._place = logger, place
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def add(self, event: str, by: int = 1) -> None:
        with self._lock:
            self.values[event] += by

    def log_first(self, kind: str, what: object) -> None:
        """Log the first fault of this kind. Further ones are not logged."""
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        self._logger.warning(
            "%s: first fault of kind %s: %s (only counted from now on)", self._place, kind, what
        )
