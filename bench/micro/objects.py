"""How near the object tier comes to a plain ``obstore`` get and put of the same bytes.

    python -m kvtier.bench.micro.objects [--connections 2] [--rounds 9] [--chunk-bytes N] [--out
    FILE]

Starts an S3 server of its own (moto, ``make peers``) on loopback. Rounds of four runs alternate:
whole chunks by ``obstore.put`` and ``obstore.get`` alone, and by the tier's write and read, which
compare a checksum and fill a slot besides. A row is the median with lowest and highest; its
``ratio`` is the median over the rounds of value / obstore's value in the same round, its ``limit``
what the project asks for. The server is written in Python, so the values are its own, and only the
ratios say something of the tier. Last: how long ``find`` takes for a run of 128 chunks, of which
half are held, and its requests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import obstore
from obstore.store import S3Store

from kvtier.bench.companion import companion, run_folder
from kvtier.bench.report import Row, spread, write_results
from kvtier.bench.servers import answers, free_port
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.core.pool import Pool
from kvtier.tiers.objects.bucket import Bucket
from kvtier.tiers.objects.layout import Form
from kvtier.tiers.objects.tier import ObjectTier

READ_SHARE = 0.70
"""Asked for: of a plain get."""
_PEERS = Path(__file__).resolve().parents[2] / ".venv-peers"
_CHUNKS = 4
"""Chunks in each thread's key space."""
_RUN_BYTES = 200_000_000
_FOUND = 128

Lane = Callable[[ChunkKey, memoryview], None]


@contextmanager
def s3_server() -> Iterator[str]:
    """A server with an empty bucket called ``bench``: its address, which is in the environment
    too."""
    places = sorted(_PEERS.glob("moto-*/bin/python"))
    if not places:
        raise ConfigError("moto is not installed (make peers)")
    endpoint = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        str(places[0]),
        "-c",
        "from moto.server import main; main()",
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    given = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ.update(given | {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"})
    with (
        run_folder() as run,
        companion(command, {}, lambda: answers(f"{endpoint}/moto-api/"), run / "log", 60),
    ):
        urllib.request.urlopen(
            urllib.request.Request(f"{endpoint}/bench", method="PUT"), timeout=10
        ).close()
        yield endpoint


class CountedBucket(Bucket):
    asked = 0

    def has(self, name: str) -> bool:
        self.asked += 1
        return super().has(name)


class Bench:
    """A tier, and the library alone."""

    def __init__(self, chunk_bytes: int, connections: int) -> None:
        self.chunk_bytes, self.connections = chunk_bytes, connections
        self.bucket, self.form = (
            CountedBucket("s3://bench/tier", chunk_bytes),
            Form("tier", b"bench"),
        )
        self.tier = ObjectTier(self.bucket, self.form, 1 << 40, chunk_bytes)
        self.store = S3Store("bench", client_options={"allow_http": True})
        layout = ChunkLayout(bytes(32), 1, 1, (chunk_bytes,))
        self.keys = [layout.keys([thread] * _CHUNKS) for thread in range(connections)]
        self._pool = Pool(connections, chunk_bytes)
        self._pool.populate(0, connections)
        self.slots = [self._pool.view(slot) for slot in range(connections)]
        for slot in self.slots:
            slot[:] = os.urandom(chunk_bytes)
        self._threads = ThreadPoolExecutor(connections)

    def run(self, lane: Lane) -> float:
        """GB/s of all threads together, each going round its own chunks with its own slot."""
        turns = max(1, round(_RUN_BYTES / self.chunk_bytes / self.connections))

        def work(thread: int) -> None:
            for turn in range(turns):
                lane(self.keys[thread][turn % _CHUNKS], self.slots[thread])

        begun = time.perf_counter()
        list(self._threads.map(work, range(self.connections)))
        return turns * self.connections * self.chunk_bytes / (time.perf_counter() - begun) / 1e9

    def write(self, key: ChunkKey, slot: memoryview) -> None:
        if not self.tier.write(key, slot):
            raise RuntimeError(f"a write failed: {self.tier.counts}")

    def read(self, key: ChunkKey, slot: memoryview) -> None:
        if not self.tier.read(key, slot):
            raise RuntimeError(f"a read failed: {self.tier.counts}")

    def put(self, key: ChunkKey, slot: memoryview) -> None:
        obstore.put(self.store, f"plain/{key.hex()}", slot, use_multipart=False)

    def get(self, key: ChunkKey, slot: memoryview) -> None:
        if len(obstore.get(self.store, f"plain/{key.hex()}").bytes()) != slot.nbytes:
            raise RuntimeError("a plain get gave other bytes")

    def find_ms(self, keys: list[ChunkKey]) -> float:
        begun = time.perf_counter()
        if self.tier.find(keys) != _FOUND // 2:
            raise RuntimeError("a run was found in another length")
        return (time.perf_counter() - begun) * 1e3

    def close(self) -> None:
        self._threads.shutdown()
        self.tier.close()
        self.slots.clear()
        self._pool.close()


def measure(bench: Bench, rounds: int) -> list[Row]:
    lanes: dict[str, Lane] = {
        "put": bench.put,
        "write": bench.write,
        "get": bench.get,
        "read": bench.read,
    }
    values: dict[str, list[float]] = {name: [] for name in lanes}
    for turn in range(rounds + 1):
        for name, lane in lanes.items():
            value = bench.run(lane)
            if turn:  # the first round opens connections
                values[name].append(value)
    rows = [_row(f"S3 on loopback: obstore {name}", values[name]) for name in ("put", "get")]
    for name, plain, share in (("write", "put", None), ("read", "get", READ_SHARE)):
        ratio = statistics.median(
            value / limit for value, limit in zip(values[name], values[plain], strict=True)
        )
        rows.append(
            _row(
                f"S3 on loopback: {name}",
                values[name],
                share and share * statistics.median(values[plain]),
                ratio,
            )
        )
    keys = ChunkLayout(bytes(32), 1, 1, (1,)).keys([7] * _FOUND)
    for key in keys[: _FOUND // 2]:
        bench.tier.write(key, memoryview(b"x"))
    bench.bucket.asked = 0
    looks = [bench.find_ms(keys) for _ in range(20)]
    middle, low, high = spread(looks)
    rows.append(Row(f"find {_FOUND} chunks", middle, "ms", None, None, low, high))
    return [
        *rows,
        Row(f"find {_FOUND} chunks: requests", bench.bucket.asked / len(looks), "requests", 8),
    ]


def _row(
    name: str, values: list[float], limit: float | None = None, ratio: float | None = None
) -> Row:
    middle, low, high = spread(values)
    return Row(name, middle, "GB/s", limit, ratio, low, high)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the object tier against obstore alone.")
    parser.add_argument("--connections", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each kind (default: 9)")
    parser.add_argument("--chunk-bytes", type=int, default=7 << 20, help="default: 7 MiB")
    parser.add_argument("--out", default="bench/results/objects.json")
    args = parser.parse_args(argv)
    with s3_server():
        bench = Bench(args.chunk_bytes, args.connections)
        rows = measure(bench, args.rounds)
        bench.close()
    for row in rows:
        share = "" if row.ratio is None else f"{row.ratio:4.0%} of obstore alone"
        asked = "" if row.limit is None else f", asked for {row.limit:.2f}"
        print(f"{row.name:34} {row.value:6.2f} {row.unit:8} {share}{asked}")
    write_results(
        Path(args.out),
        "objects",
        rows,
        obstore=version("obstore"),
        chunk_bytes=args.chunk_bytes,
        connections=args.connections,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
