"""The honest client beside an attack, in a process of its own, so that nothing but the server can
make it wait: ``python -m tests.attack.honest SOCKET [NAMESPACE]``.

It asks round after round, ends a phase at each line of its input, and prints what it felt in that
phase as one line of JSON. Its first line says how many chunks of its own it did not find.
"""

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from kvtier.bench.report import percentile
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.errors import KVTierError
from kvtier.testing import content
from tests.server_process import LAYOUT, SLOT, attached, run, save

PROMPT = 7
"""Whose chunks are asked for all the time."""
CHUNKS = 5
_FRESH = 100_000
_FRESH_EVERY = 10
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

    def __init__(self, *words):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.honest", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self):
        self.missed = int(self._told())
        return self

    def __exit__(self, *_):
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def phase(self):
        """End a phase. Returns what was felt since the last one ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return Phase(**json.loads(self._told()))

    def _told(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the honest client has ended"
        return line


def loaded(client, keys, phase):
    until = time.monotonic() + _LOAD_S
    with client.load(keys) as lease:
        while lease.poll().coming and time.monotonic() < until:
            time.sleep(0.001)
        found = list(zip(lease.keys, lease.views(), strict=False))[: len(lease.sources)]
        phase.wrong += sum(view != content(key, len(view)) for key, view in found)
    phase.expected += len(keys)
    phase.lost += len(keys) - len(found)
    return len(found)


def round_(client, number, phase):
    """Look for the prompt and load it, and now and then save a new one. Returns the milliseconds of
    the lookup."""
    keys, begun = run(PROMPT, CHUNKS), time.monotonic()
    client.lookup(keys)
    took_ms = (time.monotonic() - begun) * 1000
    loaded(client, keys, phase)
    if number % _FRESH_EVERY == 0:
        fresh = run(_FRESH + number, 1)
        save(client, fresh)
        loaded(client, fresh, phase)
    return took_ms


def tell(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(socket, namespace=""):
    own = hello(LAYOUT.fingerprint, SLOT, stream=False, namespace=namespace, client="honest")
    with attached(ServerAccess(Address(socket, "", 0), own)) as client:
        keys = run(PROMPT, CHUNKS)
        missed = CHUNKS - loaded(client, keys, Phase())
        save(client, keys)
        tell(f"{missed}")
        said, number = b"\n", 0
        while said:
            phase, ms = Phase(), list[float]()
            while not select.select([0], [], [], _PAUSE_S)[0]:
                number += 1
                try:
                    ms.append(round_(client, number, phase))
                except (KVTierError, OSError):
                    phase.expected += 1
                    phase.lost += 1
            said = os.read(0, 1)
            phase.asked, phase.p99_ms = len(ms), percentile(ms, 99) if ms else 0.0
            tell(json.dumps(asdict(phase)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
