"""Realm: one Store of a server with what its sessions share. Realms: a bounded number of them, by slot size.

Engines whose slots are equally large share one Store; keys contain the engines' fingerprints, so chunks of different
models cannot meet. An *owner* is a namespace (fingerprint and tenant name) as a number: what quotas count, and what
``clear`` is limited to; see :mod:`kvtier.owner`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvtier.chunk import ChunkKey, own_link, parent_link
from kvtier.errors import ConfigError, KVTierError
from kvtier.lanes import Lane
from kvtier.owner import owner_of
from kvtier.shares import Pace, Shares
from kvtier.store import Store
from kvtier.zero_hits import ZeroHits, totals

logger = logging.getLogger("kvtier.server")

_MAX_OWNERS = 4096
_MAX_LINKS = 65_536
_OPENINGS_QUEUED = 64
_MAX_SLOT_BYTES = 1 << 30
"""No tier keeps larger chunks; who asks for one learns what is kept, and opens nothing."""
Listener = Callable[[], None]
R = TypeVar("R")


class Realm:
    """All methods but :meth:`_arrived` are called on the server's loop.

    ``call_soon``: how a lane thread hands a call to that loop; from any thread.
    """

    def __init__(
        self,
        store: Store,
        call_soon: Callable[[Listener], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._call_soon = call_soon
        self.shares = Shares(lambda: store.slots)
        self.pace = Pace(clock)
        self._owners: OrderedDict[tuple[bytes, str], int] = OrderedDict()
        self._listeners: set[Listener] = set()
        self._links: OrderedDict[bytes, ChunkKey] = OrderedDict()
        self.arrivals = 0
        """Differs from what it was when promotions have ended since."""
        store.on_arrival = self._arrived
        self.zero_hits = ZeroHits.of(store, clock)

    def owner(self, fingerprint: bytes, namespace: str) -> int:
        """The namespace's number, which its name alone decides. Of many names those are forgotten that came longest
        ago: only the list of names is shorter then."""
        name = fingerprint, namespace
        number = self._owners.setdefault(name, owner_of(fingerprint, namespace))
        self._owners.move_to_end(name)
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)
        return number

    @property
    def owners(self) -> Mapping[tuple[bytes, str], int]:
        """Number by fingerprint and tenant name, of the engines that came last: at most 4,096."""
        return self._owners

    def look(self) -> None:
        """Now and then: has nothing been hit for long? One line in the log each time that is so."""
        if self.zero_hits.look(*totals(self.store.stats())):
            logger.warning("%s", self.zero_hits.verdict)

    # ---- promotions that end -------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` whenever promotions have ended, until :meth:`ignore`. Look once after this call: what
        ended before it is not told."""
        self._listeners.add(listener)

    def ignore(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def _arrived(self) -> None:
        """On a lane thread. A listener added meanwhile has yet to look for the first time, and sees the chunk."""
        self.arrivals += 1
        if self._listeners:
            self._call_soon(self._tell)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # ---- runs of chunks that come one by one ---------------------------------------------------------------------

    def remember(self, keys: Sequence[ChunkKey]) -> None:
        """Know these keys as somebody's parents, for :meth:`run_to`."""
        for key in keys:
            self._links[own_link(key)] = key
            self._links.move_to_end(own_link(key))
        while len(self._links) > _MAX_LINKS:
            self._links.popitem(last=False)

    def run_to(self, key: ChunkKey) -> list[ChunkKey]:
        """The run that ends with ``key``, first chunk first, as far as its ancestors were seen lately: chunks that are
        written one by one leave leaf first like all others."""
        run, seen = [key], {key}
        while (parent := self._links.get(parent_link(run[-1]))) is not None and parent not in seen:
            run.append(parent)
            seen.add(parent)
        return run[::-1]


class Realms:
    """Opens a Store for each slot size that engines ask for, up to ``most``, on a lane of its own: recovery of a large
    NVMe tier takes seconds and nobody else shall wait for it.

    ``open_store(slot_bytes)`` raises KVTierError; that realm is tried anew when it is asked for again.
    """

    def __init__(self, open_store: Callable[[int], Store], most: int, call_soon: Callable[[Listener], object]) -> None:
        self._open_store = open_store
        self._most = most
        self._call_soon = call_soon
        self._lane = Lane("realms", 1, urgent_bound=1, bound=_OPENINGS_QUEUED)
        self._opening: dict[int, Future[Realm]] = {}

    @property
    def open(self) -> dict[int, Realm]:
        """The realms that are ready, by slot size."""
        return {size: one.result() for size, one in self._opening.items() if one.done() and not one.exception()}

    def get(self, slot_bytes: int) -> Future[Realm]:
        """The realm of this slot size, now or soon; fails with KVTierError. Called on the server's loop."""
        self._opening = {size: future for size, future in self._opening.items() if not _failed(future)}
        if slot_bytes in self._opening:
            return self._opening[slot_bytes]
        future: Future[Realm] = Future()
        sizes = ", ".join(f"{size:,}" for size in self._opening)
        if slot_bytes > _MAX_SLOT_BYTES:
            kept = f"keeps chunks of {sizes} bytes" if sizes else "keeps no chunks yet"
            future.set_exception(
                ConfigError(f"no chunk may have {slot_bytes:,} bytes, at most {_MAX_SLOT_BYTES:,}; this server {kept}")
            )
            return future
        if len(self._opening) >= self._most:
            future.set_exception(
                ConfigError(
                    f"this server keeps chunks of {sizes} bytes and not of "
                    f"{slot_bytes:,} bytes too: raise server_realms={self._most} (which divide RAM and NVMe), "
                    "or give the engine's model a server of its own"
                )
            )
            return future
        self._opening[slot_bytes] = future
        if not self._lane.submit(lambda: _settle(future, lambda: self._open(slot_bytes))):
            future.set_exception(KVTierError("the server is closing, or opens too many stores at once"))
        return future

    def aside(self, work: Callable[[], R]) -> Future[R]:
        """Do ``work`` on the lane where stores are opened: in turn, so that none is opening meanwhile."""
        future: Future[R] = Future()
        if not self._lane.submit(lambda: _settle(future, work)):
            future.set_exception(KVTierError("the server is closing, or opens too many stores at once"))
        return future

    def close(self, timeout_s: float) -> bool:
        """Close every store; queued writes have ``timeout_s`` seconds. False: something was dropped or hangs."""
        clean = self._lane.close(timeout_s)
        for realm in self.open.values():
            clean &= realm.store.close(timeout_s)
        return clean

    def _open(self, slot_bytes: int) -> Realm:
        """On the lane."""
        return Realm(self._open_store(slot_bytes), self._call_soon)


def _settle(future: Future[R], work: Callable[[], R]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - whoever asked for it is told
        future.set_exception(error)


def _failed(future: Future[Realm]) -> bool:
    return future.done() and future.exception() is not None
