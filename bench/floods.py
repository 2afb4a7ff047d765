"""How long one engine waits for a lookup while another process floods the server.

Each value is the 99th percentile of an honest engine's lookups (128 chunks, one every two
milliseconds) while one process does nothing but ask, stall or hold. The floods take turns. A row is
the median of the rounds with the lowest and the highest. Its limit is the row of a process that
only burns a CPU, and 10 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.bench.report import Row, median_row
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, enter, hello
from kvtier.core.chunk import ChunkLayout
from kvtier.protocol import wire

_SLOT = 4096
SLOTS = 10_000
_LOOKED_UP, _LONG = 128, 4096
_GOAL_MS = 10.0
_PAUSE_S = 0.002
_SOCKETS = 600
_PATIENT_S = 5.0
LAYOUT = ChunkLayout(bytes(32), 1, 1, (_SLOT,))


def access(path: str) -> ServerAccess:
    return ServerAccess(
        Address(path, "", 0), hello(LAYOUT.fingerprint, _SLOT, stream=False, client="flood")
    )


# ---- the process that floods ---------------------------------------------------------------------


def _asking(path: str, frames: bytes, reads: bool = True) -> None:
    """Send these frames again and again, and read the answers. Attach again when the server closes
    the connection."""
    while True:
        with contextlib.suppress(OSError), enter(access(path)).socket as sock:
            if reads:
                threading.Thread(target=_drained, args=(sock,), daemon=True).start()
            while True:
                sock.sendall(frames)


def _drained(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass


def _holding(path: str, _: int) -> None:
    """Fill as many slots as there are, and stop in the middle of a save."""
    client = Client(access(path), _PATIENT_S)
    held = [client.save(LAYOUT.keys([number, *range(_LONG - 1)])) for number in range(3)]
    os.kill(os.getpid(), signal.SIGSTOP)
    del held


def _knocking(path: str, _: int) -> None:
    """Connect, and say nothing."""
    while True:
        sockets = [socket.socket(socket.AF_UNIX) for _ in range(_SOCKETS)]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.connect(path)
        time.sleep(0.1)
        for sock in sockets:
            sock.close()


def _scraping(_: str, port: int) -> None:
    """Ask for the metrics, one request after another on each connection."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
            while True:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if not sock.recv(1 << 20):
                    break


def _burning(_: str, __: int) -> None:
    while True:
        pass


def _with(*messages: wire.Message, reads: bool = True) -> Callable[[str, int], None]:
    return lambda path, _: _asking(path, b"".join(map(wire.frame, messages)) * 16, reads)


_RUN = wire.joined(LAYOUT.keys(range(_LONG)))
_NEIGHBOURS = {
    kind: f"one that {words}"
    for kind, words in {
        "cpu": "only burns a CPU",
        "deaf": "reads no answers",
        "stopped": "stopped in a save",
        "mute": "says nothing",
    }.items()
}
KINDS: dict[str, Callable[[str, int], None]] = {
    "cpu": _burning,
    "lookup": _with(wire.LookupCall(1, _RUN)),
    "load": _with(wire.LoadCall(1, _RUN, 0)),
    "save": _with(wire.Save(1, _RUN), wire.Invalidate(_RUN)),
    "stats": _with(wire.StatsCall(1)),
    "check": _with(wire.Check(1, True)),
    "clear": _with(wire.InvalidateAllCall()),
    "metrics": _scraping,
    "deaf": _with(wire.StatsCall(1), reads=False),
    "stopped": _holding,
    "mute": _knocking,
}


@contextmanager
def flood(kind: str, path: str, port: int) -> Iterator[None]:
    words = [sys.executable, "-m", "kvtier.bench.floods", kind, path, str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


# ---- the engine beside it ------------------------------------------------------------------------


def waits(path: str, seconds: float) -> list[float]:
    """Milliseconds of each lookup, sorted."""
    client = Client(access(path), _PATIENT_S)
    keys = LAYOUT.keys(range(_LOOKED_UP))
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.perf_counter()
        client.lookup(keys)
        found.append(1000 * (time.perf_counter() - begun))
        time.sleep(_PAUSE_S)
    client.close()
    return sorted(found)


def flood_rows(path: str, port: int, seconds: float, rounds: int) -> list[Row]:
    """A row for each flood. ``path`` is a server's socket, ``port`` is its admin surface's, and
    ``seconds`` is the length of each flood."""
    client = Client(access(path), _PATIENT_S)
    for prompt in range(SLOTS // _LOOKED_UP):
        with client.save(LAYOUT.keys([prompt, *range(_LOOKED_UP - 1)])) as lease:
            lease.commit()
    p99: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in reversed(KINDS) if number % 2 else KINDS:
            with flood(kind, path, port):
                times = waits(path, seconds)
            p99[kind].append(times[int(0.99 * len(times))])
    client.close()
    limit = statistics.median(p99["cpu"]) + _GOAL_MS
    return [
        median_row(
            f"lookup beside {_NEIGHBOURS.get(kind, f'a flood of {kind}')}: p99",
            values,
            "ms",
            limit if kind != "cpu" else None,
        )
        for kind, values in p99.items()
    ]


if __name__ == "__main__":
    print("ready", flush=True)
    KINDS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
