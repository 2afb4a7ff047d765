"""The honest client beside an attack, in a process of its own, so that nothing but the server can
make it wait: ``python -m tests.attack.honest SOCKET [NAMESPACE]``.

It asks round after round, ends a phase at each line of its input, and prints what it felt in that
phase as one line of JSON. Its first line says how many chunks of its own it did not find.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Self

from kvtier.bench.report import percentile
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import KVTierError
from kvtier.testing.check_tier import content
from tests.server_process import LAYOUT, attached, run, save

PROMPT = 7
"""Whose chunks are asked for all the time."""
CHUNKS = 5
_FRESH = 100_000
_FRESH_EVERY = 10
"""Rounds between two prompts that nobody has had."""
_PAUSE_S = 0.005
_LOAD_S = 5.0


@dataclass
class Phase:
    """``expected``: chunks that should have been hits."""

    p99_ms: float = 0.0
    asked: int = 0
    expected: int = 0
    lost: int = 0
    wrong: int = 0
    """Chunks with bytes that were never saved for them."""


class Honest:
    """The process, as its parent sees it. Use as a context manager.

    ``missed``: chunks of its own that it did not find at its start, and saved.
    """

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.honest", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        self.missed = int(self._told())
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def phase(self) -> Phase:
        """End a phase. Returns what was felt since the last one ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return Phase(**json.loads(self._told()))

    def _told(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the honest client has ended"
        return line


@dataclass
class Felt:
    """One phase, while it lasts."""

    ms: list[float] = field(default_factory=list)
    phase: Phase = field(default_factory=Phase)

    @contextmanager
    def timed(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.ms.append((time.monotonic() - begun) * 1000)

    def ended(self) -> Phase:
        self.phase.asked = len(self.ms)
        self.phase.p99_ms = percentile(self.ms, 99) if self.ms else 0.0
        return self.phase


Round = Callable[[Felt], None]


@contextmanager
def cache(socket: str, namespace: str = "") -> Iterator[tuple[int, Round]]:
    """A client that looks for its prompt and loads it, and now and then saves a new one."""
    own = hello(
        LAYOUT.fingerprint, LAYOUT.chunk_bytes, stream=False, namespace=namespace, client="honest"
    )
    keys, rounds = run(PROMPT, CHUNKS), 0
    with attached(ServerAccess(Address(socket, "", 0), own)) as client:

        def round_(felt: Felt) -> None:
            nonlocal rounds
            rounds += 1
            with felt.timed():
                client.lookup(keys)
            loaded(client, keys, felt.phase)
            if rounds % _FRESH_EVERY == 0:
                fresh = run(_FRESH + rounds, 1)
                save(client, fresh)
                loaded(client, fresh, felt.phase)

        missed = CHUNKS - loaded(client, keys, Phase())
        save(client, keys)
        yield missed, round_


def loaded(client: Client, keys: list[ChunkKey], phase: Phase) -> int:
    """Load these and compare every byte. Returns how many there were."""
    until = time.monotonic() + _LOAD_S
    with client.load(keys) as lease:
        while lease.poll().coming and time.monotonic() < until:
            time.sleep(0.001)
        found = list(zip(lease.keys, lease.views(), strict=False))[: len(lease.sources)]
        phase.wrong += sum(view != content(key, len(view)) for key, view in found)
    phase.expected += len(keys)
    phase.lost += len(keys) - len(found)
    return len(found)


def phases(round_: Round) -> Iterator[Phase]:
    """Each phase at its end, until the input ends."""
    said = b"\n"
    while said:
        felt = Felt()
        while not select.select([0], [], [], _PAUSE_S)[0]:
            try:
                round_(felt)
            except (KVTierError, OSError):
                felt.phase.expected += 1
                felt.phase.lost += 1
        said = os.read(0, 1)
        yield felt.ended()


def main() -> int:
    """See the module's text."""
    with cache(*sys.argv[1:]) as (missed, round_):
        sys.stdout.write(f"{missed}\n")
        sys.stdout.flush()
        for phase in phases(round_):
            sys.stdout.write(json.dumps(asdict(phase)) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
