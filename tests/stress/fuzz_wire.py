"""Frames at random against a live server: ``python -m tests.stress.fuzz_wire --frames 1000000
[--seed N]``.

Server and attackers share one process and loop, so that a bug is seen as what it is (an exception)
and not only by its traces. Attackers connect through a Unix socket and TCP. Some never greet, some
greet and then ask at random, with frames that are right, odd, damaged or cut. A frame counts when
the server's decoder has judged it. In between and at the end a client that behaves must be served,
byte for byte. At the end nothing of anybody may be left.

Prints one line of JSON. Exit status 1 when a promise was broken.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtier.client.connect import Address, hello
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.kv_events import BlockStored
from kvtier.server.listeners import listen_tcp, listen_unix
from kvtier.server.server import Server
from kvtier.store.store import Store
from kvtier.testing import DictTier, content

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "fuzz"}), 1, 1, (SLOT,))
GOOD = LAYOUT.keys([99, 1, 2])
BURST = 200


class Judged:
    """Counts the frames that the server's decoders accept or refuse."""

    def __init__(self):
        self.frames = self.refused = 0
        inner = self.inner = Inbox.next
        """Without being counted."""

        def counting(inbox):
            try:
                message = inner(inbox)
            except wire.WireError:
                self.frames += 1
                self.refused += 1
                raise
            self.frames += message is not None
            return message

        Inbox.next = counting  # type: ignore[method-assign]


