"""ChunkStream: what an engine on another host may do: find, get, put and delete chunks. There are
no sockets here, and no loop.

One question is answered at a time, in pieces. The bytes of a chunk go straight between the socket
and its slot, and are hashed as they pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import xxhash

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker
from kvtier.core.steps import Steps, whole
from kvtier.protocol import wire
from kvtier.protocol.wire import proven
from kvtier.store.lease import LoadLease, SaveLease

if TYPE_CHECKING:
    from kvtier.server.registry import SizeClass


_MOST_FOUND_CHUNKS = 4096
"""Most chunks that one Find claims and answers for."""
PIECE_BYTES = 256 * 1024
"""Bytes hashed and copied in one turn of the loop, in about 0.1 ms."""


class ChunkStream:
    """Stream of one connection. Not thread-safe.

    Every method may raise WireError. The connection ends then, and :meth:`end` gives back what it
    held. ``owner``: whose chunks the engine saves and may drop. ``write`` hands bytes to the
    socket, and copies or sends a memoryview before it returns. ``flow`` asks for calls of
    :meth:`pump` while there is something to send and the socket takes it. All streams of one
    ``client`` have one share of the slots together."""

    def __init__(
        self,
        size_class: SizeClass,
        owner: int,
        chunk_bytes: int,
        write: Callable[[bytes | memoryview], None],
        flow: Callable[[], None],
        client: str = "",
    ) -> None:
        self._size_class = size_class
        self._store = size_class.store
        self._owner = owner
        self._chunk_bytes = chunk_bytes
        self._write = write
        self._flow = flow
        self._id = 0
        self._key = ChunkKey(b"")
        self._save: SaveLease | None = None
        self._load: LoadLease | None = None
        """Lease of the run that is looked for, or of the chunk that is sent."""
        self._share = size_class.shares.join_stream(client)
        self._known = 0
        self._view: memoryview | None = None
        """Memory of the chunk on its way, or None while no bytes flow."""
        self._at = 0
        self._hash = xxhash.xxh3_128()

    @property
    def busy(self) -> bool:
        return self._save is not None or self._load is not None

    def begin(self, message: wire.StreamQuestion) -> Steps[None]:
        """Answer a message in pieces, to be done to the end before the next message."""
        if isinstance(message, wire.Seal):
            self._sealed(message)
            return
        if self.busy:
            raise wire.WireError(f"{type(message).__name__} before the last question was answered")
        self._id = message.id
        if isinstance(message, wire.Find):
            yield from self._find(wire.split(message.keys)[:_MOST_FOUND_CHUNKS])
        elif isinstance(message, wire.Delete):
            self._store.invalidate([ChunkKey(message.key)], self._owner)
            self._write(wire.frame(wire.Done(message.id)))
        elif isinstance(message, wire.Get):
            if not self._share.left:
                self._write(wire.frame(wire.Chunk(message.id, 0)))
                return
            key = ChunkKey(message.key)
            self._begin(key, 1)
            self._load = self._store.load([key], 0, self._owner, asker=Asker(again=True))
            self._size_class.subscribers.add(self.poll)
            self.poll()
        else:
            self._put(ChunkKey(message.key))

    def end(self) -> None:
        """Free the slots at once: only this process writes and reads them."""
        self._end()
        self._share.leave()

    def _end(self) -> None:
        lease = self._save or self._load
        self._rest()
        if lease is not None:
            lease.close()

    # ---- find ------------------------------------------------------------------------------------

    def _find(self, keys: list[ChunkKey]) -> Steps[None]:
        """Look a run up, and claim it: chunks of lower tiers are then on their way already."""
        if keys == [wire.OTHER_SIZE]:
            apart = self._store.sharing.is_elsewhere(self._owner)
            self._write(wire.frame(wire.Found(self._id, int(apart))))
            return
        self._size_class.remember(keys)
        result = yield from self._store.lookup.steps(keys)
        self._known = result.known
        most = self._share.held = self._share.left
        lease = yield from self._store.load.steps(keys, 0, self._owner, most)
        self._begin(ChunkKey(b""), len(lease.keys) if lease.asking else sum(lease.poll()))
        self._load = lease
        self._size_class.subscribers.add(self.poll)
        self.poll()

    def poll(self) -> None:
        lease = self._load
        if lease is None or self._view is not None:
            return
        ready, coming = lease.poll()
        if not self._key:
            if not lease.asking:
                self._answer(wire.Found(self._id, max(ready + coming, self._known)))
        elif ready:
            self._size_class.subscribers.discard(self.poll)
            self._write(wire.frame(wire.Chunk(self._id, self._chunk_bytes)))
            self._view = lease.views()[0][: self._chunk_bytes]
            self._flow()
        elif not coming:
            self._answer(wire.Chunk(self._id, 0))

    # ---- get: slot -> socket ---------------------------------------------------------------------

    @property
    def sending(self) -> bool:
        return self._view is not None and self._load is not None

    def pump(self) -> None:
        assert self._view is not None
        piece = self._view[self._at : self._at + PIECE_BYTES]
        self._hash.update(piece)
        self._write(piece)
        self._at += len(piece)
        if self._at == self._chunk_bytes:
            self._answer(wire.Seal(self._hash.digest()))

    # ---- put: socket -> slot ---------------------------------------------------------------------

    def _put(self, key: ChunkKey) -> None:
        self._size_class.remember([key])
        if sum(self._store.lookup([key]).progress):
            self._write(wire.frame(wire.Go(self._id, False, True)))
            return
        if not self._share.left:
            self._write(wire.frame(wire.Go(self._id, False, False)))
            return
        lease = self._store.save([key], self._owner)
        if not lease.slots:
            lease.close()
            self._write(wire.frame(wire.Go(self._id, False, False)))
            return
        whole(lease.clear_behind(self._chunk_bytes))
        lease.run = self._size_class.run_to(key)
        self._begin(key, 1)
        self._save = lease
        self._view = lease.views()[0][: self._chunk_bytes]
        self._write(wire.frame(wire.Go(self._id, True, False)))

    def room(self) -> memoryview | None:
        """Return memory for the next bytes from the socket, or None when a message is expected."""
        if self._view is None or self._at == self._chunk_bytes or self._save is None:
            return None
        return self._view[self._at : self._at + PIECE_BYTES]

    def filled(self, count: int) -> None:
        assert self._view is not None
        self._hash.update(self._view[self._at : self._at + count])
        self._at += count

    def _sealed(self, seal: wire.Seal) -> None:
        lease = self._save
        if lease is None:
            raise wire.WireError("a Seal without a chunk")
        kept = proven(self._hash.digest(), seal.checksum)
        if kept:
            self._rest()
            lease.commit()
            self._write(wire.frame(wire.Stored(self._id, True)))
        else:
            self._answer(wire.Stored(self._id, False))

    # ---- steps -----------------------------------------------------------------------------------

    def _begin(self, key: ChunkKey, slots: int) -> None:
        self._key, self._at = key, 0
        self._share.held = slots
        self._hash = xxhash.xxh3_128(key)

    def _answer(self, message: wire.StreamAnswer) -> None:
        self._end()
        self._write(wire.frame(message))

    def _rest(self) -> None:
        self._size_class.subscribers.discard(self.poll)
        self._share.held = 0
        self._save = self._load = self._view = None
