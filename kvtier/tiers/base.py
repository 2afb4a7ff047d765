"""The promises every tier below RAM keeps; :func:`kvtier.testing.check_tier` tests them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from kvtier.core.chunk import ChunkKey
from kvtier.core.tenant import NOBODY


class Tier(Protocol):
    """Keeps whole chunks by key. Content-named and immutable: there is no update.

    Threads: ``write``, ``read`` and ``delete`` come from several lane threads at once. The Store
        never runs two
    writes, or a write and a delete, of the *same* key at once; a ``read`` may race with a
    ``delete`` of its key.

    Faults: no method raises for an I/O error. A failed write is ``False``, a failed read is
        ``False`` or ``None`` (a
    miss both); tiers count faults and log the first of a kind. Order and room are the Directory's:
    it never asks a tier to hold more than ``capacity`` chunks, so a tier evicts nothing by itself.
    """

    name: str
    capacity: int
    """Chunks this tier has room for."""
    shared: bool
    """Others write here too: what is held below a run's known part is found by asking
    (:meth:`find`)."""

    def recovered(self) -> Sequence[ChunkKey]:
        """Keys held from before the start, coldest first. Called once, before any other method."""
        ...

    def write(self, key: ChunkKey, data: memoryview) -> bool:
        """Store the chunk. True: a later ``read`` finds it whole. False: it does not hold it (nor a
        part of it)."""
        ...

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        """Fill ``into`` with the chunk. True only when it is exactly what was written for this key,
        checksum verified; else the content of ``into`` is undefined. False: the tier does not hold
        the chunk, or has dropped it because it was bad. None: not now; it may well be there, and
        stays known, so that a later delete reaches it. A medium that answers is never None."""
        ...

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """How many of ``keys``, from the first on without a gap, are held now. One look, for shared
        tiers; a fault is 0. A tier far away may take a long run for one without gaps, which it is
        but for chunks that somebody else took: what is told and not there is a miss when it is
        read. May block: called by lane threads only."""
        ...

    def delete(self, key: ChunkKey) -> None:
        """Forget the chunk if held; free its room at once."""
        ...

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Release everything. A persistent tier keeps its chunks, and their order, for the next
        start."""
        ...


@runtime_checkable
class OwnerKeeper(Protocol):
    """What a tier promises besides when it keeps with every chunk whose it is
    (:mod:`kvtier.core.tenant`). Chunks of other tiers are nobody's after a restart."""

    def write(self, key: ChunkKey, data: memoryview, owner: int = NOBODY) -> bool:
        """See Tier.write. A chunk that is held already keeps its owner, or gets this one."""
        ...

    def owners(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Whose these chunks are; 0 for nobody's, for one that is not held, and where that cannot
        be told now. May block: called at the start and by lane threads."""
        ...


def write_for(tier: Tier, key: ChunkKey, data: memoryview, owner: int) -> bool:
    """See Tier.write; the owner is kept where the tier keeps owners."""
    return tier.write(key, data, owner) if isinstance(tier, OwnerKeeper) else tier.write(key, data)


def owners_in(tier: Tier, keys: Sequence[ChunkKey]) -> Sequence[int]:
    """See OwnerKeeper.owners; nobody's where the tier keeps none."""
    return tier.owners(keys) if keys and isinstance(tier, OwnerKeeper) else [NOBODY] * len(keys)


@runtime_checkable
class SharedKeeper(Protocol):
    """What an OwnerKeeper that others write to promises besides: it can be searched for what nobody
    here knows of."""

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """Chunks that ``owner`` may drop (:func:`kvtier.core.tenant.may`), whoever wrote them;
        False when the search was cut short by a fault or by time. Takes seconds: called by lane
        threads only."""
        ...


@runtime_checkable
class RoomGiver(Protocol):
    """What a tier promises besides when it can give a part of its room back and take it again."""

    @property
    def chunk_room(self) -> int:
        """Bytes that a chunk takes of the budget; 0: there is none to be divided."""
        ...

    @property
    def fixed_room(self) -> int:
        """Bytes that it takes without any chunk."""
        ...

    def resize(self, chunks: int) -> int:
        """Keep room for ``chunks``, at most :attr:`Tier.capacity`; it holds no more than that, but
        for writes that are going on. How many there is room for now: fewer where that could not be
        had, more where it is in use. May block: called by one thread, never on a loop."""
        ...


@runtime_checkable
class Spread(Protocol):
    """What a tier promises besides when its chunks lie on several machines, each of which fails for
    itself."""

    def machine(self, key: ChunkKey) -> str:
        """A name of the machine that has the chunk, if the tier has it. Asks nobody. There are at
        most a thousand names at any time. Threads: any."""
        ...


def machine_of(tier: Tier, key: ChunkKey) -> str:
    """See Spread; one name for all chunks of a tier that is not spread."""
    return tier.machine(key) if isinstance(tier, Spread) else ""
