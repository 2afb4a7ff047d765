"""A kvtier server for caches that engines have of their own (LMCache's remote storage, SGLang's
HiCache, vLLM's secondary tiers): find, save, load and invalidate chunks by key, by shared memory or
by TCP.

Calls are for lane threads and block for a bounded time. This file knows nothing of the engines:
callbacks get a slot, and fill or read it. Runs are named first chunk first. A server that is dead,
slow or not there raises nothing: nothing is found, saved or loaded.

``until`` is the time of ``time.monotonic`` at which a call gives up. It may be late by one answer:
``server_timeout_ms`` for a server on this host, five seconds and the chunk's own time by TCP.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvtier.api import Asker, LoadLease
from kvtier.client.client import Client
from kvtier.client.connect import ServerAccess
from kvtier.client.remote_tier import RemoteTier
from kvtier.config.keys import CACHE_KEYS, Config
from kvtier.config.load import load
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane, future_of
from kvtier.server.strangers import LogLimit
from kvtier.started import Started

logger = logging.getLogger("kvtier.cache_server")
logger.addFilter(LogLimit(20, 60.0))

R = TypeVar("R")

Fill = Callable[[int, memoryview], bool]
"""Write chunk ``i`` of the run into this slot. Returns False if it cannot be written."""
Take = Callable[[int, memoryview], bool]
"""Read chunk ``i`` of the run from this slot. Returns False if it is unusable."""

KEYS = ("server", *CACHE_KEYS)
"""Keys of kvtier's configuration that may stand in the engine's own cache configuration."""
_POLL_S = 0.005
_ASKING_S = 0.05
"""Longest wait of a lookup for which the server itself asks Redis."""
_RAM_PARTS = 8
_MOST_GAPS = 8
"""Missing chunks of a run after which a lookup by TCP ends: each costs a round trip."""


def settings(given: Mapping[str, object], prefix: str = "", where: str = "") -> Config:
    """Return kvtier's configuration from ``given`` alone, without files and environment. Errors
    name a key with ``prefix`` before it, and its place as ``where``. Raises ConfigError."""
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        raise ConfigError(
            f"unknown key {prefix}{unknown[0]} in {where}; expected one of {', '.join(KEYS)}"
        )
    config = load(env={}, flags=dict(given))
    if config.server.address is None:
        raise ConfigError(
            f"{prefix}server is missing in {where}: unix:///path/kvtier.sock or tcp://host:port"
        )
    return config


def tenant(config: Config) -> dict[str, str]:
    """Return the fingerprint's part that keeps namespaces apart; empty without a namespace."""
    name = config.engine.namespace
    return {} if name is None else {"namespace": name}


def connect(config: Config, layout: ChunkLayout) -> CacheServer:
    """Connect to the server that ``config`` names. Raises ConfigError if it refuses us."""
    assert config.server.address is not None
    entrance = Started(config).access(config.server.address, layout)
    if entrance.address.path:
        return Attached(entrance, config.server.timeout_ms / 1000)
    return Streamed(entrance)


def safely(counts: Counter[str], work: Callable[[], R], otherwise: R) -> R:
    """Return the result of ``work``, or ``otherwise`` if it raises, which is logged and counted."""
    try:
        return work()
    except Exception:
        counts["failed_calls"] += 1
        logger.exception("a call failed, and the engine goes on without it")
        return otherwise


def within(
    lane: Lane, counts: Counter[str], work: Callable[[], R], otherwise: R, wait_s: float
) -> R:
    """Return the result of ``work`` on the lane, or ``otherwise`` if it fails or takes too long."""
    answer = future_of(lane, lambda: safely(counts, work, otherwise))
    if answer is None:
        return otherwise
    try:
        return answer.result(max(0.0, wait_s))
    except TimeoutError:
        logger.warning("no answer of the kvtier server within %.3g s: misses", wait_s)
        counts["late_calls"] += 1
        answer.cancel()
        return otherwise


def load_each(
    server: CacheServer, keys: Sequence[ChunkKey], take: Take, until: float
) -> list[bool]:
    """Load every chunk that is held, also those after a missing one. Returns for each chunk whether
    ``take`` could use it."""
    places, taken, refused = list(range(len(keys))), [False] * len(keys), set[int]()
    while places and time.monotonic() < until:
        run = places

        def one(number: int, slot: memoryview, run: Sequence[int] = run) -> bool:
            taken[run[number]] = take(run[number], slot)
            if not taken[run[number]]:
                refused.add(run[number])
            return taken[run[number]]

        count = server.load([keys[place] for place in run], one, until)
        behind = [place for place in run[count:] if place not in refused]
        known = server.known([keys[place] for place in behind]) if behind else ()
        places = [place for place, held in zip(behind, known, strict=True) if held]
        if places and not count:  # it is held, and RAM has no room for it yet
            time.sleep(_POLL_S)
    return taken


