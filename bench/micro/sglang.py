"""kvtier's server as SGLang's HiCache storage, beside HiCacheFile on the same disk, in turns.

    .venv-peers/sglang-0.5.23/bin/python -m kvtier.bench.micro.sglang --path /fast/disk/folder

A batch of 128 pages of 2 MiB, as SGLang's threads call: HiCacheFile by tensors, kvtier by pieces.
*From RAM*: the pages were just set, and the files are in the page cache. *From NVMe*: other pages
are in the server's RAM, and the files were dropped from the page cache. Memory is one copy of the
same bytes, and the tier's own read is DiskSet, alone in this process, on the same disk. *Lookup*:
``batch_exists`` of 1,024 pages that are there.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.bench.flags import run_micro
from kvtier.bench.micro.nvme import disk_folder, gigabytes_per_second, make_buffers, make_keys
from kvtier.bench.micro.server import server
from kvtier.bench.report import Row, median_row, percentile
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet

PAGES, PAGE_BYTES, TOKENS, LOOKUP_PAGES, LOOKUPS = 128, 2 << 20, 64, 1024, 300
_BYTES, _THREADS, _POLL_S, _LOOKUP_MS = PAGES * PAGE_BYTES, 4, 0.001, 5.0
_OTHER_BATCHES = 3
"""Other batches are set after a measured one, so that it leaves the server's RAM."""
_RAM_BATCHES, _NVME_BYTES = 4, 8 * _BYTES