class Bugs(logging.Handler):
    """Exceptions that the server met."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record):
        self.seen.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}")


def corpus(draw, union, size):
    """Frames of a union's messages with fields that often make sense, and damaged copies of
    them."""
    frames = [
        wire.frame(message(draw, kind))
        for kind in union.__args__
        for _ in range(size // len(union.__args__))
    ]
    return frames + [damaged(draw, draw.choice(frames)) for _ in range(size // 4)]


def calm(draw):
    """Questions that a session survives, so that the others meet one in the middle of its work."""
    kinds = [
        wire.LookupCall,
        wire.KnownCall,
        wire.Save,
        wire.LoadCall,
        wire.LoadCall,
        wire.StatsCall,
        wire.Check,
        wire.Invalidate,
        wire.InvalidateAllCall,
    ]
    kinds += [wire.Decline, wire.HintCall, wire.ServedCall]
    return [wire.frame(message(draw, draw.choice(kinds), odd=False)) for _ in range(2000)]


def message(draw, kind, odd=True):
    keys = LAYOUT.keys([draw.randrange(3) for _ in range(draw.randrange(6))])
    fields: dict[str, Any] = {
        "keys": draw.randbytes(draw.randrange(90))
        if odd and draw.random() < 0.3
        else wire.joined(keys),
        "key": bytes(LAYOUT.keys([draw.randrange(3)])[0]),
        "idle": draw.random() < 0.5,
        "checksum": draw.randbytes(16),
        "timeout_ms": draw.randrange(3),
        "reason": draw.choice(["slower", "deadline"]),
        "over": draw.random() < 0.5,
        "keep_s": draw.choice([0.0, 60.0]),
        "session": draw.choice(["", "one", "two"]),
        "hits": [draw.randrange(100)] * draw.randrange(4) if odd else [],
        "again": draw.random() < 0.5,
        "event": BlockStored([draw.randbytes(8)], None, [1] * 64, 64, None, "CPU", None),
    }
    number = draw.choice([0, 1, 2, draw.randrange(50), draw.randrange(2**32)])
    made: wire.Message = kind(*(fields.get(name, number) for name in kind.__struct_fields__))
    return made


def damaged(draw, frame):
    bad = bytearray(frame)
    for _ in range(draw.randint(1, 3)):
        bad[draw.randrange(len(bad))] = draw.randrange(256)
    return bytes(bad[: draw.choice([len(bad), draw.randint(1, len(bad))])])


class Attack:
    """Connections, one after the other, until enough frames were judged."""

    def __init__(self, draw, listeners, judged):
        self._draw = draw
        self._judged = judged
        self._unix, self._tcp = (listener.address for listener in listeners)
        self._hellos = {
            stream: wire.frame(hello(LAYOUT.fingerprint, SLOT, stream=stream, client="fuzz"))
            for stream in (False, True)
        }
        self._corpora = {
            False: corpus(draw, wire.Question, 4000),
            True: corpus(draw, wire.StreamQuestion, 2000),
        }
        self._calm = calm(draw)
        self._greetings = [
            damaged(draw, draw.choice(list(self._hellos.values()))) for _ in range(2000)
        ]
        self.connections = 0

    async def run(self, frames):
        while self._judged.frames < frames:
            await self.connect()
            self.connections += 1

    async def connect(self):
        draw, loop = self._draw, asyncio.get_running_loop()
        stream = draw.random() < 0.3
        cache_server = stream and draw.random() < 0.5
        with socket.socket(socket.AF_INET if cache_server else socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await loop.sock_connect(
                sock, (self._tcp.host, self._tcp.port) if cache_server else self._unix.path
            )
            if draw.random() < 0.2:
                sent = draw.choice(self._greetings) + draw.randbytes(draw.randrange(9))
            else:
                frames = draw.choices(self._corpora[stream], k=draw.randint(1, BURST))
                if not stream and draw.random() < 0.7:
                    frames = draw.choices(self._calm, k=BURST) + frames
                sent = self._hellos[stream] + b"".join(frames)
                await self._welcomed(loop, sock, sent[: len(self._hellos[stream])])
                sent = sent[len(self._hellos[stream]) :]
            await self._talk(loop, sock, sent)

    async def _welcomed(self, loop, sock, greeting):
        """Past the greeting. Descriptors that are passed are closed by not being received."""
        await loop.sock_sendall(sock, greeting)
        inbox: Inbox[wire.Message] = Inbox(wire.Challenge | wire.Welcome | wire.Refused)
        while count := await loop.sock_recv_into(sock, inbox.room()):
            inbox.filled(count)
            while (message := self._judged.inner(inbox)) is not None:
                if not isinstance(message, wire.Challenge):
                    return

    async def _talk(self, loop, sock, sent):
        """Say it in two pieces and listen until the server has nothing more to say, or half close
        in the middle."""
        cut = self._draw.randint(0, len(sent))
        try:
            for piece in (sent[:cut], sent[cut:]):
                await loop.sock_sendall(sock, piece)
                await asyncio.sleep(0)
            if self._draw.random() < 0.9:
                sock.shutdown(socket.SHUT_WR)
                while await asyncio.wait_for(loop.sock_recv(sock, 1 << 16), 5.0):
                    pass
        except (ConnectionError, TimeoutError, BrokenPipeError):
            pass


async def behave(address):
    """A client that behaves: its chunks are served, byte for byte."""
    from kvtier.client.client import Client
    from kvtier.client.connect import ServerAccess

    def talk():
        client = Client(
            ServerAccess(address, hello(bytes([7]) * 32, SLOT, stream=False, client="good")), 5.0
        )
        with client.save(GOOD) as lease:
            for key, view in zip(lease.keys, lease.views(), strict=True):
                view[:] = content(key, SLOT)
            lease.commit()
        with client.load(GOOD) as load:
            while load.poll().coming:
                client.wait(0.1)
            served = load.views()
            assert served == [content(key, SLOT) for key in GOOD[: len(served)]], "a wrong byte"
            assert served, "nothing was served"
        assert client.counts["lost"] == 0
        client.close()

    await asyncio.to_thread(talk)


async def fuzz(frames, seed):
    judged, bugs = Judged(), Bugs()
    logging.getLogger().addHandler(bugs)
    logging.getLogger("kvtier").setLevel(logging.ERROR)
    store = Store(
        Pool(16, SLOT), [(DictTier(32), Lane("dict", 2, urgent_bound=64, bound=64))], share=0.5
    )
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        unix = listen_unix(Address(f"{folder}/run/sock", "", 0))
        tcp = listen_tcp(Address("", "127.0.0.1", 0), token=False, tls=None, insecure=True)

        def opened(slot_bytes, lent=False):
            if lent:
                raise ConfigError(f"slots of {slot_bytes} bytes beside those of {SLOT}")
            return store

        server = Server(opened, [unix, tcp])
        await server.start()
        attack = Attack(random.Random(seed), [unix, tcp], judged)
        await attack.run(frames // 100)
        before, begun = memory_kib(), time.monotonic()
        for part in range(1, 11):
            await attack.run(frames * part // 10)
            await behave(unix.address)
            store.check()
        seconds, after = time.monotonic() - begun, memory_kib()
        while server.connections or server.lingering:  # noqa: ASYNC110 - a state without an event
            await asyncio.sleep(0.01)
        await server.stop()
        store.check(idle=True)
    return {
        "frames": judged.frames,
        "refused": judged.refused,
        "connections": attack.connections,
        "seconds": round(seconds, 1),
        "bugs": bugs.seen[:5],
        "memory_growth_kib": after - before,
        "counts": dict(server.counts),
    }


def memory_kib():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    given = parser.parse_args()
    result = {"seed": given.seed} | asyncio.run(fuzz(given.frames, given.seed))
    print(json.dumps(result))  # noqa: T201 - its answer
    return 1 if result["bugs"] or result["memory_growth_kib"] > 50_000 else 0


if __name__ == "__main__":
    sys.exit(main())
