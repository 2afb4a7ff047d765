"""Attachment: a connection to a server, with the server's pool mapped if it is on this host. Its
socket does not block, and its calls have deadlines."""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.client.connect import Welcomed
from kvtier.core.errors import TierError
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox

_UNSENT_BYTES = 4 * wire.MAX_FRAME_BYTES
"""Unread bytes beyond which a server is given up."""


class _Renewed:
    def __init__(self) -> None:
        self._renewals: dict[int, int] = {}
        self._renewed: list[int] = []

    def hear(self, renewed: Sequence[tuple[int, int]]) -> None:
        """Note slots whose memory went back to the host, each with the number of times."""
        for slot, times in renewed:
            if self._renewals.get(slot, 0) != times:
                self._renewals[slot] = times
                self._renewed.append(slot)

    def take_renewed(self) -> list[int]:
        renewed, self._renewed = self._renewed, []
        return renewed


class FarPool(_Renewed, Pool):
    """Pool of another host, not mapped here. Workers there map it with the ticket."""

    def __init__(self, slots: int, slot_bytes: int, ticket: bytes = b"") -> None:
        _Renewed.__init__(self)  # there is no region here
        self.slots, self.slot_bytes, self.ticket = slots, slot_bytes, ticket
        self.witness_path = None

    @property
    def path(self) -> str:
        return ""

    def close(self) -> None: ...


class SharedPool(_Renewed, Pool):
    """A server's pool.

    Every process that maps it holds its witness open as long as it is mapped: when the last one
    lets go, the server knows that no slot is read or written any more. A view that is still held
    keeps both.

    Owns both descriptors, and closes them also when it is refused. Raises as :class:`Pool` does."""

    def __init__(self, slots: int, slot_bytes: int, fd: int, witness: int) -> None:
        _Renewed.__init__(self)
        try:
            Pool.__init__(self, slots, slot_bytes, fd=fd)
        except BaseException:
            os.close(witness)
            raise
        self.witness_path: str = f"/proc/{os.getpid()}/fd/{witness}"
        self.inode = os.fstat(self.fd).st_ino
        """Inode of the pool, which tells it from the next start's pool: both may have one path."""
        let_go = weakref.finalize(self._map, os.close, witness)
        # At the end of a process a thread may still copy. The kernel closes the witness after that.
        let_go.atexit = False

    @classmethod
    def join(cls, path: str, witness_path: str, slots: int, slot_bytes: int) -> SharedPool:
        """Map the pool in another process of the engine. Raises TierError when it was let go."""
        opened: list[int] = []
        try:
            opened.append(os.open(witness_path, os.O_WRONLY | os.O_CLOEXEC))
            opened.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            raise TierError(
                f"cannot map the shared pool {path}: {error}; is its owner alive, same user?"
            ) from error
        witness, fd = opened
        return cls(slots, slot_bytes, fd, witness)


class Attachment:
    """One connection with its pool and the leases that refer to it. Under the owner's lock."""

    def __init__(self, welcomed: Welcomed) -> None:
        self.places = welcomed.welcome.places
        self.publishes = welcomed.welcome.publishes
        self.server = welcomed.welcome.server
        self.lost = False
        self.most_held = 0
        """Most slots of all leases together, as the server said last."""
        self.awaited: Any = None
        """Question whose answer is overdue."""
        self.overdue_since = 0.0
        self.leases: set[int] = set()
        self.told: Callable[[wire.Changed], None] | None = None
        """Function that takes the answers to Hear, once one was sent."""
        self._socket = welcomed.socket
        self._socket.setblocking(False)
        self._descriptor = self._socket.fileno()
        self._poll = select.poll()
        self._inbox: Inbox[wire.Answer | wire.Refused] = Inbox(wire.Answer | wire.Refused)
        self._unsent = bytearray()
        welcome = welcomed.welcome
        self.pool: SharedPool | FarPool
        if not welcomed.descriptors:
            self.pool = FarPool(welcome.slots, welcome.slot_bytes, welcome.ticket)
            return
        try:
            self.pool = SharedPool(welcome.slots, welcome.slot_bytes, *welcomed.descriptors)
        except BaseException:
            self._socket.close()
            raise

    # ---- messages --------------------------------------------------------------------------------

    def put(self, message: wire.Message) -> None:
        """Send a message, now or with the next call. Raises OSError or TierError."""
        self.put_frame(wire.frame(message))

    def put_frame(self, frame: bytes) -> None:
        self._unsent += frame
        if len(self._unsent) > _UNSENT_BYTES:
            raise TierError(f"the server has not taken {len(self._unsent)} bytes of messages")
        self.flush()

    def take(self, timeout_s: float) -> wire.Numbered | None:
        """Read the next answer that has a number, or None if none comes within ``timeout_s``. Reads
        at least once. Raises OSError, TierError or WireError when the server is gone or does not
        speak the protocol."""
        until, left = time.monotonic() + timeout_s, 1.0
        while (answer := self._next()) is None:
            if left <= 0:
                return None
            left = until - time.monotonic()
            waits = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
            self._poll.register(self._descriptor, waits)
            if not self._poll.poll(max(0.0, left) * 1000):
                return None
            if self._unsent:
                self.flush()
            with contextlib.suppress(BlockingIOError):
                count = self._socket.recv_into(self._inbox.room())
                if not count:
                    raise ConnectionResetError("the server closed the connection")
                self._inbox.filled(count)
        return answer

    def _next(self) -> wire.Numbered | None:
        while isinstance(answer := self._inbox.next(), wire.Changed):
            if self.told is None:
                raise wire.WireError("changes that were not asked for")
            self.told(answer)
        if isinstance(answer, wire.Refused):
            raise TierError(f"the server ended the session: {answer.reason}")
        return answer

    @property
    def settled(self) -> bool:
        return self.awaited is None and self.is_sent

    @property
    def is_sent(self) -> bool:
        return not self._unsent

    def flush(self) -> None:
        """Send as much as the socket takes. Raises OSError when the server is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    # ---- life ------------------------------------------------------------------------------------

    def release(self, lease: int) -> None:
        self.leases.discard(lease)
        self._close_pool_if_unused()

    def lose(self) -> None:
        """Close the socket. The pool stays until the last lease ends: workers may be in the middle
        of a copy, and the server keeps the slots until the last process has let go."""
        self.lost = True
        self._socket.close()
        self._close_pool_if_unused()

    def close(self) -> None:
        """Close socket and pool, also when leases are open: the engine ends."""
        self.leases.clear()
        self.lose()

    def _close_pool_if_unused(self) -> None:
        if self.lost and not self.leases:
            self.pool.close()
