"""Leases: rights to sets of slots, from the call that made them until they end.

A lease is data, and a way to say that it is done with. A Store and a Client make the same two
kinds. The maker of a lease is its keeper. Only the keeper changes the lease's content, and what it
needs for that lies in ``held``.

One thread owns a lease and makes all calls on it. Different leases may be used by different
threads. ``with`` closes a lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.core.steps import Steps, pieces, whole


class Keeper(Protocol):
    """View that a lease has of the Store or Client that made it. Safe from any thread. All work is
    done in pieces, which must be done to the end."""

    def end_save(self, lease: SaveLease, *, commit: bool) -> Steps[None]:
        """End a lease once: its slots are filled (``commit``), or given up."""

    def poll_load(self, lease: LoadLease) -> Steps[Progress]:
        """Add what became ready to ``slots`` and ``sources``, and return how far the load is."""

    def end_load(self, lease: LoadLease) -> Steps[None]:
        """End a lease once: its slots are not read any more."""


class _Lease:
    __slots__ = ("_keeper", "held", "open", "pool", "slots")

    def __init__(self, keeper: Keeper, pool: Pool | None, held: Any) -> None:
        self._keeper = keeper
        self.pool = pool
        """Pool of the slots. None for a lease without slots of a server that is not there."""
        self.slots: list[int] = []
        self.open = True
        self.held = held
        """Data of the keeper about this lease."""

    def views(self) -> list[memoryview]:
        """Return the bytes of the slots, in the order of ``keys``."""
        return [] if self.pool is None else [self.pool.view(slot) for slot in self.slots]

    def close(self) -> None:
        """Let go of the slots. No effect the second time."""
        whole(self.closing())

    def closing(self) -> Steps[None]:
        """:meth:`close` in pieces, which must be done to the end."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SaveLease(_Lease):
    """Reserved slots, which the owner of the lease fills. ``keys[i]`` belongs into ``slots[i]``.

    It ends once, by :meth:`commit`, or by :meth:`close`: then nothing of it is ever served.
    """

    __slots__ = ("keys", "run")

    def __init__(
        self, keeper: Keeper, pool: Pool | None, run: Sequence[ChunkKey], held: Any = None
    ) -> None:
        super().__init__(keeper, pool, held)
        self.run = run
        """Whole run that the chunks are part of."""
        self.keys: list[ChunkKey] = []

    def clear_behind(self, chunk_bytes: int) -> Steps[None]:
        """Clear each slot behind its chunk, in pieces: another tenant's bytes may lie there, and
        readers and lower tiers get whole slots."""
        pool = self.pool
        if pool is None or pool.slot_bytes == chunk_bytes:
            return
        behind = bytes(pool.slot_bytes - chunk_bytes)
        for part in pieces(self.slots):
            for slot in part:
                pool.view(slot)[chunk_bytes:] = behind
            yield 0.0

    def commit(self) -> None:
        """Let all slots, which are filled now, be loaded from now on. Raises StateError when the
        lease has ended."""
        whole(self.committing())

    def committing(self) -> Steps[None]:
        """:meth:`commit` in pieces, which must be done to the end."""
        if not self.open:
            raise StateError("commit of a save lease that has ended")
        self.open = False
        return self._keeper.end_save(self, commit=True)

    def closing(self) -> Steps[None]:
        if self.open:
            self.open = False
            yield from self._keeper.end_save(self, commit=False)


class LoadLease(_Lease):
    """Claim on the leading chunks of ``keys``. Chunks that are ready stay unchanged until the lease
    ends. Its slots are only to be read.

    A chunk that fails on its way makes the lease shorter, and nothing else happens. After a server
    is lost the lease does not grow any more, and what is ready can still be read."""

    __slots__ = ("asking", "keys", "sources")

    def __init__(
        self, keeper: Keeper, pool: Pool | None, keys: Sequence[ChunkKey], held: Any = None
    ) -> None:
        super().__init__(keeper, pool, held)
        self.keys = keys
        """Claimed chunks, first chunk first. ``slots`` are those of the chunks that were ready at
        the last poll."""
        self.sources: list[str] = []
        """Origin of each ready chunk: ``"ram"``, or a tier's name."""
        self.asking = False
        """Whether a shared tier has yet to say how much of the rest it holds. Always False where a
        server asks: the answer is one of the chunks that are coming."""

    @property
    def ready(self) -> int:
        """Number of leading chunks that were ready at the last poll."""
        return len(self.slots)

    def poll(self) -> Progress:
        """Return how far the load is, in chunks. With ``coming == 0`` it does not grow any more.
        Nothing is ready after the end."""
        is_whole = len(self.slots) == len(self.keys)
        return Progress(self.ready, 0) if is_whole else whole(self.polling())

    def polling(self) -> Steps[Progress]:
        """:meth:`poll` in pieces, which must be done to the end."""
        if not self.open:
            return Progress(0, 0)
        return (yield from self._keeper.poll_load(self))

    def closing(self) -> Steps[None]:
        if self.open:
            self.open = False
            yield from self._keeper.end_load(self)
            self.slots, self.sources = [], []
