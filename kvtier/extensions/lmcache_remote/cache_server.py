"""A kvtier server as LMCache's connector needs it: find, save, load and invalidate runs, by shared
memory or by TCP.

Calls block for a bounded time and are for lane threads. This file knows nothing of LMCache:
callbacks get a slot and fill or read it. Runs are named first chunk first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.api import Asker, LoadLease
from kvtier.client.client import Client
from kvtier.client.connect import ServerAccess
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.chunk import ChunkKey

Fill = Callable[[int, memoryview], bool]
"""Write chunk ``i`` of the run into this slot. False: it cannot be written."""
Take = Callable[[int, memoryview], bool]
"""Read chunk ``i`` of the run from this slot. False: it is unusable, stop here."""

_POLL_S = 0.005
_ASKING_S = 0.05
"""Longest wait of a lookup for which the server itself asks Redis."""


class Attached:
    """A server on this host. Its pool is mapped: one copy to or from LMCache's memory. Threads:
    any.

    A server that is dead, slow or not there raises nothing: nothing is found, saved or loaded.
    """

    def __init__(self, access: ServerAccess, timeout_s: float, load_timeout_s: float) -> None:
        self._client = Client(access, timeout_s)
        self._load_timeout_s = load_timeout_s

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """Number of leading chunks that are held. Starts to promote those on lower tiers."""
        until = time.monotonic() + _ASKING_S
        with self._client.load(keys) as lease:
            while True:
                known = sum(self._client.lookup(keys).progress)
                if sum(lease.poll()) <= known or time.monotonic() > until:
                    return known
                self._client.wait(_POLL_S)

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        """Save the chunks that are not held yet. Returns their number."""
        places = {key: place for place, key in enumerate(keys)}
        with self._client.save(list(places)) as lease:
            for key, slot in zip(lease.keys, lease.views(), strict=True):
                if not fill(places[key], slot):
                    return 0
            if lease.keys:
                lease.commit()
            return len(lease.keys)

    def load(self, keys: Sequence[ChunkKey], take: Take) -> int:
        """Pass the run's chunks to ``take``, as far as they come in time. Returns the number taken.

        The run is loaded in parts. One on NVMe may be larger than RAM, and a lease lets no chunk of
        its own run leave to make room for the others.
        """
        until = time.monotonic() + self._load_timeout_s
        pool = self._client.pool
        most = max(1, pool.slots // 2) if pool is not None else len(keys)
        done = 0
        while done < len(keys):
            part = keys[done : done + most]
            with self._client.load(part, asker=Asker(again=True)) as lease:
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
        """Take chunks as they arrive. Returns their number, and whether to ask for more."""
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
            self._client.wait(_POLL_S)


class Streamed:
    """A server on another host, as :class:`Attached` but over TCP. Threads: any."""

    def __init__(self, access: ServerAccess, load_timeout_s: float) -> None:
        self._tier = RemoteTier(access)
        self._load_timeout_s = load_timeout_s
        self._chunk_bytes = access.hello.chunk_bytes
        self._buffers: deque[memoryview] = deque()
        """Unused buffers, never more than threads."""

    def find(self, keys: Sequence[ChunkKey]) -> int:
        return self._tier.find(keys)

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        """Save the last chunk first: the server takes the last to come for the hottest."""
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
            # Reading made the end of the run the hottest. This makes its beginning the hottest.
            self._tier.find(keys[:done])
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


CacheServer = Attached | Streamed
