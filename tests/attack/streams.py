"""The door of streams: a client that has the token, on another host."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtier.client.connect import ServerAccess, enter
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import KVTierError
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox

_MOST_STREAMS = 512
_ANSWER_S = 10.0


@contextmanager
def half_sent(access: ServerAccess, keys: Sequence[ChunkKey]) -> Iterator[list[socket.socket]]:
    """Begin to send each of these chunks on a stream of its own, and stop after the first byte.
    Yields the streams that got a slot for it. At most 512 are tried."""
    with ExitStack() as stack:
        got = []
        for key in keys[:_MOST_STREAMS]:
            try:
                sock = stack.enter_context(enter(access).socket)
                sock.settimeout(_ANSWER_S)
                sock.sendall(wire.frame(wire.Put(1, key)))
                if _answer(sock).send:
                    sock.sendall(b"\0")
                    got.append(sock)
            except (OSError, KVTierError):
                break  # no more connections
        yield got


def _answer(sock: socket.socket) -> wire.Go:
    """The server's answer to a Put. Raises OSError."""
    inbox: Inbox[wire.Go] = Inbox(wire.Go, 4096)
    while (answer := inbox.next()) is None:
        count = sock.recv_into(inbox.room())
        if not count:
            raise ConnectionResetError("it closed the connection")
        inbox.filled(count)
    return answer
