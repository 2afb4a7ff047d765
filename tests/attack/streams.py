"""The doors for other hosts: streams and tickets of a client that has the token, and TLS, which has
to be answered before a token."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from kvtier.client.connect import Address, ServerAccess, enter, hello, join
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import KVTierError
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.testing.check_tier import content
from tests.server_process import LAYOUT, SLOT

_MOST_STREAMS = 512
_ANSWER_S = 10.0
SHORT = SLOT - 4095


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


def ends_of_others(port: int, keys: Sequence[ChunkKey]) -> int:
    """Save a chunk of its own under each of these keys that ends 4,095 bytes before its slot does,
    and read them as whole slots. Returns the bytes that it did not write."""
    with ExitStack() as stack:
        writer, reader = (
            stack.enter_context(closing(stream(port, size))) for size in (SHORT, SLOT)
        )
        found, into = 0, memoryview(bytearray(SLOT))
        for key in keys:
            writer.write(key, content(key, SHORT))
            into[:] = bytes(SLOT)
            reader.read(key, into)
            found += SLOT - SHORT - bytes(into[SHORT:]).count(0)
        return found


def stream(port: int, size: int) -> RemoteTier:
    own = hello(LAYOUT.fingerprint, size, stream=True)
    return RemoteTier(ServerAccess(Address("", "127.0.0.1", port), own))


@contextmanager
def workers_of_one(server: Address, port: int, count: int) -> Iterator[list[int]]:
    """Steer, and join as so many workers of this host. Yields the descriptors that came."""
    with ExitStack() as stack:
        own = hello(LAYOUT.fingerprint, SLOT, stream=False, steers=True)
        steering = enter(ServerAccess(Address("", "127.0.0.1", port), own))
        stack.enter_context(steering.socket)
        got = list[int]()
        for _ in range(count):
            with suppress(KVTierError, OSError):
                joined = join(server, None, steering.welcome.ticket, _ANSWER_S)
                joined.socket.close()
                for descriptor in joined.descriptors:
                    stack.callback(os.close, descriptor)
                got += joined.descriptors
        yield got


def handshakes(port: int, *, every_s: float, seconds: float) -> int:
    """Begin so many TLS handshakes, with one first message made before, and wait for no answer.
    Returns how many."""
    first, begun = ssl.MemoryBIO(), list[socket.socket]()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), first).do_handshake()
    message, until = first.read(), time.monotonic() + seconds
    with ExitStack() as stack:
        while time.monotonic() < until:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            begun.append(one)
            for late in begun[-2:-1]:
                with suppress(OSError):
                    late.send(message)
            time.sleep(every_s)
    return len(begun)
