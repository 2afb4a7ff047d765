"""Bounded measurements for a plan: memory copy, O_DIRECT on each path, Redis, a bucket. At most
:data:`SECONDS` in total.

Each uses one thread, but for the bucket. A disk with many queues may do better than measured, so
the plan errs on the slow side.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvtier.autoconfig.facts import MIB, Disk, Facts, ObjectStore, Redis
from kvtier.autoconfig.plan import NETWORK_FILESYSTEMS, RAM_FILESYSTEMS
from kvtier.autoconfig.probe.disks import open_direct
from kvtier.core.fact import Fact, known, unknown
from kvtier.core.lanes import Lane

SECONDS = 5.0
_BLOCK = 4 * MIB
_COPY_BYTES = 64 * MIB
_FILE_BLOCKS = 64
_OBJECT_REQUESTS = 8
"""At once, as a tier makes them."""
_ASKED = 3
_KEEP_FREE = 8
"""A trial file takes at most this part (1/8) of the free space."""


def measure(facts: Facts, seconds: float = SECONDS) -> Facts:
    """``facts`` with the speeds that could be measured. A failure is an unknown fact with its
    reason.

    Every trial stops when its share of ``seconds`` is used up. Only an operation that has begun (4
    MiB) may take longer.
    """
    copy = _copy_speed(seconds * 0.1)
    worth = [disk for disk in facts.disks if _can_time(disk)]
    share = seconds * 0.5 / max(1, len(worth))
    disks = tuple(_timed_disk(disk, share) if disk in worth else disk for disk in facts.disks)
    redis = facts.redis
    if redis and redis.reachable.value:
        redis = replace(redis, speed=_redis_speed(redis, seconds * 0.2))
    objects = facts.objects
    if objects and objects.reachable.value:
        objects = _timed_objects(objects, seconds * 0.2)
    return replace(facts, copy_speed=copy, disks=disks, redis=redis, objects=objects)


def _rate(step: Callable[[int], int], seconds: float, most: int) -> float:
    """Bytes a second of ``step(i)``. It is called at least once, and at most for ``most`` steps or
    ``seconds``."""
    done, begun, last = 0, time.perf_counter(), 0.0
    for index in range(most):
        done += step(index)
        last = time.perf_counter() - begun
        if last > seconds:
            break
    return done / max(last, 1e-9)


def _copy_speed(seconds: float) -> Fact[float]:
    with mmap.mmap(-1, _COPY_BYTES) as source, mmap.mmap(-1, _COPY_BYTES) as target:
        source[:] = b"\1" * _COPY_BYTES
        target[:] = b"\2" * _COPY_BYTES  # the pages are present before the clock starts
        with memoryview(source) as src, memoryview(target) as dst:

            def copy(_: int) -> int:
                dst[:] = src
                return _COPY_BYTES

            return known(_rate(copy, seconds, 64), "measured, one thread")


def _can_time(disk: Disk) -> bool:
    kind = disk.filesystem.value or ""
    if disk.read_speed.value is not None:  # a what-if option gave it
        return False
    return (
        bool(disk.o_direct.value)
        and kind not in RAM_FILESYSTEMS
        and (disk.free.value or 0) >= _KEEP_FREE * _BLOCK
    )


def _timed_disk(disk: Disk, seconds: float) -> Disk:
    place = Path(disk.path)
    while not place.is_dir():
        place = place.parent
    blocks = max(1, min(_FILE_BLOCKS, (disk.free.value or 0) // _KEEP_FREE // _BLOCK))
    try:
        with open_direct(place) as fd, mmap.mmap(-1, _BLOCK) as buffer:
            buffer[:] = os.urandom(_BLOCK)
            _rate(lambda i: os.pwrite(fd, buffer, i * _BLOCK), seconds / 2, blocks)
            whole = max(1, os.fstat(fd).st_size // _BLOCK)
            rate = _rate(
                lambda i: os.preadv(fd, [buffer], i * 7 % whole * _BLOCK), seconds / 2, 4 * blocks
            )
    except OSError as error:
        return replace(disk, read_speed=unknown(f"O_DIRECT trial failed: {error}"))
    note = "network file system, " if disk.filesystem.value in NETWORK_FILESYSTEMS else ""
    source = f"measured, {note}O_DIRECT, one thread, 4 MiB"
    return replace(disk, read_speed=known(rate, source))


def _redis_speed(redis: Redis, seconds: float) -> Fact[float]:
    """The slower of SET and GET of 4 MiB values, under one name that expires by itself."""
    from kvtier.tiers.redis.errors import FAULTS, RefusedError, WrongSizeError
    from kvtier.tiers.redis.servers import RedisServers

    room = (redis.maxmemory.value or 1 << 62) - (redis.used.value or 0)
    if room < _KEEP_FREE * _BLOCK:
        return unknown("Redis is too full to try")
    name, value = f"kvtier:probe:{os.getpid()}".encode(), memoryview(bytearray(os.urandom(_BLOCK)))
    servers = RedisServers(redis.url, connections=1, timeout_s=max(0.2, seconds))

    def put(_: int) -> int:
        with servers.wire(name) as wire:
            refusal = wire.put([(name, value)], 60_000)
        if refusal is not None:
            raise refusal
        return _BLOCK

    def get(_: int) -> int:
        with servers.wire(name) as wire:
            return sum(memory.nbytes for memory in wire.get([name], [value]))

    try:
        rates = [_rate(one, seconds / 2, 64) for one in (put, get)]
        with servers.wire(name) as wire:
            wire.ask([("UNLINK", name)])
    except (*FAULTS, RefusedError, WrongSizeError) as error:
        return unknown(f"Redis trial failed: {error}")
    finally:
        servers.close()
    return known(min(rates), "measured, one connection, 4 MiB values")


def _timed_objects(store: ObjectStore, seconds: float) -> ObjectStore:
    """The time of a request that moves nothing, and eight gets of 4 MiB at once. One object, which
    is deleted."""
    from kvtier.tiers.objects.bucket import FAULTS, Bucket, words

    bucket, moved = Bucket(store.url, _BLOCK), list[int]()
    name = "/".join(filter(None, (bucket.url.prefix, f"kvtier-probe-{os.urandom(8).hex()}")))
    asked = []

    def get() -> None:
        with suppress(*FAULTS):
            while time.perf_counter() < until and (found := bucket.get(name, _BLOCK)) is not None:
                moved.append(found.nbytes)

    try:
        bucket.put(name, [os.urandom(_BLOCK)])
        for _ in range(_ASKED):
            begun = time.perf_counter()
            bucket.has(name)
            asked.append(time.perf_counter() - begun)
        lane = Lane("probe", _OBJECT_REQUESTS, urgent_bound=1, bound=_OBJECT_REQUESTS)
        begun = time.perf_counter()
        until = begun + seconds / 2
        for _ in range(_OBJECT_REQUESTS):
            lane.submit(get)
        lane.close(10 * seconds)
        took = time.perf_counter() - begun
    except FAULTS as error:
        failed: Fact[float] = unknown(f"trial failed: {words(error)}")
        return replace(store, speed=failed, latency=failed)
    finally:
        with suppress(*FAULTS):
            bucket.delete([name])
    speed = known(sum(moved) / took, f"measured, {_OBJECT_REQUESTS} gets of 4 MiB at once")
    return replace(
        store,
        speed=speed if moved else unknown("trial failed: no get ended"),
        latency=known(statistics.median(asked), f"measured, {_ASKED} requests"),
    )
