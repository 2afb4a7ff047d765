"""How near the object tier comes to a plain ``obstore`` get and put of the same bytes.

    python -m kvtier.bench.micro.objects [--connections 2] [--rounds 9] [--chunk-bytes N]
        [--out FILE]

Starts an S3 server of its own (moto, ``make peers``) on loopback. In each round whole chunks are
moved by ``obstore.put`` and ``obstore.get`` alone, and by the tier's write and read, which compare
a checksum and fill a slot too. A row is the median with the lowest and the highest. Its ``ratio``
is the median over the rounds of the value divided by obstore's value in the same round. Its
``limit`` is what the project asks for. The server is written in Python and limits every value, so
only the ratios say something of the tier. The last rows say how long ``find`` takes for a run of
128 chunks of which half are held, and how many requests that are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import version

import obstore
from obstore.store import S3Store

from kvtier.bench.processes.companion import companion, run_folder
from kvtier.bench.processes.s3_server import moto_command, s3_request
from kvtier.bench.processes.servers import answers, free_port
from kvtier.bench.report import Row, print_rows, write_results
from kvtier.bench.tier_and_peer import (
    FOUND,
    LOOKUPS,
    Peer,
    Threads,
    Way,
    add_flags,
    lookup_row,
    measure,
)
from kvtier.core.chunk import ChunkKey
from kvtier.extensions.objects.bucket import Bucket
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.tiers.away.object_layout import ObjectForm

READ_SHARE = 0.70
"""What the project asks for, as a share of a plain get."""
_CHUNKS = 4
"""Chunks of each thread."""
_RUN_BYTES = 200_000_000
_REQUESTS = 8
"""What the project asks for: requests of one lookup."""


@contextmanager
def s3_server() -> Iterator[None]:
    """A server with an empty bucket called ``bench``. Its address is in the environment."""
    endpoint = f"http://127.0.0.1:{(port := free_port())}"
    given = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ.update(given | {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"})
    ready = partial(answers, f"{endpoint}/moto-api/")
    with run_folder() as run, companion(moto_command(port), {}, ready, run / "log", 60):
        s3_request("PUT", f"{endpoint}/bench")
        yield


class CountedBucket(Bucket):
    asked = 0

    def has(self, name: str) -> bool:
        self.asked += 1
        return super().has(name)


def _put(store: S3Store, key: ChunkKey, slot: memoryview) -> None:
    obstore.put(store, f"plain/{key.hex()}", slot, use_multipart=False)


def _get(store: S3Store, key: ChunkKey, slot: memoryview) -> None:
    if len(obstore.get(store, f"plain/{key.hex()}").bytes()) != slot.nbytes:
        raise RuntimeError("a plain get gave another number of bytes")


def rows_of(chunk_bytes: int, connections: int, rounds: int) -> list[Row]:
    bucket = CountedBucket("s3://bench/tier", chunk_bytes)
    store = S3Store("bench", client_options={"allow_http": True})
    with (
        closing(ObjectTier(bucket, ObjectForm("tier", b"bench"), 1 << 40, chunk_bytes)) as tier,
        Threads(connections, chunk_bytes, _CHUNKS, _RUN_BYTES) as threads,
    ):
        put, get = (partial(threads.speed, partial(move, store)) for move in (_put, _get))
        peer = Peer("obstore", Way("put", put), Way("get", get, READ_SHARE))
        rows = measure("S3 on loopback", threads, tier, peer, rounds)
        name, bucket.asked = f"find {FOUND} chunks", 0
        rows.append(lookup_row(name, tier, FOUND // 2))
        rows.append(Row(f"{name}: requests", bucket.asked / LOOKUPS, "requests", _REQUESTS))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the object tier against obstore alone.")
    add_flags(parser, "objects")
    args = parser.parse_args(argv)
    with s3_server():
        rows = rows_of(args.chunk_bytes, args.connections, args.rounds)
    print_rows(rows)
    setup = {"chunk_bytes": args.chunk_bytes, "connections": args.connections}
    write_results(args.out, "objects", rows, obstore=version("obstore"), **setup)
    return 0


if __name__ == "__main__":
    sys.exit(main())
