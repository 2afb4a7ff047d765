"""A kvtier server as LMCache's connector needs it: find, save, load and invalidate runs, by shared
memory or by TCP.

Its calls block for a bounded time and are for lane threads. This file knows nothing of LMCache:
callbacks get a slot and fill it or read it. A run is named first chunk first.
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
"""Read chunk ``i`` of the run from this slot. False: it cannot be used, stop here."""

_POLL_S = 0.005
"""The interval between two polls of chunks that are coming."""
_ASKING_S = 0.05
"""The longest time that a lookup waits when the server itself has to ask Redis."""


class Attached:
    """A server on this host. Its pool is mapped, and there is one copy between it and LMCache's
    memory. Safe from any thread.

    No method raises for a server that is dead, slow or not there. Then nothing is found, saved or
    loaded.
    """

    def __init__(self, access: ServerAccess, timeout_s: float, load_timeout_s: float) -> None:
        self._client = Client(access, timeout_s)
        self._load_timeout_s = load_timeout_s

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """Number of leading chunks that are held. Chunks on a lower tier are promoted from now
        on."""
        until = time.monotonic() + _ASKING_S
        with self._client.load(keys) as lease:
            while True:
                known = sum(self._client.lookup(keys).progress)
                if sum(lease.poll()) <= known or time.monotonic() > until:
                    return known
                self._client.wait(_POLL_S)

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        """Save the chunks that are not held yet. Returns how many were new."""
        places = {key: place for place, key in enumerate(keys)}
        with self._client.save(list(places)) as lease:
            for key, slot in zip(lease.keys, lease.views(), strict=True):
                if not fill(places[key], slot):
                    return 0
            if lease.keys:
                lease.commit()
            return len(lease.keys)

    def load(self, keys: Sequence[ChunkKey], take: Take) -> int:
        """Pass the run to ``take`` chunk by chunk, as far as it can be had in time. Returns how
        many chunks were taken.

        It is loaded one part at a time. A run on the server's NVMe may be larger than its RAM, and
        a lease lets no chunk of its own run leave to make room for the others.
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
        """Drop chunks that are bad."""
        self._client.invalidate(keys)

    def close(self) -> None:
        self._client.close()

    def _drain(self, lease: LoadLease, first: int, take: Take, until: float) -> tuple[int, bool]:
        """Take chunks as they arrive. Returns how many, and whether to ask for more."""
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
    """A server on another host. Bytes come and go over TCP, through a buffer of this object. Its
    methods are those of :class:`Attached`. Safe from any thread."""

    def __init__(self, access: ServerAccess, load_timeout_s: float) -> None:
        self._tier = RemoteTier(access)
        self._load_timeout_s = load_timeout_s
        self._chunk_bytes = access.hello.chunk_bytes
        self._buffers: deque[memoryview] = deque()
        """Unused buffers. There are never more than threads."""

    def find(self, keys: Sequence[ChunkKey]) -> int:
        return self._tier.find(keys)

    def save(self, keys: Sequence[ChunkKey], fill: Fill) -> int:
        """Save the last chunk first. The server saves each by itself, and the chunk that comes last
        is the hottest."""
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
