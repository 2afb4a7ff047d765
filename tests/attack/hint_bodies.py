"""Bodies that hold up whoever looks at them for hints before vLLM has looked at the API key, and
clients that keep such a body open."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

PATH = "/v1/chat/completions"


def many_objects(size: int = 16 << 20) -> bytes:
    """A body of ``size`` bytes whose messages are as many objects as that holds, with a mark."""
    head, each, tail = b'{"messages":[{"cache_control":null}', b",{}", b"]}"
    return head + each * ((size - len(head) - len(tail)) // len(each)) + tail


def many_marks(size: int = 1 << 20) -> bytes:
    """A body of ``size`` bytes of marks."""
    head, each, tail = b'{"messages":[{}', b',{"cache_control":{}}', b"]}"
    return head + each * ((size - len(head) - len(tail)) // len(each)) + tail


@contextmanager
def held_open(port: int, clients: int = 60, size: int = 15 << 20) -> Iterator[list[socket.socket]]:
    """At most 100 clients that have sent ``size`` bytes of a body of 16 MiB, and no more."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {16 << 20}\r\n\r\n"
    with ExitStack() as stack:
        sockets = []
        for _ in range(min(clients, 100)):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            client.settimeout(1)
            with suppress(OSError):  # the server may have answered, and take no more
                client.sendall(head.encode() + bytes(size))
            sockets.append(client)
        yield sockets
