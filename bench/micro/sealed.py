"""What encryption at rest costs: sealing and opening alone, and the NVMe tier with and without it.

    python -m kvtier.bench.micro.sealed --path /fast/disk/folder

- Seal and open: :class:`SealedTier` over a tier that keeps nothing and gives back what it got, so
  that only the cipher is measured. It is compared with a plain copy (``memoryview`` assignment) of
  the same buffers by the same threads.
- NVMe: write and read through :class:`NvmeTier` plain, sealed, and through a copy in scratch memory
  as the sealed one makes. Sizes and threads are the same. They take turns, and so does which one
  begins. The ratio is to plain. The copy is the control: a virtual disk's host copies once more,
  and writes a chunk faster that is still in the CPU's cache. So sealed can seem to cost less than
  nothing.

A row is the median with the lowest and the highest. It needs room for three files of ``chunks *
chunk_mib``, and removes them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtier.bench.micro.nvme import (
    Work,
    disk_flags,
    expect,
    gigabytes_per_second,
    make_buffers,
    make_keys,
)
from kvtier.bench.report import Row, median_row, print_rows, spread, write_results
from kvtier.core.chunk import ChunkKey
from kvtier.core.tenant import UNOWNED
from kvtier.testing import DictTier
from kvtier.tiers.base import Tier
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sealed import KEY_BYTES, SealedTier, sealed_bytes

_MIB = 1 << 20


class EchoTier(DictTier):
    """Keeps nothing. A write is dropped, and a read finds in the sealed tier's scratch memory what
    was written last."""

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        return True

    def read(self, key: ChunkKey, into: memoryview) -> bool:
        return True


class CopyTier(DictTier):
    """Through each thread's own scratch memory, without a cipher."""

    def __init__(self, inner: Tier, chunk_bytes: int) -> None:
        super().__init__(inner.capacity)
        self._inner, self._size, self._scratch = inner, chunk_bytes, threading.local()

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        room = self._room()
        room[:] = data
        return self._inner.write(key, room)

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        room = self._room()
        found = self._inner.read(key, room)
        into[:] = room
        return found

    def delete(self, key: ChunkKey) -> None:
        self._inner.delete(key)

    def _room(self) -> memoryview:
        if not hasattr(self._scratch, "room"):
            self._scratch.room = memoryview(mmap.mmap(-1, self._size))
        room: memoryview = self._scratch.room
        return room


def cipher(chunk_bytes: int, chunks: int, rounds: int, threads: int) -> list[Row]:
    """Rows of sealing and opening, compared with a copy."""
    buffers = make_buffers(16, chunk_bytes)
    targets = [memoryview(mmap.mmap(-1, chunk_bytes)) for _ in buffers]
    pairs = {id(buffer): target for buffer, target in zip(buffers, targets, strict=True)}
    tier = SealedTier(EchoTier(1), os.urandom(KEY_BYTES), chunk_bytes)
    (key,) = make_keys(1)

    def copy(_: int, buffer: memoryview) -> None:
        pairs[id(buffer)][:] = buffer

    def seal(_: int, buffer: memoryview) -> None:
        expect(tier.write(key, buffer))

    def unseal(chunk: int, buffer: memoryview) -> None:
        if not hasattr(tier._scratch, "room"):  # this thread's first: there is nothing to open yet
            seal(chunk, buffer)
        expect(tier.read(key, pairs[id(buffer)]) is True)

    seen = _in_turns([[copy, seal, unseal]], chunks, buffers, rounds, threads)
    limit = spread(seen[copy])
    return [
        Row(f"copy, {_threads(threads)}", limit[0], "GB/s", min=limit[1], max=limit[2]),
        _row(f"seal, {_threads(threads)} (ratio to copy)", seen[seal], limit[0]),
        _row(f"open, {_threads(threads)} (ratio to copy)", seen[unseal], limit[0]),
    ]


def disk(folder: Path, chunk_bytes: int, chunks: int, rounds: int, threads: int) -> list[Row]:
    """Rows of the NVMe tier: plain, through a copy, sealed."""
    keys, buffers = make_keys(chunks), make_buffers(16, chunk_bytes)
    stored = sealed_bytes(chunk_bytes)
    plain, copied = (
        NvmeTier(folder / name, chunks * (chunk_bytes + 4096) + _MIB, chunk_bytes)
        for name in ("plain", "copied")
    )
    sealed = SealedTier(
        NvmeTier(folder / "sealed", chunks * (stored + 4096) + _MIB, stored),
        os.urandom(KEY_BYTES),
        chunk_bytes,
    )

    def writing(tier: Tier) -> Work:
        def work(chunk: int, buffer: memoryview) -> None:
            tier.delete(keys[chunk])
            expect(tier.write(keys[chunk], buffer))

        return work

    def reading(tier: Tier) -> Work:
        return lambda chunk, buffer: expect(tier.read(keys[chunk], buffer) is True)

    tiers: list[Tier] = [plain, CopyTier(copied, chunk_bytes), sealed]
    writes, reads = [writing(tier) for tier in tiers], [reading(tier) for tier in tiers]
    seen = _in_turns([writes, reads], chunks, buffers, rounds, threads)
    for tier in (plain, copied, sealed):
        tier.close()
    rows = []
    for verb, (without, control, with_) in (("write", writes), ("read", reads)):
        limit = statistics.median(seen[without])
        about = f"{verb}, {_threads(threads)}"
        rows.append(median_row(f"NvmeTier {about}", seen[without], "GB/s"))
        for name, work in (
            (f"NvmeTier {verb} through a copy, {_threads(threads)}", control),
            (f"sealed NvmeTier {about}", with_),
        ):
            rows.append(_row(f"{name} (ratio to plain)", seen[work], limit))
    return rows


def _in_turns(
    groups: Sequence[Sequence[Work]],
    chunks: int,
    buffers: Sequence[memoryview],
    rounds: int,
    threads: int,
) -> dict[Work, list[float]]:
    """GB/s of every round of every work. The first round, which makes pages and blocks present, is
    left out."""
    seen: dict[Work, list[float]] = {work: [] for group in groups for work in group}
    for round_ in range(rounds + 1):
        for group in groups:
            first = round_ % len(group)
            for work in (*group[first:], *group[:first]):
                speed = gigabytes_per_second(work, chunks, buffers, threads)
                if round_:
                    seen[work].append(speed)
    return seen


def _row(name: str, values: Sequence[float], limit: float) -> Row:
    return median_row(name, values, "GB/s", limit, statistics.median(values) / limit)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def main() -> None:
    given = disk_flags(__doc__, "sealed", [1, 2]).parse_args()
    size = int(given.chunk_mib * _MIB)
    rows: list[Row] = []
    try:
        for threads in given.threads:
            rows += cipher(size, 4 * given.chunks, given.rounds, threads)
            rows += disk(given.path / str(threads), size, given.chunks, given.rounds, threads)
    finally:
        shutil.rmtree(given.path, ignore_errors=True)
    write_results(given.out, "sealed", rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
