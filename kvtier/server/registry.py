"""Size class: one Store of a server with what its sessions share. Size classes: several of them, by
slot size, in one budget.

Engines whose slots are equally large share one Store; keys contain the engines' fingerprints, so
chunks of different models cannot meet. An *owner* is a namespace (fingerprint and tenant name) as a
number: what quotas count, and what ``clear`` is limited to; see :mod:`kvtier.core.tenant`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvtier.core.chunk import ChunkKey, own_half, parent_half
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.lanes import Lane
from kvtier.core.steps import whole
from kvtier.core.tenant import owner_of
from kvtier.server.balance import Side, divide, shift
from kvtier.server.shares import Pace, Shares
from kvtier.store.room import Room
from kvtier.store.store import Store
from kvtier.store.zero_hits import ZeroHits, totals

logger = logging.getLogger("kvtier.server")

_MAX_OWNERS = 4096
_MOST_SIZES = 8
_IDLE_S = 600.0
_CLOSE_S = 5.0
_MAX_LINKS = 65_536
_OPENINGS_QUEUED = 64
_MAX_SLOT_BYTES = 1 << 30
"""No tier keeps larger chunks; who asks for one learns what is kept, and opens nothing."""
Listener = Callable[[], None]
R = TypeVar("R")


class SizeClass:
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
        self.users = 0
        """Connections, for :class:`SizeClasses`; and when the last one of them left."""
        self.left = clock()
        self.arrivals = 0
        """Differs from what it was when promotions have ended since."""
        store.on_arrival = self._arrived
        self.zero_hits = ZeroHits.of(store, clock)

    def owner(self, fingerprint: bytes, namespace: str) -> int:
        """The namespace's number, which its name alone decides. Of many names those are forgotten
        that came longest ago: only the list of names is shorter then."""
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

    # ---- promotions that end ---------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` whenever promotions have ended, until :meth:`ignore`. Look once after
        this call: what ended before it is not told."""
        self._listeners.add(listener)

    def ignore(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def _arrived(self) -> None:
        """On a lane thread. A listener added meanwhile has yet to look for the first time, and sees
        the chunk."""
        self.arrivals += 1
        if self._listeners:
            self._call_soon(self._tell)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # ---- runs of chunks that come one by one -----------------------------------------------------

    def remember(self, keys: Sequence[ChunkKey]) -> None:
        """Know these keys as somebody's parents, for :meth:`run_to`."""
        for key in keys:
            self._links[own_half(key)] = key
            self._links.move_to_end(own_half(key))
        while len(self._links) > _MAX_LINKS:
            self._links.popitem(last=False)

    def run_to(self, key: ChunkKey) -> list[ChunkKey]:
        """The run that ends with ``key``, first chunk first, as far as its ancestors were seen
        lately: chunks that are written one by one leave leaf first like all others."""
        run, seen = [key], {key}
        while (parent := self._links.get(parent_half(run[-1]))) is not None and parent not in seen:
            run.append(parent)
            seen.add(parent)
        return run[::-1]


class SizeClasses:
    """A Store for each slot size that engines ask for, all out of one budget, from which each takes
    what it needs more than the others; :mod:`kvtier.server.balance` has the rule, which is asked
    once in every :meth:`settle`.

    They are opened and resized on a lane of their own: recovery of a large NVMe tier takes seconds,
    and nobody else shall wait for it. A size that comes beside others gets what they do not use, or
    its least part. One without engines for ten minutes is closed, and the others have its room.
    There are at most eight: for one more the size leaves that has been without engines longest, and
    where all have engines, who asks is told to try again later. All methods are for the server's
    loop, but for those that say otherwise.

    Args:
        open_store: ``open_store(slot_bytes)`` makes a Store with the whole budget,
            ``open_store(slot_bytes, True)`` one that is lent all of it, to be divided with others.
            On the lane; raises KVTierError, and is tried anew when that size is asked for again.
        call_soon: how a lane thread hands a call to the loop.
        clock: seconds that only grow.
        discard: removes what is left of a closed size class on disks, by slot size. On the lane.
    """

    def __init__(
        self,
        open_store: Callable[..., Store],
        call_soon: Callable[[Listener], object],
        clock: Callable[[], float] = time.monotonic,
        discard: Callable[[int], object] = lambda slot_bytes: None,
    ) -> None:
        self._open_store = open_store
        self._call_soon = call_soon
        self._clock = clock
        self._discard = discard
        self._lane = Lane("size-classes", 1, urgent_bound=1, bound=_OPENINGS_QUEUED)
        self._opening: dict[int, Future[SizeClass]] = {}
        self._kept: int | None = None
        self._settling = False
        # What follows is the lane's.
        self._expected = 0
        """Sizes that are opened together, and have yet to be."""
        self._sharing: dict[int, SizeClass] = {}
        """The open size classes."""
        self._places: Counter[str] = Counter()
        """Bytes of RAM and of every tier with a budget: that the size classes have together."""
        self._parts: dict[str, dict[int, int]] = {}
        """Of each place the bytes that every size may take."""
        self._wanted: Counter[tuple[str, int]] = Counter()
        """What a size wanted of a place until the last turn."""
        self._turn = 0

    @property
    def open(self) -> dict[int, SizeClass]:
        """The size classes that are ready, by slot size."""
        return {
            size: one.result()
            for size, one in self._opening.items()
            if one.done() and not one.exception()
        }

    def prepare(
        self, slot_bytes: int | None, found: Sequence[int] = ()
    ) -> dict[int, Future[SizeClass]]:
        """At the start: open the size that is configured, which is kept for good, and those
        ``found`` on the disk. Each fails as in :meth:`get`."""
        self._kept = slot_bytes
        sizes = list(dict.fromkeys([*([slot_bytes] if slot_bytes else []), *found]))[:_MOST_SIZES]
        self._expected = len(sizes)
        return {size: self.get(size) for size in sizes}

    def get(self, slot_bytes: int) -> Future[SizeClass]:
        """The size class of this slot size, now or soon; fails with KVTierError: TierError where
        another attempt may succeed."""
        self._opening = {
            size: future for size, future in self._opening.items() if not _failed(future)
        }
        if slot_bytes in self._opening:
            return self._opening[slot_bytes]
        future: Future[SizeClass] = Future()
        if slot_bytes > _MAX_SLOT_BYTES:
            text = f"no chunk may have {slot_bytes:,} bytes, at most {_MAX_SLOT_BYTES:,}"
            future.set_exception(RefusedSize(text, list(self._opening)))
            return future
        closing = self._without_engines(_IDLE_S)
        if not closing and len(self._opening) >= _MOST_SIZES:
            closing = self._without_engines(0.0)[:1]
        if len(self._opening) - len(closing) >= _MOST_SIZES:
            future.set_exception(
                TierError(
                    f"this server keeps chunks of {_MOST_SIZES} sizes, all with engines, and has "
                    "no room for chunks of "
                    f"{slot_bytes:,} bytes; give the engine's model a server of its own"
                )
            )
            return future
        closed = {size: self._opening.pop(size).result() for size in closing}
        if not self._submit(future, lambda: self._open(slot_bytes, closed)):
            self._opening.update({size: _done(size_class) for size, size_class in closed.items()})
            return future
        self._opening[slot_bytes] = future
        return future

    def enter(self, size_class: SizeClass) -> bool:
        """A connection uses it from now on. False: it is closed; ask again."""
        if size_class not in self.open.values():
            return False
        size_class.users += 1
        return True

    def leave(self, size_class: SizeClass) -> None:
        """A connection uses it no more."""
        size_class.users -= 1
        size_class.left = self._clock()

    def settle(self) -> None:
        """Now and then: close what has been without engines for long beside others, and move room
        to where it belongs, as slots are let go of."""
        closing = self._without_engines(_IDLE_S)
        if self._settling or not (closing or len(self._opening) > 1):
            return
        closed = {size: self._opening.pop(size).result() for size in closing}
        self._settling = True
        future: Future[None] = Future()
        future.add_done_callback(self._settled)
        self._submit(future, lambda: self._balance(closed))

    def _settled(self, turn: Future[None]) -> None:
        """On the lane, or where it was refused."""
        self._settling = False
        if isinstance(turn.exception(), Exception) and not isinstance(turn.exception(), TierError):
            logger.error(
                "a bug: room could not go from one chunk size to another", exc_info=turn.exception()
            )

    def aside(self, work: Callable[[], R]) -> Future[R]:
        """Do ``work`` on the lane where stores are opened: in turn, so that none is opening
        meanwhile."""
        future: Future[R] = Future()
        self._submit(future, work)
        return future

    def close(self, timeout_s: float) -> bool:
        """Close every store; queued writes have ``timeout_s`` seconds. False: something was dropped
        or hangs."""
        clean = self._lane.close(timeout_s)
        for size_class in self.open.values():
            clean &= size_class.store.close(timeout_s)
        return clean

    def _submit(self, future: Future[R], work: Callable[[], R]) -> bool:
        if self._lane.submit(lambda: _settle(future, work)):
            return True
        future.set_exception(TierError("the server is closing, or opens too many stores at once"))
        return False

    def _without_engines(self, seconds: float) -> list[int]:
        """Sizes that nobody has used for so long, the longest first; never the configured one, nor
        the last one."""
        now, found = self._clock(), self.open
        idle = [
            size
            for size, size_class in found.items()
            if size != self._kept and not size_class.users
        ]
        gone = sorted(
            (size for size in idle if now - found[size].left >= seconds),
            key=lambda size: found[size].left,
        )
        return gone if len(gone) < len(self._opening) or seconds == 0.0 else gone[:-1]

    # ---- on the lane -----------------------------------------------------------------------------

    def _open(self, slot_bytes: int, closed: Mapping[int, SizeClass]) -> SizeClass:
        together, self._expected = self._expected, max(0, self._expected - 1)
        budget, sizes = self._places["ram"], self._sharing.keys() - closed.keys() | {slot_bytes}
        too_large = (
            len(sizes) > 1 and sum(Side(0, size, 0, 0).least(budget) for size in sizes) > budget
        )
        self._close(closed)
        try:
            if too_large:
                raise TierError(
                    f"{budget:,} bytes of RAM, of which {len(sizes) - 1} other sizes keep the "
                    "least, hold no chunk of "
                    f"{slot_bytes:,} bytes: raise ram_bytes, or give the engine's model a server "
                    "of its own"
                )
            lent = bool(self._sharing) or together > 1
            store = self._open_store(slot_bytes, True) if lent else self._open_store(slot_bytes)
            self._sharing[slot_bytes] = size_class = SizeClass(store, self._call_soon, self._clock)
            for place, own in store.rooms(0).items():
                self._places[place] = max(self._places[place], own.fixed + own.unit * own.most)
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

    def _close(self, closed: Mapping[int, SizeClass]) -> None:
        for size, size_class in closed.items():
            logger.info("chunks of %d bytes: no engine for long; their room goes to others", size)
            self._sharing.pop(size, None)
            for place in self._places:
                del self._wanted[place, size]
            size_class.store.close(_CLOSE_S)
            self._discard(size)

    def _balance(self, closed: Mapping[int, SizeClass]) -> None:
        """A turn: who lacks room gets some of the others'."""
        if closed:
            self._close(closed)
            self._divide()
            return
        rooms = self._rooms()
        for place in self._parts:
            self._parts[place] = shift(self._places[place], self._sides(place, rooms))
        self._grant(rooms)

    def _divide(self) -> None:
        """A size has come or gone."""
        rooms = self._rooms()
        self._parts = {
            place: divide(self._places[place], self._sides(place, rooms)) for place in self._places
        }
        self._grant(rooms)

    def _rooms(self) -> dict[int, dict[str, Room]]:
        """What every size has now, by place; the ages of chunks are counted in these looks."""
        self._turn = self._turn + 1 if len(self._sharing) > 1 else 0
        return {
            size: size_class.store.rooms(self._turn) for size, size_class in self._sharing.items()
        }

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
        """Give each what it may take; first take, then give, so that together they never have more.
        What somebody holds is taken, and given to another, in a later turn."""
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
                if limits:
                    whole(size_class.store.sharing(limits))
                    rooms[size] = size_class.store.rooms(self._turn)


def _settle(future: Future[R], work: Callable[[], R]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - whoever asked for it is told
        future.set_exception(error)


def _done(size_class: SizeClass) -> Future[SizeClass]:
    future: Future[SizeClass] = Future()
    future.set_result(size_class)
    return future


def _failed(future: Future[SizeClass]) -> bool:
    return future.done() and future.exception() is not None
