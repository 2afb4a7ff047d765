"""ByReturn: the index of a place from which the chunks of those sessions leave first that are least
likely to come back soon. It serves prompts as a Store would. Pure.

A session's own chunks are a stack with its root at the bottom: they leave leaf-first. Chunks that
other sessions had too lie in a second stack of the session that used them last. Each stack has a
rank. The least rank leaves first, and of equal ranks the one that was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

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


class _Dead(Stack):
    """Chunks that leave before all others: those that were named, those of branches that their
    session left, and those of sessions that are over."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_NO_SESSION, shared=False)
        self.keys: OrderedDict[ChunkKey, None] = OrderedDict()


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
        self._dead = _Dead()
        """Chunks that leave before all others, the first one first."""
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

    def serving(self, prompt: SessionPrompt, returns: Returns) -> Steps[int]:
        """A prompt asks for its run. Then all of it is stored. In pieces. Returns how many leading
        chunks were held."""
        run, now, common = prompt.run, prompt.at, prompt.common
        where, new, held = self._where, list[ChunkKey](), len(run)
        self.named = []
        own, shared = self._stack(self._own, prompt), self._stack(self._shared, prompt)
        own.number = shared.number = 0
        for number, part in enumerate(pieces(run)):
            if number:
                yield 0.0
            absent = self._use(part, own, shared, now)
            if absent and not new:
                held = number * AT_ONCE + part.index(absent[0])
            new += absent
        if len(own.keys) + len(shared.keys) + len(new) > len(run):
            yield from self._bury_branch(own, run)
        if held < common and (ghost := self._ghosts.pop(run[held], None)) is not None:
            self._mind(shared, now, *ghost)
        yield from self._make_room(len(new))
        del new[max(0, self.room - len(where)) :]
        split = max(0, common - held)
        for stack, keys in ((shared, new[:split]), (own, new[split:])):
            for part in pieces(keys):
                where.update(dict.fromkeys(part, stack))
                stack.keys.update(dict.fromkeys(part))
                yield 0.0
        own.at = shared.at = now
        if self._saved is not None:
            depth = len(shared.keys)
            shared.cost = self._saved.of(depth) / (depth or 1)
            own.cost = self._saved.of(len(own.keys), depth) / (len(own.keys) or 1)
        self._rank(own, returns, now)
        self._rank(shared, returns, now)
        return held

    def _stack(self, stacks: dict[int, Stack], prompt: SessionPrompt) -> Stack:
        stack = stacks.get(prompt.session)
        if stack is None:
            stack = stacks[prompt.session] = Stack(prompt.session, shared=stacks is self._shared)
        return stack

    def _use(
        self, run: Sequence[ChunkKey], own: Stack, shared: Stack, now: float
    ) -> list[ChunkKey]:
        """What others have of the run is shared from now on, and this session used it last. Returns
        what is not held."""
        where, dead, last, absent = self._where, self._dead, None, list[ChunkKey]()
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

    @staticmethod
    def _mind(shared: Stack, now: float, at: float, gap: float) -> None:
        shared.gap = 0.7 * gap + 0.3 * (now - at) if gap else now - at

    def _bury_branch(self, own: Stack, run: Sequence[ChunkKey]) -> Steps[None]:
        wanted = frozenset(run)
        self._bury([key for key in own.keys if key not in wanted])
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
        for number in range(min(wanted, len(dead))):
            key, _ = dead.popitem(last=False)
            del where[key]
            if number % AT_ONCE == AT_ONCE - 1:
                yield 0.0

    def _name(self, count: int) -> Steps[None]:
        """Say of so many chunks that they leave next."""
        where, dead, ghosts = self._where, self._dead, self._ghosts
        while count > 0 and (stack := self._coldest()) is not None:
            take = stack.keys.popitem
            gone = [take()[0] for _ in range(min(count, len(stack.keys), AT_ONCE))]
            ghosts[gone[-1]] = stack.at, stack.gap
            for key in gone:
                where[key] = dead
                dead.keys[key] = None
            self.named += gone
            count -= len(gone)
            if count > 0:
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

    def _rank(self, stack: Stack, returns: Returns, now: float) -> None:
        if not stack.keys:
            self._forget(stack)
            return
        rank = 0.0
        if returns.knows:
            rank, age = returns.worth(stack.session)
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
            for stacks in (self._own, self._shared):
                stack = stacks.get(session)
                if stack is not None:
                    self._rank(stack, returns, now)

    def cool(self, run: Sequence[ChunkKey]) -> None:
        """These leave before all others, the end of the run first."""
        self._bury([key for key in run if key in self._where])