class Pages:
    """An MHA pool of SGLang's in its layout page_first: a piece of K and one of V a page."""

    page_size, layout, dtype, head_num = TOKENS, "page_first", torch.bfloat16, 8

    def __init__(self, count: int, size: int) -> None:
        self.count, self.piece_bytes = count, size // 2
        self.memory: Any = torch.empty((2, count, size // 2), dtype=torch.uint8).random_()
        self.rows = torch.arange(count * TOKENS)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pages, first = (indices[::TOKENS] // TOKENS).tolist(), self.memory.data_ptr()
        places = [kind * self.count + page for page in pages for kind in (0, 1)]
        return [first + one * self.piece_bytes for one in places], [self.piece_bytes] * len(places)


class Files:
    """HiCacheFile, as SGLang's calls of tensors drive it."""

    def __init__(self, storage: Any, pool: Pages, folder: Path) -> None:
        self._storage, self._memory, self._folder = storage, pool.memory, folder

    def batch_set_v1(self, keys: list[str], _: Any) -> list[bool]:
        pages = [self._memory[:, at].flatten() for at in range(len(keys))]
        return [self._storage.batch_set(keys, pages)]

    def batch_get_v1(self, keys: list[str], _: Any) -> list[bool]:
        into = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in keys]
        for at, page in enumerate(self._storage.batch_get(keys, into)):
            self._memory[:, at] = page.view(2, -1)
        return [True]

    def drop(self) -> None:
        """From the page cache."""
        os.sync()
        for path in self._folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def storage(kind: str, pool: Pages, **extra: str) -> Any:
    from sglang.srt.mem_cache import hicache_storage

    from kvtier.extensions.sglang.hicache import HiCachePages

    config = hicache_storage.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "M")
    if kind == "file":
        return hicache_storage.HiCacheFile(config, extra["folder"])
    config.extra_config = dict(extra)
    ours = HiCachePages(config)
    ours.register_mem_pool_host(pool)
    ours.on_host_pools_registered()
    return ours


def tier_read(folder: Path) -> Callable[[], float]:
    """GB/s of the tier's own read."""
    place = DiskPlace(folder, PAGES * (PAGE_BYTES + 4096) + (1 << 20), _THREADS)
    tier = DiskSet([place], PAGE_BYTES)
    keys, buffers = make_keys(PAGES), make_buffers(16, PAGE_BYTES)
    for at, key in enumerate(keys):
        tier.write(key, buffers[at % 16])

    def read(chunk: int, buffer: memoryview) -> None:
        if not tier.read(keys[chunk], buffer):
            raise SystemExit("the tier: a chunk was not read")

    return lambda: gigabytes_per_second(read, PAGES, buffers, _THREADS)


def pace(pool: Pages, of: Any, what: str, keys: list[str]) -> float:
    """GB/s of a batch. What was loaded has to be what was there."""
    kept = pool.memory.clone()
    if what == "get":
        pool.memory.zero_()
    os.sync()  # what others wrote
    begun = time.perf_counter()
    done = getattr(of, f"batch_{what}_v1")(keys, pool.rows)
    spent = time.perf_counter() - begun
    if not all(done) or not torch.equal(kept, pool.memory):
        raise SystemExit(f"{type(of).__name__}, {what}: a page was not moved, or is another")
    return _BYTES / spent / 1e9


def measured(
    folder: Path, address: str, rounds: int, own_read: Callable[[], float] | None = None
) -> dict[str, list[float]]:
    """GB/s by what was moved, kvtier's and HiCacheFile's. The first rounds, in which the server's
    RAM is touched for the first time, are left out. ``own_read``: of a server with NVMe."""
    pool, seen = Pages(PAGES, PAGE_BYTES), dict[str, list[float]]()
    where = "RAM" if own_read is None else "NVMe"
    ours, files = storage("", pool, server=address), folder / f"files, {where}"
    both = {"kvtier": ours, "file": Files(storage("file", pool, folder=str(files)), pool, files)}
    source, copied = pool.memory.numpy(), np.empty_like(pool.memory.numpy())
    client = ours._pools["kv"].server._client

    for number in range(-_RAM_BATCHES, rounds):
        keys, arms = [f"{number} {at}" for at in range(PAGES)], [*both][:: -1 if number % 2 else 1]
        begun = time.perf_counter()
        np.copyto(copied, source)
        turn = {"memory": _BYTES / (time.perf_counter() - begun) / 1e9}
        turn |= {f"set, {where} {one}": pace(pool, both[one], "set", keys) for one in arms}
        if own_read is not None:
            for other in range(_OTHER_BATCHES):
                pace(pool, ours, "set", [f"{key} {other}" for key in keys])
            while client.stats()["queued"]:
                time.sleep(_POLL_S)
            both["file"].drop()
            turn["tier"] = own_read()
        turn |= {f"get, {where} {one}": pace(pool, both[one], "get", keys) for one in arms}
        for name, value in turn.items() if number >= 0 else ():
            seen.setdefault(name, []).append(value)
    ours.close()
    return seen


def lookups(address: str) -> list[float]:
    """Milliseconds of each."""
    pool = Pages(LOOKUP_PAGES, 16 << 10)
    ours, keys = storage("", pool, server=address), [f"{at}" for at in range(LOOKUP_PAGES)]
    ours.batch_set_v1(keys, pool.rows)
    spent = []
    for _ in range(LOOKUPS):
        begun = time.perf_counter()
        if ours.batch_exists(keys) != LOOKUP_PAGES:
            raise SystemExit("lookup: a page is not there")
        spent.append(1e3 * (time.perf_counter() - begun))
    ours.close()
    return spent


def rows_of(seen: dict[str, list[float]], waits: list[float]) -> Iterator[Row]:
    beside = {"set, RAM": "memory", "get, RAM": "memory", "set, NVMe": "", "get, NVMe": "tier"}
    of_what = {"memory": "one copy", "tier": "the tier's own read"}
    for name, limit in beside.items():
        for other in filter(None, (limit, f"{name} file")):
            own, of = seen[f"{name} kvtier"], seen[other]
            ratio = statistics.median(one / two for one, two in zip(own, of, strict=True))
            title = f"SGLang: {name}, beside {of_what.get(other, 'HiCacheFile')}"
            yield median_row(title, own, "GB/s", statistics.median(of), ratio)
    p99 = percentile(waits, 99)
    yield Row("SGLang: lookup of 1,024 pages, p99", p99, "ms", _LOOKUP_MS)


def rows(given: Any) -> list[Row]:
    from sglang.srt.runtime_context import get_context

    with disk_folder(given) as folder:
        # An engine's arguments are resolved by its models, which need a GPU's packages.
        told = {"model_path": str(folder), "load_format": "dummy"}
        type(get_context()).resolved_server_args_dict = lambda _: told
        nvme = {"KVTIER_NVME_PATH": f"{folder}/nvme", "KVTIER_NVME_BYTES": f"{_NVME_BYTES}B"}
        with server(5 * _BYTES // 2, nvme) as (path, _):
            own_read = tier_read(folder / "tier")
            seen = measured(folder, f"unix://{path}", given.rounds, own_read)
        with server(_RAM_BATCHES * _BYTES) as (path, _):
            seen |= measured(folder, f"unix://{path}", given.rounds)
    with server(_BYTES // 4) as (path, _):
        return list(rows_of(seen, lookups(f"unix://{path}")))


if __name__ == "__main__":
    load = {"load_average": os.getloadavg()[0]}
    run_micro("sglang", __doc__, 7, rows, "--path", facts=lambda: load)
