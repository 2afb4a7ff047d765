"""The index alone: naming, looking up, loading and saving the chunks of a long prompt, and the
memory of a chunk.

``python -m kvtier.bench.micro.index`` measures, in this process, a prompt of 32,768 tokens (128
chunks of 256): the keys and the lookup when all chunks are held and when none is, a load, a save
for which as many chunks leave, 16 chunks that a tier without a medium has, and the question to a
server. Then the bytes of Python memory of a chunk in RAM and of one only on NVMe. Tokens are a
plain list of ints, as an engine has them.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import cycle

from kvtier.bench.flags import run_micro
from kvtier.bench.report import Row, median_row
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.core.tenant import UNOWNED
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane

TOKENS, CHUNK, CHUNKS, SLOT = 32_768, 256, 50_048, 4096
OWNER = 1 << 127
LAYOUT = ChunkLayout(fingerprint({"benchmark": "index"}), CHUNK, 16, (16,))
PROMOTED = 16


def prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(150_000) for _ in range(TOKENS)]


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def fill(store: Store, keys: Sequence[ChunkKey]) -> None:
    with store.save(keys, OWNER) as lease:
        lease.commit()


def lookup_cases() -> dict[str, Callable[[], object]]:
    """Lookups by name, on stores of their own."""
    draw = random.Random(1)
    store, tokens, other = Store(Pool(256, SLOT)), prompt(draw), prompt(draw)
    fill(store, LAYOUT.keys(tokens))
    keys = LAYOUT.keys(tokens)
    return {
        "keys + match, all 128 chunks held": lambda: store.lookup(LAYOUT.keys(tokens)).progress,
        "keys + match, none held": lambda: store.lookup(LAYOUT.keys(other)).progress,
        "match alone, all held": lambda: store.lookup(keys).progress,
    }


def call_cases() -> dict[str, Callable[[], object]]:
    """Calls of a Store that move no bytes, and a question to a server without the server."""
    draw, lane = random.Random(3), ManualLane(bound=1000)
    store, below = Store(Pool(256, SLOT)), Store(Pool(2 * PROMOTED, SLOT), [(DictTier(1000), lane)])
    runs = [LAYOUT.keys(prompt(draw)) for _ in range(6)]
    short = [run[:PROMOTED] for run in runs]
    fill(store, runs[0])
    for run in short:
        fill(below, run)
        lane.run()
    saved, promoted = cycle(runs), cycle(short)

    def promote() -> None:
        with below.load(next(promoted)) as lease:
            lane.run()
            if lease.poll().ready != PROMOTED:
                raise SystemExit("a chunk did not come from the tier")

    def question() -> None:
        asked = wire.frame(wire.LookupCall(1, wire.joined(runs[0])))
        inbox: Inbox[wire.Question] = Inbox(wire.Question)
        inbox.room()[: len(asked)] = asked
        inbox.filled(len(asked))
        told = inbox.next()
        assert isinstance(told, wire.LookupCall)
        wire.split(told.keys)

    return {
        "load of 128 chunks in RAM": lambda: store.load(runs[0]).close(),
        "save of 128 chunks over others": lambda: fill(store, next(saved)),
        f"load of {PROMOTED} chunks that a tier has": promote,
        "question of 128 keys, there and back": question,
    }


def memory_rows() -> list[Row]:
    """Memory of the index after :data:`CHUNKS` chunks were saved. Slots are empty pages, which are
    not counted."""
    draw = random.Random(2)
    runs = [LAYOUT.keys(prompt(draw)) for _ in range(CHUNKS * CHUNK // TOKENS)]
    tracemalloc.start()
    held = [[ChunkKey(bytes(bytearray(key))) for key in run] for run in runs]
    del runs
    keys_only = tracemalloc.get_traced_memory()[0]
    pool = Pool(len(held) * len(held[0]), SLOT)
    before = tracemalloc.get_traced_memory()[0]
    store = Store(pool)
    for run in held:
        fill(store, run)
    index = tracemalloc.get_traced_memory()[0] - before
    ram = index / pool.slots + keys_only / pool.slots
    tier, lane = _Nothing(pool.slots), ManualLane(bound=pool.slots)
    before = tracemalloc.get_traced_memory()[0]
    lower = Store(Pool(len(held[0]), SLOT), [(tier, lane)])
    for run in held:
        fill(lower, run)
        lane.run()
    nvme = (tracemalloc.get_traced_memory()[0] - before + keys_only) / pool.slots
    tracemalloc.stop()
    return [
        Row("index memory of a chunk in RAM, key and owner included", ram, "bytes", limit=400),
        Row("index memory of a chunk on NVMe only, without the tier's own", nvme, "bytes", 400),
    ]


class _Nothing(DictTier):
    """Takes every chunk and keeps none. What remains is the Directory's own memory."""

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        return True


def rows_of(given: argparse.Namespace) -> list[Row]:
    timed = [(lookup_cases(), 0.3), (call_cases(), None)]
    return [
        median_row(name, [milliseconds(work) for _ in range(given.rounds)], "ms", limit)
        for cases, limit in timed
        for name, work in cases.items()
    ] + memory_rows()


if __name__ == "__main__":
    run_micro("index", __doc__, 500, rows_of)
