"""ZeroMQ's wire, spoken without its library: what a stranger sends to a server's event stream, and
what a rogue engine tells the server that follows it."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

import zmq

from tests.child_process import DEADLINE_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
END = (2**64 - 1).to_bytes(8, "big")
"""The number behind the last message of a replay."""


def frame(body, flags=0):
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def ready(kind):
    name, value = b"Socket-Type", kind.encode()
    body = b"\x05READY" + bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return bytes([COMMAND, len(body)]) + body


def dial(endpoint):
    if endpoint.startswith("ipc://"):
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(10.0)
        made.connect(endpoint.removeprefix("ipc://"))
        return made
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), 10.0)


def endless_message(endpoint, kind, *, most, length=0, seconds=10.0):
    """One message of frames of this length without end. Returns the bytes that were taken before
    the other end hung up. None: it did not, before ``most`` or for so long."""
    piece = frame(bytes(length), MORE) * 1000
    return _taken(endpoint, GREETING + ready(kind), piece, most, seconds)


def giant_frame(endpoint, kind, *, most, seconds=10.0):
    """One frame of so many bytes. Returns what :func:`endless_message` does."""
    head = GREETING + ready(kind) + bytes([LONG]) + (2 * most).to_bytes(8, "big")
    return _taken(endpoint, head, bytes(1 << 20), most, seconds)


def _taken(endpoint, head, piece, most, seconds):
    sent, until = 0, time.monotonic() + seconds
    with dial(endpoint) as one:
        one.sendall(head)
        one.settimeout(1.0)
        while sent < most and time.monotonic() < until:
            try:
                sent += one.send(piece)
            except TimeoutError:
                continue  # it reads slowly
            except OSError:
                return sent
    return None


def pings_that_nobody_reads(endpoint, kind, *, most, seconds=5.0):
    """Ask for signs of life and read none. Returns the bytes that were taken."""
    ping = bytes([COMMAND, 23]) + b"\x04PING" + bytes(18)
    sent, until = 0, time.monotonic() + seconds
    with dial(endpoint) as one:
        one.sendall(GREETING + ready(kind))
        one.settimeout(0.5)
        with suppress(OSError):
            while sent < most and time.monotonic() < until:
                sent += one.send(ping * 4000)
    return sent


@contextmanager
def crowd(endpoint, members, says=b""):
    every = []
    try:
        for _ in range(members):
            one = dial(endpoint)
            every.append(one)
            with suppress(OSError):
                one.sendall(says)
        yield
    finally:
        for one in every:
            one.close()


def end_of_replay(replay):
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(replay)
        asking.send_multipart([b"", bytes(8)])
        while asking.poll(int(1000 * DEADLINE_S)):
            *_, number, _ = asking.recv_multipart()
            if number == END:
                return True
    return False


class RogueEngine:
    """Has an engine's endpoints, and does there what ``act`` says with each connection that has
    said hello. Use as a context manager."""

    def __init__(self, endpoint, kind, act):
        self._kind, self._act = kind, act
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(endpoint.removeprefix("ipc://"))
        self._listening.listen(8)
        self.visits = 0
        self._over = False

    def __enter__(self):
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over = True
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(20.0)

    def _serve(self):
        while not self._over:
            try:
                one, _ = self._listening.accept()
            except OSError:
                return
            self.visits += 1
            with one, suppress(OSError):
                one.settimeout(2.0)
                one.sendall(GREETING + ready(self._kind))
                one.recv(4096)
                self._act(one)


def numbered(number, payload):
    parts = frame(b"", MORE), frame((number % 2**64).to_bytes(8, "big"), MORE), frame(payload)
    return b"".join(parts)


def told(*messages, seconds=1.0):
    def act(one):
        for message in messages:
            one.sendall(message)
        time.sleep(seconds)

    return act


def frames_without_end(most):
    piece = frame(bytes(1000), MORE) * 1000

    def act(one):
        for _ in range(most // len(piece)):
            one.sendall(piece)

    return act
