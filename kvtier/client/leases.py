"""Leases of slots in a server's pool, with the surface of the Store's own (:mod:`kvtier.store.lease`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.client.attachment import Link, SharedPool
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.protocol import wire
from kvtier.store.lease import Match


class Attached(Protocol):
    """What a lease needs of the client that it is of; safe from any thread."""

    def poll(self, link: Link, lease: int, known: int, chunks: int) -> wire.Claim | None:
        """What became ready of a load lease of ``chunks``, beyond the ``known`` ones; None when that cannot be asked
        now, or ever again if the link is lost."""
        ...

    def end(self, link: Link, lease: int, message: wire.Message) -> None:
        """The last message of a lease, after which its link may go."""
        ...


class SharedSave:
    """See SaveLease. After the server is lost, commit and close have no effect."""

    __slots__ = ("_client", "_lease", "_link", "keys", "open", "run", "slots")

    def __init__(self, client: Attached, link: Link | None, run: Sequence[ChunkKey], answer: wire.Slots | None) -> None:
        self._client = client
        self.run = run
        self.open = True
        self._link: Link | None = None
        self._lease, self.keys, self.slots = 0, list[ChunkKey](), list[int]()
        if link is not None and answer is not None and answer.lease:
            self._link, self._lease, self.slots = link, answer.lease, answer.slots
            self.keys = [run[place] for place in answer.places]
            link.leases.add(answer.lease)

    @property
    def pool(self) -> SharedPool | None:
        """Where the slots are; None for a lease without any."""
        return self._link.pool if self._link is not None else None

    def views(self) -> list[memoryview]:
        """Writable slot bytes, in order of ``keys``."""
        return _views(self._link, self.slots)

    def commit(self) -> None:
        """All slots are filled: the chunks are READY as soon as the server reads this."""
        if not self.open:
            raise StateError("commit of a save lease that has ended")
        self._end(wire.Commit(self._lease))

    def close(self) -> None:
        """Give up: nothing of it is ever served. No effect after the end."""
        if self.open:
            self._end(wire.End(self._lease))

    def _end(self, message: wire.Message) -> None:
        self.open = False
        if self._link is not None:
            self._client.end(self._link, self._lease, message)

    def __enter__(self) -> SharedSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedLoad:
    """See LoadLease. After the server is lost it grows no more; what is ready stays readable until it is closed."""

    __slots__ = ("_client", "_coming", "_lease", "_link", "closed", "keys", "slots", "sources")

    def __init__(
        self, client: Attached, link: Link | None, keys: Sequence[ChunkKey], answer: wire.Claim | None
    ) -> None:
        self._client = client
        self._link: Link | None = None
        self._lease, self._coming = 0, 0
        self.keys = keys
        self.slots: list[int] = []
        """Slots of the ready chunks as of the last poll."""
        self.sources: list[str] = []
        """Where each of them came from: ``"ram"`` or a tier's name."""
        self.closed = False
        if link is not None and answer is not None and answer.lease:
            self._link, self._lease = link, answer.lease
            link.leases.add(answer.lease)
            self._learn(link, answer)

    @property
    def pool(self) -> SharedPool | None:
        """Where the slots are; None for a lease without any."""
        return self._link.pool if self._link is not None else None

    @property
    def ready(self) -> int:
        """Leading chunks whose bytes are there, as of the last poll."""
        return len(self.slots)

    def poll(self) -> Match:
        """Where the claim stands; asks the server only while something is coming."""
        if self._coming and self._link is not None and not self.closed:
            answer = self._client.poll(self._link, self._lease, self.ready, len(self.keys))
            if answer is not None:
                self._learn(self._link, answer)
            elif self._link.lost:
                self._coming = 0
        return Match(self.ready, self._coming)

    def views(self) -> list[memoryview]:
        """Bytes of the ready chunks as of the last poll; to be read only."""
        return _views(self._link, self.slots)

    def close(self) -> None:
        """Let go. No effect the second time."""
        if not self.closed:
            self.closed = True
            self._coming = 0
            self.slots, self.sources = [], []
            if self._link is not None:
                self._client.end(self._link, self._lease, wire.End(self._lease))

    def _learn(self, link: Link, claim: wire.Claim) -> None:
        self.slots = self.slots + claim.slots
        self.sources += [link.places[source] for source in claim.sources]
        self._coming = claim.coming

    def __enter__(self) -> SharedLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _views(link: Link | None, slots: Sequence[int]) -> list[memoryview]:
    return [] if link is None else [link.pool.view(slot) for slot in slots]
