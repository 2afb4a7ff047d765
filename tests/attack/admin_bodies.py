"""Bodies for a server's admin interface, from who has no right to send any."""

import gzip
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

PACKED_BYTES = 200 << 20


def bomb():
    return gzip.compress(bytes(PACKED_BYTES), 9)


def gzip_bombs(url, body, *, count, path = "/healthz", method = "GET",
               seconds = 30.0):  # fmt: skip
    """Send the body so often, packed as it says. Returns the statuses of the answers."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n"
        "Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    return [status for _ in range(count) if (status := answered(url, head + body, seconds))]


def endless_bodies(url, *, count, seconds, path="/healthz"):
    """Chunks of one byte on so many connections, as fast as they are taken. Returns the bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    sent, until = 0, time.monotonic() + seconds
    connections = [_connection(url) for _ in range(count)]
    try:
        for one in connections:
            one.settimeout(0.05)
            one.sendall(head)
        while time.monotonic() < until and connections:
            for one in list(connections):
                try:
                    sent += one.send(b"1\r\nx\r\n" * 1000)
                except TimeoutError:
                    continue
                except OSError:
                    connections.remove(one)
                    one.close()
    finally:
        for one in connections:
            one.close()
    return sent


def malformed_headers(url, token):
    """Requests whose header line with the token is not HTTP, as ``$(cat token)`` of a file with
    CRLF makes them."""
    for line in (
        f"Authorization: Bearer {token}\r\r\n",
        f"Authorization : Bearer {token}\r\n",
        f"Authorization: Bearer {token}\x00\r\n",
        f"Authorization: Bearer\r\n{token}\r\n",
        f"Authorization: Bearer {token}\x01\r\n",
        f"Bearer {token}\r\n",
    ):
        answered(url, f"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n{line}\r\n".encode(), 5.0)


def answered(url, request, seconds):
    """The status of the answer. None: the connection was closed without one."""
    with _connection(url) as one:
        one.settimeout(seconds)
        with suppress(ConnectionError):
            one.sendall(request)
        with suppress(OSError):
            answer = one.recv(4096)
            while b"Connection: close" in request and one.recv(4096):
                pass  # the other end still reads
            words = answer.split(b" ", 2)
            return int(words[1]) if len(words) > 1 else None
    return None


def _connection(url):
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), 10.0)
