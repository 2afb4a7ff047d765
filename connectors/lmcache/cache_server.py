"""A kvtier server as LMCache's connector needs it: find, save, load and forget runs; by shared
memory, or by TCP.

Blocking, bounded calls for lane threads. Nothing here knows LMCache; chunks are filled and taken by
callbacks that get the slot. A run is named first chunk first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.api import LoadLease
from kvtier.client.client import Client
from kvtier.client.connect import ServerAccess
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.chunk import ChunkKey

Fill = Callable[[int, memoryview], bool]
"""Write chunk ``i`` of the run into this slot; False: it cannot be."""
Take = Callable[[int, memoryview], bool]
"""Read chunk ``i`` of the run from this slot; False: it is of no use, stop here."""

_LOOK_S = 0.005
"""Between two looks at what is coming."""
_ASKING_S = 0.05
"""Longest a search waits for what the server itself has to ask Redis for."""


class CacheServer(Protocol):
    """No method raises for a server that is dead, slow or not there: nothing is found, saved or
    loaded."""

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """How many chunks from the first on are held; what lies on a lower tier is on its way up
        from now on."""
        ...

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        """Save what is not held yet; returns how many chunks were new."""
        ...

    def load(self, keys: Sequence[ChunkKey], take: Take) -> int:
        """Hand over the run chunk by chunk, as far as it can be had in time; returns how many were
        taken."""
        ...

    def invalidate(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks are bad."""
        ...

    def close(self) -> None: ...


class Attached:
    """On this host: the server's pool is mapped, one copy between it and LMCache's memory. Safe
    from any thread."""

    def __init__(self, access: ServerAccess, timeout_s: float, load_timeout_s: float) -> None:
        self._client = Client(access, timeout_s)
        self._load_timeout_s = load_timeout_s

    def find(self, keys: Sequence[ChunkKey]) -> int:
        until = time.monotonic() + _ASKING_S
        with self._client.load(keys) as lease:
            while True:
                known = sum(self._client.lookup(keys).progress)
                if sum(lease.poll()) <= known or time.monotonic() > until:
                    return known
                self._client.wait(_LOOK_S)

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        places = {key: place for place, key in enumerate(keys)}
        with self._client.save(list(places)) as lease:
            for key, slot in zip(lease.keys, lease.views(), strict=True):
                if not fill(places[key], slot):
                    return 0
            if lease.keys:
                lease.commit()
            return len(lease.keys)

    def load(self, keys: Sequence[ChunkKey], take: Take) -> int:
        """A part at a time: a run on the server's NVMe may be larger than its RAM, and a lease lets
        no chunk of its own run leave to make room for the others."""
        until = time.monotonic() + self._load_timeout_s
        pool = self._client.pool
        most = max(1, pool.slots // 2) if pool is not None else len(keys)
        done = 0
        while done < len(keys):
            with self._client.load(keys[done : done + most]) as lease:
                taken, more = self._drain(lease, done, take, until)
            done += taken
            if not taken or not more:
                break
        return done

    def invalidate(self, keys: Sequence[ChunkKey]) -> None:
        self._client.invalidate(keys)

    def close(self) -> None:
        self._client.close()

    def _drain(self, lease: LoadLease, first: int, take: Take, until: float) -> tuple[int, bool]:
        """Take chunks as they arrive; how many, and whether it is worth to ask for more."""
        taken = 0
        while True:
            ready, coming = lease.poll()
            for slot in lease.views()[taken:ready]:
                if not take(first + taken, slot):
                    return taken, False
                taken += 1
            if not coming:
                return taken, True
            if time.monotonic() > until:
                return taken, False
            self._client.wait(_LOOK_S)


class Streamed:
    """On another host: bytes come and go over TCP, through a buffer of our own. Safe from any
    thread."""

    def __init__(self, access: ServerAccess, load_timeout_s: float) -> None:
        self._tier = RemoteTier(access)
        self._load_timeout_s = load_timeout_s
        self._chunk_bytes = access.hello.chunk_bytes
        self._buffers: deque[memoryview] = deque()
        """Idle ones; never more than there are threads."""

    def find(self, keys: Sequence[ChunkKey]) -> int:
        return self._tier.find(keys)

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        """Last chunk first: each is saved by itself there, and what comes last is hottest."""
        buffer = self._take_buffer()
        saved = 0
        for place in range(len(keys) - 1, self._tier.find(keys) - 1, -1):
            if fill(place, buffer):
                saved += self._tier.write(keys[place], buffer)
        self._buffers.append(buffer)
        return saved

    def load(self, keys: Sequence[ChunkKey], take: Take) -> int:
        until = time.monotonic() + self._load_timeout_s
        buffer = self._take_buffer()
        held, done = self._tier.find(keys), 0
        while done < held and time.monotonic() < until:
            if not self._tier.read(keys[done], buffer) or not take(done, buffer):
                break
            done += 1
        if done > 1:
            self._tier.find(
                keys[:done]
            )  # reading made the end hottest; this makes the beginning so
        self._buffers.append(buffer)
        return done

    def invalidate(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._tier.delete(key)

    def close(self) -> None:
        self._tier.close()

    def _take_buffer(self) -> memoryview:
        try:
            return self._buffers.pop()
        except IndexError:
            return memoryview(bytearray(self._chunk_bytes))
