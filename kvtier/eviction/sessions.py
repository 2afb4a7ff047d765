"""Sessions: which conversation a prompt belongs to, and which chunks only that conversation has.
Pure and bounded.

A session is known by the name that a request carries, or else from its chunks. A prompt continues
the session that has its last known chunk, if the prompt contains at least half of that session's
last prompt. A next turn contains all of it. A regenerated answer contains most of it. Another
conversation contains only the system prompt. When a third prompt branches off at one chunk, that
chunk ends a beginning that many prompts share, and no conversation.

A chunk is exclusive as long as the prompts of only one session contained it. Afterwards it is
shared for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import PIECE_CHUNKS, Steps, in_pieces, pieces, whole

_MOST_SESSIONS = 16_384
_MOST_LEFT_CHUNKS = 64
"""Most ends of earlier prompts that are remembered for a session."""
_MOST_NAMES = 4096
_MOST_FORKS = 4096
_FORKS = 2
_SHARED = -1
K = TypeVar("K")
V = TypeVar("V")


class _Last(NamedTuple):
    chunks: int
    end: ChunkKey
    left: tuple[ChunkKey, ...]
    """Last chunks of earlier prompts that the session's next prompt did not have."""

    def next(self, run: Sequence[ChunkKey]) -> _Last:
        goes_on = len(run) >= self.chunks and run[self.chunks - 1] == self.end
        left = self.left if goes_on else (*self.left, self.end)[-_MOST_LEFT_CHUNKS:]
        return _Last(len(run), run[-1], left)


class Sessions:
    """Bounded record of which session has which chunks. One thread at a time. ``most``: chunks,
    those seen last, whose session is remembered, at 170 bytes each."""

    def __init__(self, most: int) -> None:
        self._whose: OrderedDict[ChunkKey, int] = OrderedDict()
        self._lasts: OrderedDict[int, _Last] = OrderedDict()
        self._forks: OrderedDict[ChunkKey, int] = OrderedDict()
        """Chunk -> how often another prompt branched off there."""
        self._names: OrderedDict[str, tuple[int, Sequence[ChunkKey]]] = OrderedDict()
        """Name -> session number and last prompt."""
        self._most = most
        self._next = 0

    @in_pieces
    def seen(self, run: Sequence[ChunkKey], name: str = "") -> Steps[int]:
        """Return the number of the session that this prompt, which is not empty, belongs to."""
        if name:
            session = self._names[name][0] if name in self._names else self._new()
            _put(self._names, name, (session, run), _MOST_NAMES)
        else:
            session = yield from self._continued(run)
        last = self._lasts.get(session)
        last = _Last(len(run), run[-1], ()) if last is None else last.next(run)
        _put(self._lasts, session, last, _MOST_SESSIONS)
        for part in pieces(run):
            self._own(part, session)
            if len(part) == PIECE_CHUNKS:
                yield 0.0
        return session

    def exclusive(self, run: Sequence[ChunkKey]) -> Iterator[list[ChunkKey]]:
        """Yield, in pieces, the chunks that only the session of ``run`` had: those of ``run``, and
        ends of its earlier prompts. ``run``: a prompt that was seen, with its answer's chunks."""
        last, session = whole(self._last_known(run))
        if session == _SHARED:
            return
        for part in pieces(run[:last]):
            yield self._own_of(part, session)
        yield from map(list, pieces(run[last:]))
        if session in self._lasts:
            yield self._own_of(self._lasts[session].left, session)

    def _own_of(self, keys: Sequence[ChunkKey], session: int) -> list[ChunkKey]:
        return [key for key in keys if self._whose.get(key) == session]

    def last(self, name: str) -> Sequence[ChunkKey]:
        return self._names[name][1] if name in self._names else ()

    def _last_known(self, run: Sequence[ChunkKey]) -> Steps[tuple[int, int]]:
        """Return the place of the last chunk of ``run`` seen before (else -1), and its session."""
        whose, at = self._whose, len(run) - 1
        while at >= 0 and run[at] not in whose:
            at -= 1
            if not at % PIECE_CHUNKS:
                yield 0.0
        return at, whose[run[at]] if at >= 0 else _SHARED

    def _continued(self, run: Sequence[ChunkKey]) -> Steps[int]:
        at, session = yield from self._last_known(run)
        before = self._lasts.get(session)
        if before is None or 2 * (at + 1) < before.chunks:
            return self._new()
        # The last chunk may not have been full. Then it differs in the next turn.
        if at + 1 < before.chunks - 1:
            forks = self._forks.get(run[at], 0) + 1
            _put(self._forks, run[at], forks, _MOST_FORKS)
            if forks >= _FORKS:
                for part in pieces(run[: at + 1]):
                    self._whose.update(dict.fromkeys(part, _SHARED))
                    yield 0.0
                return self._new()
        return session

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _own(self, run: Sequence[ChunkKey], session: int) -> None:
        whose = self._whose
        for key, owner in zip(run, map(whose.setdefault, run, repeat(session)), strict=True):
            if owner != session:
                whose[key] = _SHARED
        for _ in map(whose.move_to_end, run):
            pass
        for _ in range(len(whose) - self._most):
            whose.popitem(last=False)


def _put(into: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    into[key] = value
    into.move_to_end(key)
    if len(into) > most:
        into.popitem(last=False)
