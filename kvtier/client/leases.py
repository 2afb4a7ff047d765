"""Leases of slots in a server's pool, with the surface of the Store's own
(:mod:`kvtier.store.lease`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.client.attachment import Attachment, SharedPool
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.lookup import Progress
from kvtier.protocol import wire


class Attached(Protocol):
    """What a lease needs of the client that it is of; safe from any thread."""

    def poll(
        self, attachment: Attachment, lease: int, known: int, chunks: int
    ) -> wire.Claim | None:
        """What became ready of a load lease of ``chunks``, beyond the ``known`` ones; None when
        that cannot be asked now, or ever again if the attachment is lost."""
        ...

    def end(self, attachment: Attachment, lease: int, message: wire.Message) -> None:
        """The last message of a lease, after which its attachment may go."""
        ...


class SharedSave:
    """See SaveLease. After the server is lost, commit and close have no effect."""

    __slots__ = ("_attachment", "_client", "_lease", "keys", "open", "run", "slots")

    def __init__(
        self,
        client: Attached,
        attachment: Attachment | None,
        run: Sequence[ChunkKey],
        answer: wire.Slots | None,
    ) -> None:
        self._client = client
        self.run = run
        self.open = True
        self._attachment: Attachment | None = None
        self._lease, self.keys, self.slots = 0, list[ChunkKey](), list[int]()
        if attachment is not None and answer is not None and answer.lease:
            self._attachment, self._lease, self.slots = attachment, answer.lease, answer.slots
            self.keys = [run[place] for place in answer.places]
            attachment.leases.add(answer.lease)

    @property
    def pool(self) -> SharedPool | None:
        """Where the slots are; None for a lease without any."""
        return self._attachment.pool if self._attachment is not None else None

    def views(self) -> list[memoryview]:
        """Writable slot bytes, in order of ``keys``."""
        return _views(self._attachment, self.slots)

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
        if self._attachment is not None:
            self._client.end(self._attachment, self._lease, message)

    def __enter__(self) -> SharedSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedLoad:
    """See LoadLease. After the server is lost it grows no more; what is ready stays readable until
    it is closed."""

    __slots__ = (
        "_attachment",
        "_client",
        "_coming",
        "_lease",
        "closed",
        "keys",
        "slots",
        "sources",
    )

    def __init__(
        self,
        client: Attached,
        attachment: Attachment | None,
        keys: Sequence[ChunkKey],
        answer: wire.Claim | None,
    ) -> None:
        self._client = client
        self._attachment: Attachment | None = None
        self._lease, self._coming = 0, 0
        self.keys = keys
        self.slots: list[int] = []
        """Slots of the ready chunks as of the last poll."""
        self.sources: list[str] = []
        """Where each of them came from: ``"ram"`` or a tier's name."""
        self.closed = False
        if attachment is not None and answer is not None and answer.lease:
            self._attachment, self._lease = attachment, answer.lease
            attachment.leases.add(answer.lease)
            self._learn(attachment, answer)

    @property
    def pool(self) -> SharedPool | None:
        """Where the slots are; None for a lease without any."""
        return self._attachment.pool if self._attachment is not None else None

    @property
    def ready(self) -> int:
        """Leading chunks whose bytes are there, as of the last poll."""
        return len(self.slots)

    def poll(self) -> Progress:
        """Where the claim stands; asks the server only while something is coming."""
        if self._coming and self._attachment is not None and not self.closed:
            answer = self._client.poll(self._attachment, self._lease, self.ready, len(self.keys))
            if answer is not None:
                self._learn(self._attachment, answer)
            elif self._attachment.lost:
                self._coming = 0
        return Progress(self.ready, self._coming)

    def views(self) -> list[memoryview]:
        """Bytes of the ready chunks as of the last poll; to be read only."""
        return _views(self._attachment, self.slots)

    def close(self) -> None:
        """Let go. No effect the second time."""
        if not self.closed:
            self.closed = True
            self._coming = 0
            self.slots, self.sources = [], []
            if self._attachment is not None:
                self._client.end(self._attachment, self._lease, wire.End(self._lease))

    def _learn(self, attachment: Attachment, claim: wire.Claim) -> None:
        self.slots = self.slots + claim.slots
        self.sources += [attachment.places[source] for source in claim.sources]
        self._coming = claim.coming

    def __enter__(self) -> SharedLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _views(attachment: Attachment | None, slots: Sequence[int]) -> list[memoryview]:
    return [] if attachment is None else [attachment.pool.view(slot) for slot in slots]
