"""ByReturn: the index of a place from which the chunks of those sessions leave first that are least
likely to come back soon. It serves prompts as a Store would. Pure.

A session's own chunks are a stack with its root at the bottom: they leave leaf-first. Chunks that
other sessions had too lie in a second stack of the session that used them last. Each stack has a
rank. The least rank leaves first, and of equal ranks the one that was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import AT_ONCE, Steps, pieces
from kvtier.eviction.returns import Returns
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.sessions import SessionPrompt

_SPARE_ENTRIES = 64
_MOST_GHOSTS = 8192
_NO_SESSION = -1
_AHEAD, _MOST_AHEAD = 16, 256
"""The part of the room, and at most so many chunks, that are named before they have to leave: room
is needed before a prompt is followed, and lower tiers want to write chunks before they leave."""


class Stack:
    """Chunks of one session, root first."""

    __slots__ = ("at", "cost", "gap", "keys", "number", "session", "shared")

    def __init__(self, session: int, *, shared: bool) -> None:
        self.keys: dict[ChunkKey, None] = {}
        self.session, self.shared = session, shared
        self.at = 0.0
        """The time of the last use."""
        self.gap = 0.0
        """Of shared chunks: the mean time between uses in seconds. 0: not known."""
        self.cost = 1.0
        """What a hit of one of these saves."""
        self.number = 0
        """Of its valid entry in the heap. 0: none is."""


def _stack(stacks: dict[int, Stack], session: int, *, shared: bool = False) -> Stack:
    stack = stacks.get(session)
    if stack is None:
        stack = stacks[session] = Stack(session, shared=shared)
    return stack


class ByReturn:
    """``room``: in chunks. ``saved``: a session's rank is multiplied with what a hit of its chunks
    saves. None: all hits are worth the same."""

    def __init__(self, room: int, saved: SavedCompute | None = None) -> None:
        self.room, self._saved = room, saved
        self._ahead = min(_MOST_AHEAD, room // _AHEAD)
        self._where: dict[ChunkKey, Stack] = {}
        self._own: dict[int, Stack] = {}
        self._shared: dict[int, Stack] = {}
        self._heap: list[tuple[float, float, int, Stack]] = []
        """Rank, last use, the entry's number. Only a stack's newest entry is valid."""
        self._entries = 0
        self._dead = Stack(_NO_SESSION, shared=False)
        """Chunks that leave before all others, the first one first: those that were named, those of
        branches that their session left, and those of sessions that are over."""
        self._ghosts: OrderedDict[ChunkKey, tuple[float, float]] = OrderedDict()
        """Where stacks ended when chunks left them: the chunk that left last, with the stack's last
        use and gap."""
        self.named: list[ChunkKey] = []
        """The chunks of which it was said since the last prompt that they leave next, in this
        order. A place that follows should let go of them first, unless they are used again."""

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[ChunkKey]:
        """In no order."""
        return iter(self._where)

    def leaving(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Those of them that it does not hold, or has named."""
        where, gone = self._where, (None, self._dead)
        return [key for key in keys if where.get(key) in gone]

    def serving(self, prompt: SessionPrompt, returns: Returns) -> Steps[int]:
        """A prompt asks for its run. Then all of it is stored. In pieces. Returns how many leading
        chunks were held."""
        run, now, session = prompt.run, prompt.at, prompt.session
        where, new, held = self._where, list[ChunkKey](), len(run)
        self.named = []
        own, shared = _stack(self._own, session), self._shared.get(session)
        own.number = 0
        if shared is not None:
            shared.number = 0
        for number, part in enumerate(pieces(run)):
            if number:
                yield 0.0
            absent = self._use(part, own, now)
            if absent and not new:
                held = number * AT_ONCE + part.index(absent[0])
            new += absent
        if self._has_left_branch(session, len(run) - len(new)):
            yield from self._bury_branch(own, run)
        if held < prompt.common:
            shared = _stack(self._shared, session, shared=True)
            if (ghost := self._ghosts.pop(run[held], None)) is not None:
                self._mind(shared, now, *ghost)
        if len(where) + len(new) > self.room:
            yield from self._make_room(len(new))
            del new[max(0, self.room - len(where)) :]
        split = max(0, prompt.common - held)
        if split:
            yield from self._hold(_stack(self._shared, session, shared=True), new[:split])
            del new[:split]
        yield from self._hold(own, new)
        self._rank_both(session, returns, now)
        return held

    def _use(self, run: Sequence[ChunkKey], own: Stack, now: float) -> list[ChunkKey]:
        """What others have of the run is shared from now on, and this session used it last. Returns
        what is not held."""
        where, dead, last, absent = self._where, self._dead, None, list[ChunkKey]()
        found = list(map(where.get, run))
        holders = set(found)
        if not holders - {own, None}:
            if own not in holders:
                return list(run)
            return [key for key, stack in zip(run, found, strict=True) if stack is None]
        shared = _stack(self._shared, own.session, shared=True)
        for key in run:
            stack = where.get(key)
            if stack is own:
                continue
            if stack is None:
                absent.append(key)
                continue
            if stack is not dead:
                last = stack
            if stack is not shared:
                del stack.keys[key]
                new = own if stack is dead else shared
                new.keys[key] = None
                where[key] = new
        if last is not None:
            self._mind(shared, now, last.at, last.gap)
        return absent

    def _hold(self, stack: Stack, keys: list[ChunkKey]) -> Steps[None]:
        where, held = self._where, stack.keys
        for part in pieces(keys):
            for key in part:
                where[key] = stack
                held[key] = None
            if len(part) == AT_ONCE:
                yield 0.0

    def _rank_both(self, session: int, returns: Returns, now: float) -> None:
        """Its stacks were used now."""
        own, shared = self._own[session], self._shared.get(session)
        (worth, age), depth = returns.worth(session), len(shared.keys) if shared else 0
        own.at = now
        if self._saved is not None:
            own.cost = self._saved.of(len(own.keys), depth) / (len(own.keys) or 1)
        self._rank(own, worth, age, now)
        if shared is not None:
            shared.at = now
            if self._saved is not None:
                shared.cost = self._saved.of(depth) / (depth or 1)
            self._rank(shared, worth, age, now)

    @staticmethod
    def _mind(shared: Stack, now: float, at: float, gap: float) -> None:
        shared.gap = 0.7 * gap + 0.3 * (now - at) if gap else now - at

    def _has_left_branch(self, session: int, held: int) -> bool:
        """Whether its stacks have more than so many chunks, which its prompt has."""
        shared = self._shared.get(session)
        return len(self._own[session].keys) + (len(shared.keys) if shared else 0) > held

    def _bury_branch(self, own: Stack, run: Sequence[ChunkKey]) -> Steps[None]:
        wanted = set[ChunkKey]()
        for part in pieces(run):
            wanted.update(part)
            if len(part) == AT_ONCE:
                yield 0.0
        for part in pieces(list(reversed(own.keys))):
            self._bury([key for key in reversed(part) if key not in wanted])
            if len(part) == AT_ONCE:
                yield 0.0

    def _bury(self, run: Sequence[ChunkKey]) -> None:
        """These leave first, the end first."""
        where, dead = self._where, self._dead
        for key in reversed(run):
            del where[key].keys[key]
            dead.keys[key] = None
            where[key] = dead
        self.named += reversed(run)

    def _make_room(self, count: int) -> Steps[None]:
        """Make room for so many chunks. Stacks without a valid entry in the heap stay."""
        where, dead = self._where, self._dead.keys
        wanted = len(where) + count - self.room
        if wanted <= 0:
            return
        yield from self._name(wanted + self._ahead - len(dead))
        wanted = min(wanted, len(dead))
        while wanted > 0:
            for key in list(islice(dead, min(wanted, AT_ONCE))):
                del dead[key], where[key]
            wanted -= AT_ONCE
            if wanted > 0:
                yield 0.0

    def _name(self, count: int) -> Steps[None]:
        """Say of so many chunks that they leave next."""
        where, dead, ghosts, passed = self._where, self._dead, self._ghosts, 0
        leaving = dead.keys
        while count > 0 and (stack := self._coldest()) is not None:
            gone = list(islice(reversed(stack.keys), min(count, AT_ONCE)))
            if len(gone) == len(stack.keys):
                stack.keys = {}
            else:
                for key in gone:
                    del stack.keys[key]
            ghosts[gone[-1]] = stack.at, stack.gap
            for key in gone:
                where[key] = dead
                leaving[key] = None
            self.named += gone
            count -= len(gone)
            passed += len(gone)
            if passed >= AT_ONCE and count > 0:
                passed = 0
                yield 0.0
        while len(ghosts) > _MOST_GHOSTS:
            ghosts.popitem(last=False)

    def _coldest(self) -> Stack | None:
        """The stack with the least rank. One that is empty is forgotten."""
        heap = self._heap
        while heap:
            _, _, number, stack = heap[0]
            if number == stack.number:
                if stack.keys:
                    return stack
                self._forget(stack)
            heappop(heap)
        return None

    def _forget(self, stack: Stack) -> None:
        stack.number = 0
        (self._shared if stack.shared else self._own).pop(stack.session, None)

    def _rank(self, stack: Stack, worth: float, age: float, now: float) -> None:
        if not stack.keys:
            self._forget(stack)
            return
        rank = worth
        if stack.gap:
            rank = max(rank, 1.0 / max(stack.gap, age, now - stack.at, 1.0))
        self._entries += 1
        stack.number = self._entries
        heappush(self._heap, (rank * stack.cost, stack.at, stack.number, stack))
        if len(self._heap) > _SPARE_ENTRIES + 4 * (len(self._own) + len(self._shared)):
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].number]
            heapify(self._heap)

    def changed(self, sessions: Sequence[int], returns: Returns, now: float) -> None:
        """These sessions are worth something else now."""
        for session in sessions:
            worth, age = returns.worth(session)
            for stacks in (self._own, self._shared):
                stack = stacks.get(session)
                if stack is not None:
                    self._rank(stack, worth, age, now)

    def cooling(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """These leave before all others, the end of the run first. In pieces."""
        for part in reversed(list(pieces(run))):
            self._bury([key for key in part if key in self._where])
            yield 0.0
