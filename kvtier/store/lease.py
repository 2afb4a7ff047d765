"""Leases: rights to sets of slots until they end, and what they stand for. They let go by
themselves (``with``).

Their state is the Store's: it changes it under its lock, through the methods they call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.core.steps import Steps, whole
from kvtier.store.directory import Entry
from kvtier.tiers.base import Tier


class Keeper(Protocol):
    """What leases ask of the Store that made them. Any thread."""

    pool: Pool
    tiers: list[Tier]

    def end_save(self, lease: SaveLease, commit: bool) -> Steps[None]:
        """The slots are filled (``commit``), or given up; in pieces, which must be done to the
        end."""
        ...

    def poll_load(self, lease: LoadLease) -> Progress: ...

    def end_load(self, lease: LoadLease) -> Steps[None]:
        """Nobody reads the slots any more; in pieces, which must be done to the end."""
        ...


class SaveLease:
    """Reserved slots to be filled by their owner. Ends once: :meth:`commit` or :meth:`close`;
    ``with`` closes.

    ``keys[i]`` belongs into ``slots[i]``.
    """

    __slots__ = ("_store", "begun", "entries", "open", "run")

    def __init__(
        self, store: Keeper, run: Sequence[ChunkKey], entries: list[Entry], begun: float
    ) -> None:
        self._store = store
        self.begun = begun
        self.run = run
        self.entries = entries
        self.open = True

    @property
    def keys(self) -> list[ChunkKey]:
        return [entry.key for entry in self.entries]

    @property
    def pool(self) -> Pool:
        """Where the slots are."""
        return self._store.pool

    @property
    def slots(self) -> list[int]:
        return [entry.slot for entry in self.entries]

    def views(self) -> list[memoryview]:
        """Writable slot bytes, in order of ``keys``."""
        return [self._store.pool.view(entry.slot) for entry in self.entries]

    def commit(self) -> None:
        """All slots are filled: the chunks are READY from now on, and offered to the lower
        tiers."""
        whole(self.committing())

    def committing(self) -> Steps[None]:
        """:meth:`commit` in pieces, which must be done to the end."""
        if not self.open:
            raise StateError("commit of a save lease that has ended")
        self.open = False
        return self._store.end_save(self, commit=True)

    def close(self) -> None:
        """Give up: nothing of it is ever served. No effect after the end."""
        whole(self.closing())

    def closing(self) -> Steps[None]:
        """:meth:`close` in pieces, which must be done to the end."""
        if self.open:
            self.open = False
            yield from self._store.end_save(self, commit=False)

    def __enter__(self) -> SaveLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoadLease:
    """A claim on the leading chunks of a run. One owner thread polls; ``with`` closes.

    ``slots`` are readable until :meth:`close`. A chunk that fails on its way makes the lease
    shorter, nothing else.
    """

    __slots__ = (
        "_store",
        "asking",
        "begun",
        "closed",
        "entries",
        "keys",
        "origins",
        "owner",
        "ready",
        "waits",
    )

    def __init__(self, store: Keeper, keys: Sequence[ChunkKey], owner: int, begun: float) -> None:
        self._store = store
        self.begun = begun
        self.waits = True
        """No poll has yet said that nothing more is coming."""
        self.keys = keys
        self.owner = owner
        self.entries: list[Entry] = []
        self.origins: list[int | None] = []
        """For each entry: the tier it had to come from, None when its bytes were in RAM already."""
        self.ready = 0
        """Leading chunks whose bytes are there, as of the last poll."""
        self.asking = False
        """A shared tier has yet to say what it holds."""
        self.closed = False

    def poll(self) -> Progress:
        """Where the claim stands; ``coming == 0`` means it will not grow any more."""
        return self._store.poll_load(self)

    @property
    def pool(self) -> Pool:
        """Where the slots are."""
        return self._store.pool

    @property
    def slots(self) -> list[int]:
        """Slots of the ready chunks as of the last poll."""
        return [entry.slot for entry in self.entries[: self.ready]]

    @property
    def sources(self) -> list[str]:
        """Where each of these chunks came from: ``"ram"`` or a tier's name."""
        tiers = self._store.tiers
        return [
            "ram" if origin is None else tiers[origin].name for origin in self.origins[: self.ready]
        ]

    def views(self) -> list[memoryview]:
        """Bytes of the ready chunks as of the last poll; to be read only."""
        return [self._store.pool.view(entry.slot) for entry in self.entries[: self.ready]]

    def close(self) -> None:
        """Let go. No effect the second time."""
        whole(self.closing())

    def closing(self) -> Steps[None]:
        """:meth:`close` in pieces, which must be done to the end."""
        if not self.closed:
            yield from self._store.end_load(self)

    def __enter__(self) -> LoadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