class Attached:
    """A server on this host, whose pool is mapped: one copy to or from the cache's memory. Threads:
    any."""

    def __init__(self, access: ServerAccess, timeout_s: float) -> None:
        self._client = Client(access, timeout_s)

    @property
    def is_ready(self) -> bool:
        """Whether the pool is mapped. The first client of a chunk size waits for room."""
        return self._client.pool is not None

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """Number of leading chunks that are held. Starts to promote those on lower tiers."""
        until = time.monotonic() + _ASKING_S
        with self._client.load(keys) as lease:
            while lease.ready < len(keys):
                known = sum(self._client.lookup(keys).progress)
                if sum(lease.poll()) <= known or time.monotonic() > until:
                    return known
                self._client.wait(_POLL_S)
            return lease.ready

    def known(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each chunk whether it is held. Redis is asked only for chunks that no other
        tier has, up to the first one that it lacks too."""
        found = list(self._client.known(keys))
        rest = [place for place, held in enumerate(found) if not held]
        for place in rest[: self.find([keys[place] for place in rest]) if rest else 0]:
            found[place] = True
        return found

    def save(self, keys: Sequence[ChunkKey], fill: Fill, until: float) -> list[bool]:
        """Save the chunks that are not in RAM. Returns for each chunk whether it is held now.

        The last part of the run is saved first, because the server takes the last to come for the
        hottest. A part is an eighth of RAM: its slots can be evicted when the next one needs them.
        No part begins while more than a part waits to be written below RAM, which would evict it.
        """
        pool = self._client.pool
        most = max(1, pool.slots // _RAM_PARTS) if pool is not None else len(keys)
        places = {key: place for place, key in enumerate(keys)}
        held = set[ChunkKey]()
        for end in range(len(keys), 0, -most):
            self._wait_for_writes(most, until)
            part = dict.fromkeys(keys[max(0, end - most) : end])
            held |= self._save_part(list(part), places, fill, until)
        return [key in held for key in keys]

    def _wait_for_writes(self, most: int, until: float) -> None:
        while self._client.stats().get("queued", 0) > most and time.monotonic() < until:
            self._client.wait(_POLL_S)

    def _save_part(
        self, part: list[ChunkKey], places: Mapping[ChunkKey, int], fill: Fill, until: float
    ) -> set[ChunkKey]:
        """Save one part, waiting for slots. Returns those of its chunks that are held."""
        held = set[ChunkKey]()
        while True:
            with self._client.save(part) as lease:
                for key, slot in zip(lease.keys, lease.views(), strict=True):
                    if not fill(places[key], slot):
                        return held
                if lease.keys:
                    lease.commit()
                    held.update(lease.keys)
            rest = [key for key in part if key not in held]
            known = self._client.known(rest) if rest else ()
            held.update(key for key, is_held in zip(rest, known, strict=True) if is_held)
            part = [key for key in rest if key not in held]
            if not part or self._client.pool is None or time.monotonic() > until:
                return held
            self._client.wait(_POLL_S)

    def load(self, keys: Sequence[ChunkKey], take: Take, until: float) -> int:
        """Pass the run's chunks to ``take`` until one is late or unusable. Returns the number
        passed.

        The run is loaded in parts. One on NVMe may be larger than RAM, and a lease lets no chunk of
        its own run leave to make room for the others.
        """
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

    def clear(self) -> None:
        """Forget all chunks of the fingerprint and namespace."""
        self._client.invalidate_all()

    def close(self) -> None:
        self._client.close()

    def _drain(self, lease: LoadLease, first: int, take: Take, until: float) -> tuple[int, bool]:
        """Pass chunks to ``take`` as they arrive. Returns how many, and whether to ask for more."""
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

    def __init__(self, access: ServerAccess) -> None:
        self._tier = RemoteTier(access)
        self._chunk_bytes = access.hello.chunk_bytes
        self._buffers: deque[memoryview] = deque()
        """Unused buffers, never more than threads."""

    is_ready = True

    def find(self, keys: Sequence[ChunkKey]) -> int:
        return self._tier.find(keys)

    def known(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each chunk whether it is held; False for all after the eighth missing one."""
        found = list[bool]()
        for _ in range(_MOST_GAPS):
            found += [True] * self._tier.find(keys[len(found) :])
            if len(found) == len(keys):
                break
            found.append(False)
        return found + [False] * (len(keys) - len(found))

    def save(self, keys: Sequence[ChunkKey], fill: Fill, until: float) -> list[bool]:
        """Save the last chunk first, because the server takes the last to come for the hottest."""
        buffer = self._take_buffer()
        found = self._tier.find(keys)
        held = [place < found for place in range(len(keys))]
        for place in reversed(range(len(keys))):
            if not held[place] and time.monotonic() < until and fill(place, buffer):
                held[place] = self._tier.write(keys[place], buffer)
        self._buffers.append(buffer)
        return held

    def load(self, keys: Sequence[ChunkKey], take: Take, until: float) -> int:
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

    def clear(self) -> None:
        """Do nothing but warn: no message over TCP clears a server."""
        logger.warning("by tcp:// nothing is cleared: run kvtier clear at the server")

    def close(self) -> None:
        self._tier.close()

    def _take_buffer(self) -> memoryview:
        try:
            return self._buffers.pop()
        except IndexError:
            return memoryview(bytearray(self._chunk_bytes))


CacheServer = Attached | Streamed
