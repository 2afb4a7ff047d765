"""A trace against a running cache, with real bytes: what it hits, what it writes, and whether every
byte that is loaded is the one that was saved.

The bytes are made from the chunk's key, so that nothing has to be remembered to compare them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvtier.api import KVStore
from kvtier.bench.traces.mooncake import Request
from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.lookup import Asker
from kvtier.eviction.hints import NO_HINT

_LOAD_S = 10.0
"""A request waits at most so long for what a lower tier has. The rest is a miss."""
_POLL_S = 0.005
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOOK_S, _SETTLED_S = 0.001, 30.0
_BUSY = ("queued", "ram_filling", "ram_pinned")
"""Counts of a Store that are 0 when nothing is left to do."""


class Replay:
    """One replay through ``caches``, each of which has one request at a time.

    Keys are salted by each replay, so that it begins without hits.
    """

    def __init__(self, caches: Sequence[KVStore]) -> None:
        self._idle = deque(caches)
        self._free = threading.Semaphore(len(caches))
        self._lane = Lane("replay", len(caches), urgent_bound=1, bound=len(caches))
        self._lock = threading.Lock()
        self._salt = os.urandom(16)
        self._before = caches[0].stats()
        self.counts: Counter[str] = Counter()
        """``requests``, ``asked``, hits as ``hit_<place>``, ``saved`` and ``refused`` in chunks,
        and ``wrong`` bytes."""

    def run(
        self,
        trace: Sequence[Request],
        speed: float | None = None,
        tell: Callable[[int], object] = lambda requests: None,
    ) -> None:
        """Serve all of ``trace`` in its order.

        ``speed``: how many times faster than recorded. None: as fast as a cache has done all that
        a request leaves behind, such as writes to lower tiers, before the next one comes. What
        hints keep for a time is kept for as long as the replay takes for that time. Without a
        speed it is kept for its own time.
        """
        begun = time.monotonic()
        for number, request in enumerate(trace, 1):
            if speed is not None:
                at = begun + (request.at - trace[0].at) / speed
                time.sleep(max(0.0, at - time.monotonic()))
            self._free.acquire()
            self._lane.submit(
                partial(self._serve, request, settled=speed is None, pace=speed or 1.0)
            )
            tell(number)
        self._lane.close(_LOAD_S + _SETTLED_S)
        _settle(self._idle[0])

    def writes(self) -> dict[str, int]:
        """Chunks written to each lower tier since the start, by all engines."""
        return {
            name.removesuffix("_stored"): count - self._before.get(name, 0)
            for name, count in self._idle[0].stats().items()
            if name.endswith("_stored")
        }

    def _serve(self, request: Request, *, settled: bool, pace: float) -> None:
        """On the lane."""
        cache = self._idle.popleft()
        try:
            found = self._request(cache, request, pace)
            if settled:
                _settle(cache)
        finally:
            self._idle.append(cache)
            self._free.release()
        with self._lock:
            self.counts.update(found)

    def _request(self, cache: KVStore, request: Request, pace: float) -> Counter[str]:
        run, session, found = self._own(request.run), request.session, Counter[str]()
        if run:
            found = self._load(cache, run, session)
            found += self._save(cache, run)
        if request.hint != NO_HINT:
            hint = request.hint._replace(keep_s=request.hint.keep_s / pace)
            cache.hint(self._own(request.about or ()) or run, hint, session)
        return found

    def _load(self, cache: KVStore, run: Sequence[ChunkKey], session: str) -> Counter[str]:
        found, until = Counter[str](requests=1, asked=len(run)), time.monotonic() + _LOAD_S
        with cache.load(run, asker=Asker(session)) as lease:
            while lease.poll().coming and time.monotonic() < until:
                cache.wait(_POLL_S)
            for key, view, place in zip(lease.keys, lease.views(), lease.sources, strict=False):
                found[f"hit_{place}"] += 1
                loaded = np.frombuffer(view, np.uint64)
                if not np.array_equal(loaded, wanted := content(key, len(view))):
                    differing = loaded.view(np.uint8) != wanted.view(np.uint8)
                    found["wrong"] += int(np.count_nonzero(differing))
        return found

    def _save(self, cache: KVStore, run: Sequence[ChunkKey]) -> Counter[str]:
        with cache.save(run) as lease:
            for key, view in zip(lease.keys, lease.views(), strict=True):
                np.frombuffer(view, np.uint64)[:] = content(key, len(view))
            saved = len(lease.keys)
            lease.commit()
        return Counter(saved=saved)

    def _own(self, run: Sequence[ChunkKey]) -> list[ChunkKey]:
        salted = (hashlib.blake2b(key, key=self._salt, digest_size=len(key)) for key in run)
        return [ChunkKey(each.digest()) for each in salted]


def _settle(cache: KVStore) -> None:
    """Wait until nothing is queued and no slot is read or written."""
    until = time.monotonic() + _SETTLED_S
    while time.monotonic() < until:
        stats = cache.stats()
        if not any(stats.get(name) for name in _BUSY):
            return
        time.sleep(_LOOK_S)


def content(key: ChunkKey, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The bytes of a chunk, in words. They differ from those of any other chunk, and from each
    other."""
    words = np.arange(size // 8, dtype=np.uint64)
    words *= _ODD
    words ^= np.frombuffer(key, np.uint64, 1)[0]
    return words
