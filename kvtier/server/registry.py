"""SizeClass: one Store of a server, with what its sessions share. SizeClasses: several of them, by
slot size, in one budget.

Keys contain the engines' fingerprints, so chunks of different models cannot meet in a Store. An
*owner* is the number of a namespace, fingerprint and tenant name (:mod:`kvtier.core.tenant`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvtier.core.chunk import ChunkKey, own_half, parent_half
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.lanes import Lane, future_of
from kvtier.core.lookup import RAM
from kvtier.core.steps import whole
from kvtier.core.tenant import owner_of
from kvtier.server.shares import ScanLimiter, Shares, Side, divide, shift
from kvtier.store.observers.ages import Room
from kvtier.store.reports.zero_hits import ZeroHits, totals

if TYPE_CHECKING:
    from kvtier.store.sharing import Sharing
    from kvtier.store.store import Store


logger = logging.getLogger("kvtier.server")

_MAX_OWNERS = 4096
_APART_FINGERPRINTS = 64
_MOST_SIZES, _ONE_TENANTS_SIZES = 24, 16
_IDLE_S = 600.0
_CLOSE_S = 5.0
_MAX_PARENTS = 65_536
_QUEUED_OPENINGS = 64
_MAX_SLOT_BYTES = 1 << 30
"""Largest chunk that tiers keep. A client that asks for a larger one is told the kept sizes."""
_FULL = "the server is closing, or opens too many stores at once"
Subscriber = Callable[[], None]
R = TypeVar("R")


class Owner(NamedTuple):
    """Number of a namespace, and the name that its last engine gave itself."""

    number: int
    engine: str


class SizeClass:
    """One Store of a server. For the loop, but for :meth:`_arrived`, which uses ``call_soon``."""

    def __init__(
        self,
        store: Store,
        call_soon: Callable[[Subscriber], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._call_soon = call_soon
        self.shares = Shares(lambda: store.most_held)
        self.pace = ScanLimiter(clock)
        self.owners: OrderedDict[tuple[bytes, str], Owner] = OrderedDict()
        """Owners by fingerprint and tenant name: the 4,096 that came last."""
        self.subscribers: set[Subscriber] = set()
        """Functions called whenever promotions have ended. After adding one, check once."""
        self._parents: OrderedDict[bytes, ChunkKey] = OrderedDict()
        self.users = 0
        self.left = clock()
        self.told_at = -1.0
        self.arrivals = 0
        """Number that changes whenever promotions have ended."""
        store.on_arrival = self._arrived
        self.zero_hits = ZeroHits.of(store.status(), store.pool.slots, clock)

    def owner(self, fingerprint: bytes, namespace: str, engine: str = "") -> int:
        """Note an owner, as one of the last 4,096. Returns its number, which the name decides."""
        name, number = (fingerprint, namespace), owner_of(fingerprint, namespace)
        self.owners[name] = Owner(number, engine)
        self.owners.move_to_end(name)
        if len(self.owners) > _MAX_OWNERS:
            self.owners.popitem(last=False)
        return number

    def rests(self, now: float) -> bool:
        """Whether it has been without engines for ten minutes. Any thread."""
        return not self.users and now - self.left >= _IDLE_S

    @property
    def rest(self) -> str:
        last = next(reversed(self.owners.values()), None)
        whose = f", the last was {last.engine!r}" if last is not None else ""
        return f"no engine for {_IDLE_S / 60:.0f} minutes or more{whose}"

    def check_hits(self) -> None:
        """Log one line when nothing has been hit for long. Called from time to time."""
        if self.zero_hits.counted(*totals(self.store.stats())):
            logger.warning("%s", self.zero_hits.verdict)

    # ---- promotions that end ---------------------------------------------------------------------

    def _arrived(self) -> None:
        """Notify subscribers, on a lane thread. A subscriber added meanwhile checks by itself."""
        self.arrivals += 1
        if self.subscribers:
            self._call_soon(self._notify)

    def _notify(self) -> None:
        for subscriber in tuple(self.subscribers):
            subscriber()

    # ---- runs of chunks that come one by one -----------------------------------------------------

    def remember(self, keys: Sequence[ChunkKey]) -> None:
        """Remember chunks as possible parents, for :meth:`run_to`."""
        for key in keys:
            self._parents[own_half(key)] = key
            self._parents.move_to_end(own_half(key))
        while len(self._parents) > _MAX_PARENTS:
            self._parents.popitem(last=False)

    def run_to(self, key: ChunkKey) -> list[ChunkKey]:
        """Return the run that ends with ``key``, as far as its chunks were seen lately. With it,
        chunks that are written one by one also leave leaf-first."""
        run, seen = [key], {key}
        while (
            parent := self._parents.get(parent_half(run[-1]))
        ) is not None and parent not in seen:
            run.append(parent)
            seen.add(parent)
        return run[::-1]


class SizeClasses:
    """A Store for each slot size that engines ask for, all in one budget. :meth:`settle` applies
    the rule of :mod:`kvtier.server.shares` at each call.

    Stores are opened and resized on a lane of their own, because recovery of a large NVMe tier
    takes seconds and no other client may wait for it. A size *rests* when it has been without
    engines for ten minutes. Only where 24 sizes are too few, or RAM cannot hold the least parts,
    the one that rests longest is closed, and its chunks on disks go with it.

    All methods are for the server's loop, except where they say otherwise.

    ``open_store(slot_bytes)`` makes a Store with the whole budget, on the lane, and
    ``open_store(slot_bytes, True)`` one that shares the budget with others. When it raises
    KVTierError, it is called again when that size is asked for again. ``call_soon``: how a lane
    thread hands a call to the loop. ``discard`` removes what a closed size left on disks, on the
    lane too."""

    def __init__(
        self,
        open_store: Callable[..., Store],
        call_soon: Callable[[Subscriber], object],
        clock: Callable[[], float] = time.monotonic,
        discard: Callable[[int], object] = lambda slot_bytes: None,
    ) -> None:
        self._open_store = open_store
        self._call_soon = call_soon
        self._clock = clock
        self._discard = discard
        self._lane = Lane("size-classes", 1, urgent_bound=1, bound=_QUEUED_OPENINGS)
        self._opening: dict[int, Future[SizeClass]] = {}
        self._kept: int | None = None
        self._brought: dict[int, str] = {}
        self._settling = False
        self._apart: set[int] = set()
        # Only the lane uses what follows.
        self._expected = 0
        self._sharing: dict[int, SizeClass] = {}
        self._places: Counter[str] = Counter()
        """Bytes of each place for all size classes together."""
        self._parts: dict[str, dict[int, int]] = {}
        """Bytes that each size may take, by place."""
        self._wanted: Counter[tuple[str, int]] = Counter()
        self._turn = 0

    @property
    def open(self) -> dict[int, SizeClass]:
        return {
            size: one.result()
            for size, one in self._opening.items()
            if one.done() and not one.exception()
        }

    def prepare(
        self, slot_bytes: int | None, found: Sequence[int] = ()
    ) -> dict[int, Future[SizeClass]]:
        """Open, at the start, the configured size, which is never closed, and those ``found`` on
        the disk."""
        self._kept = slot_bytes
        sizes = list(dict.fromkeys([*([slot_bytes] if slot_bytes else []), *found]))[:_MOST_SIZES]
        self._expected = len(sizes)
        return {size: self.get(size) for size in sizes}

    def get(self, slot_bytes: int, client: str = "") -> Future[SizeClass]:
        """Return a size class, open or opening. Fails with KVTierError; after a TierError another
        attempt may succeed. ``client``: who asks, "" for the server itself."""
        self._opening = {
            size: one
            for size, one in self._opening.items()
            if not one.done() or one.exception() is None
        }
        if slot_bytes in self._opening:
            return self._opening[slot_bytes]
        if slot_bytes > _MAX_SLOT_BYTES:
            text = f"no chunk may have {slot_bytes:,} bytes, at most {_MAX_SLOT_BYTES:,}"
            return _failed(RefusedSize(text, list(self._opening)))
        resting = self._resting()
        if refusal := self._no_room(slot_bytes, client, resting):
            return _failed(TierError(refusal))
        closing = self._in_the_way(slot_bytes, resting)
        popped = {size: self._opening.pop(size) for size in closing}
        closed = {size: one.result() for size, one in popped.items()}
        future = future_of(self._lane, lambda: self._open(slot_bytes, closed))
        if future is None:
            self._opening |= popped
            return _failed(TierError(_FULL))
        self._opening[slot_bytes] = future
        self._brought = {size: one for size, one in self._brought.items() if size in self._opening}
        self._brought[slot_bytes] = client
        return future

    def _in_the_way(self, slot_bytes: int, resting: Sequence[int]) -> list[int]:
        """Return the sizes of ``resting`` that must be closed for one size more."""
        for count in range(len(resting) + 1):
            left = [*(size for size in self._opening if size not in resting[:count]), slot_bytes]
            if len(left) <= _MOST_SIZES and self._fit(left):
                return [*resting[:count]]
        return []  # it is refused, and nobody loses anything for it

    def _fit(self, sizes: Sequence[int]) -> bool:
        budget = self._places[RAM]
        least = sum(Side(0, size, 0, 0).least(budget) for size in sizes)
        return len(sizes) == 1 or least <= budget

    def _no_room(self, slot_bytes: int, client: str, resting: Sequence[int]) -> str:
        """Return why this client gets no size more, even if those of ``resting`` close, or ""."""
        kept = [size for size in self._opening if size not in resting]
        if len(kept) >= _MOST_SIZES:
            return (
                f"this server keeps chunks of {_MOST_SIZES} sizes that have engines, or had some "
                f"in the last {_IDLE_S / 60:.0f} minutes, and has no room for chunks of "
                f"{slot_bytes:,} bytes; wait, or give the engine's model a server of its own"
            )
        own = sum(self._brought.get(size) == client for size in kept)
        if client and own >= _ONE_TENANTS_SIZES:
            return (
                f"this client ({client}) has asked this server for chunks of {own} sizes, the most "
                f"for one client, and then for chunks of {slot_bytes:,} bytes; wait "
                f"{_IDLE_S / 60:.0f} minutes after the last engine of one has left, or give the "
                "engine's model a server of its own"
            )
        return ""

    def enter(self, size_class: SizeClass) -> bool:
        """Count a connection. False if the size was closed: then ask for it again."""
        if size_class not in self.open.values():
            return False
        size_class.users += 1
        return True

    def warn_if_apart(self, size_class: SizeClass, name: tuple[bytes, str]) -> None:
        """Warn, once, of an engine that has come if its namespace has chunks of two sizes."""
        own = size_class.owners[name]
        for size, other in self.open.items():
            they = other.owners.get(name)
            if other is size_class or not (they or other.store.sharing.has_seen(own.number)):
                continue
            if own.number not in self._apart and len(self._apart) < _APART_FINGERPRINTS:
                self._apart.add(own.number)
                logger.warning(
                    "engine %r has chunks of %d bytes, and of the same model there are chunks of "
                    "%d bytes here (%s): they share nothing, each counts what the other saved as "
                    "missed, other_chunk_size. Give all engines of a model the same chunk_tokens, "
                    "or none",
                    own.engine,
                    size_class.store.pool.slot_bytes,
                    size,
                    f"engine {they.engine!r}" if they else "from before",
                )

    def leave(self, size_class: SizeClass) -> None:
        size_class.users -= 1
        size_class.left = self._clock()

    def settle(self) -> None:
        """Move room to the sizes that need it, as slots become free. Called from time to time."""
        if self._settling or len(self._opening) < 2:
            return
        self._settling = True
        self.on_lane(self._balance).add_done_callback(self._settled)

    def _settled(self, turn: Future[None]) -> None:
        """End :meth:`settle`. On the lane, or on the caller's thread if the work was over."""
        self._settling = False
        if isinstance(turn.exception(), Exception) and not isinstance(turn.exception(), TierError):
            logger.error(
                "a bug: room could not go from one chunk size to another", exc_info=turn.exception()
            )

    def on_lane(self, work: Callable[[], R]) -> Future[R]:
        """Do ``work`` while no store is being opened."""
        return future_of(self._lane, work) or _failed(TierError(_FULL))

    def close(self, timeout_s: float) -> bool:
        """Close every store. Queued writes have ``timeout_s``. False if some were dropped."""
        clean = self._lane.close(timeout_s)
        for size_class in self.open.values():
            clean &= size_class.store.close(timeout_s)
        return clean

    def _resting(self) -> list[int]:
        """Sizes that rest, the longest first. Never the configured size, and never the last one."""
        now, found = self._clock(), self.open
        gone = [size for size, one in found.items() if size != self._kept and one.rests(now)]
        gone.sort(key=lambda size: found[size].left)
        return gone if len(gone) < len(self._opening) else gone[:-1]

    # ---- on the lane -----------------------------------------------------------------------------

    def _open(self, slot_bytes: int, closed: Mapping[int, SizeClass]) -> SizeClass:
        together, self._expected = self._expected, max(0, self._expected - 1)
        sizes = self._sharing.keys() - closed.keys() | {slot_bytes}
        fits = self._fit([*sizes])
        self._close(closed)
        try:
            if not fits:
                raise TierError(
                    f"{self._places[RAM]:,} bytes of RAM cannot hold a chunk of {slot_bytes:,} "
                    f"bytes, because {len(sizes) - 1} other sizes keep their least part: raise "
                    "ram_bytes, or give the engine's model a server of its own"
                )
            lent = bool(self._sharing) or together > 1
            store = self._open_store(slot_bytes, True) if lent else self._open_store(slot_bytes)
            self._sharing[slot_bytes] = size_class = SizeClass(store, self._call_soon, self._clock)
            store.sharing.others = partial(self._others, slot_bytes)
            self._count(store.sharing.rooms(0))
        except ConfigError as error:
            raise TierError(str(error)) from error
        finally:
            if not self._expected:
                self._divide()
        if len(self._sharing) > 1:
            logger.info(
                "chunks of %s bytes share RAM and disks", ", ".join(map(str, self._sharing))
            )
        return size_class

    def _others(self, slot_bytes: int) -> list[Sharing]:
        """Return the shared state of all other sizes. Any thread."""
        every = list(self._sharing.items())
        return [one.store.sharing for size, one in every if size != slot_bytes]

    def _close(self, closed: Mapping[int, SizeClass]) -> None:
        for size, size_class in closed.items():
            logger.warning(
                "chunks of %d bytes: %s; all of them are dropped, from disks too, because there is "
                "no room for the least part of one size more",
                size,
                size_class.rest,
            )
            self._sharing.pop(size, None)
            for place in self._places:
                del self._wanted[place, size]
            size_class.store.close(_CLOSE_S)
            self._discard(size)

    def _balance(self) -> None:
        known = self._places.copy()
        rooms = self._rooms()
        if self._places != known:
            self._divide()
            return
        for place in self._parts:
            self._parts[place] = shift(self._places[place], self._sides(place, rooms))
        self._grant(rooms)

    def _divide(self) -> None:
        rooms = self._rooms()
        self._parts = {
            place: divide(self._places[place], self._sides(place, rooms)) for place in self._places
        }
        self._grant(rooms)

    def _rooms(self) -> dict[int, dict[str, Room]]:
        """Return each size's room by place. Each call begins a turn, the unit of chunks' ages."""
        self._turn = self._turn + 1 if len(self._sharing) > 1 else 0
        rooms = {
            size: size_class.store.sharing.rooms(self._turn)
            for size, size_class in self._sharing.items()
        }
        for own in rooms.values():
            self._count(own)
        return rooms

    def _count(self, rooms: Mapping[str, Room]) -> None:
        """Raise places' totals to what these rooms may have: a tier that was away tells it late."""
        for place, own in rooms.items():
            self._places[place] = max(self._places[place], own.fixed + own.unit * own.most)

    def _sides(self, place: str, rooms: Mapping[int, Mapping[str, Room]]) -> dict[int, Side]:
        sides = {}
        for size, own in rooms.items():
            if place in own:
                unit, fixed, _, _, used, _, wanted, coldest = own[place]
                lacked = wanted - self._wanted[place, size]
                self._wanted[place, size] = wanted
                age = None if coldest is None else self._turn - coldest
                part = self._parts.get(place, {}).get(size, 0)
                sides[size] = Side(part, unit, fixed, fixed + unit * used, unit * lacked, age)
        return sides

    def _grant(self, rooms: dict[int, dict[str, Room]]) -> None:
        """Set the limits, lowered ones first, so that the sizes never have more than the budget
        together. Slots with a pin leave in a later turn, and only then another size gets their
        room."""
        for growing in (False, True):
            for size, size_class in self._sharing.items():
                limits = {}
                for place, own in rooms[size].items():
                    limit = min(own.most, max(0, self._parts[place][size] - own.fixed) // own.unit)
                    taken = sum(
                        their[place].taken
                        for other, their in rooms.items()
                        if other != size and place in their
                    )
                    left = max(0, self._places[place] - taken - own.fixed) // own.unit
                    limits[place] = (
                        max(own.limit, min(limit, left)) if growing else min(own.limit, limit)
                    )
                    if limits[place] == own.limit and own.occupied <= own.limit:
                        del limits[place]
                    elif place != RAM and limits[place] < own.used:
                        self._warn_of_rest(size, size_class, place)
                if limits:
                    whole(size_class.store.sharing.limit(limits))
                    rooms[size] = size_class.store.sharing.rooms(self._turn)

    def _warn_of_rest(self, size: int, size_class: SizeClass, place: str) -> None:
        if size_class.rests(self._clock()) and size_class.told_at != size_class.left:
            size_class.told_at = size_class.left
            logger.warning(
                "chunks of %d bytes: %s; they leave %s, coldest first, for chunks of other sizes "
                "that need the room",
                size,
                size_class.rest,
                place,
            )


def _failed(error: Exception) -> Future[Any]:
    future = Future[Any]()
    future.set_exception(error)
    return future
