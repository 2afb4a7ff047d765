"""Ends: how much more RAM would hit if every session said when it is over. Pure.

Whether a session is over is known only later. So prompts wait in a window, the longest time that
memory allows. A prompt is served when it leaves the window. If its session has no other prompt in
the window by then, its session is taken to be over. Two shadows of RAM serve the same prompts, and
only one of them is told of these ends. The difference of their hits is what ends would add to those
that are said already. A session that pauses for longer than the window counts as one that is over
and comes back. The setting of RAM's order is the one that is in use, although hints may
let another one hit more.

For a large place only a part of the sessions is followed, as in :mod:`kvtier.eviction.shadows`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.segments import LRU_SETTING, Setting
from kvtier.eviction.shadows import Shadow, part_of, room_of, spread

WINDOW = 1 << 15
"""Chunks of the prompts in the window. At the beginning it has half of all chunks so far."""
_MOST_ROOM = 2048
"""Chunks in a shadow. A larger RAM is followed in part, because an estimate may cost less."""
_NO_SESSION = -1


class _Waiting(NamedTuple):
    run: Sequence[ChunkKey]
    session: int
    exclusive: Sequence[ChunkKey]
    """The chunks that only this session had when the prompt came."""


class Ends:
    """For a RAM with room for ``room`` chunks. Used by one thread at a time."""

    def __init__(self, room: int) -> None:
        self.asked = self.hits = self.hits_with_ends = 0
        """Chunks of the prompts that were served, and how many of them the two shadows hit."""
        self._came = 0
        self._resize(room)

    def _resize(self, room: int) -> None:
        """The shadows start empty."""
        self.room, self.part = room, part_of(room, _MOST_ROOM)
        self._plain, self._told = (Shadow(room_of(room, self.part)) for _ in range(2))
        self._window: deque[_Waiting] = deque()
        self._in_window: Counter[int] = Counter()
        """How many prompts of each session are in the window."""
        self._chunks = 0

    def seen(
        self, room: int, run: Sequence[ChunkKey], session: int, exclusive: Sequence[ChunkKey]
    ) -> None:
        """A prompt of this session asked for ``run``. There is room for ``room`` chunks now.
        :meth:`serve` follows."""
        if room != self.room:
            self._resize(room)
        if self.part < 1 and spread(session) >= self.part:
            return
        self._window.append(_Waiting(run, session, exclusive))
        self._in_window[session] += 1
        self._chunks += len(run)
        self._came += len(run)

    def over(self, run: Sequence[ChunkKey]) -> None:
        """A hint says that nobody will ask for these chunks again."""
        self._window.append(_Waiting((), _NO_SESSION, run))

    def counts(self) -> dict[str, int]:
        """The chunks that were tried, how many of them were hits, and how many would have been if
        every session had said when it is over."""
        return {
            "ends_asked": self.asked,
            "ends_hits": self.hits,
            "ends_hits_said": self.hits_with_ends,
        }

    def serve(self, setting: Setting = LRU_SETTING) -> bool:
        """Serve the oldest prompt if the window is too long, with this setting of the order. False:
        there was nothing to do."""
        if len(self._window) <= WINDOW and self._chunks <= min(WINDOW, self._came // 2):
            return False
        if setting != self._plain.setting:
            self._plain.settle(setting)
            self._told.settle(setting)
        run, session, exclusive = self._window.popleft()
        if session == _NO_SESSION:
            self._plain.cool(exclusive)
            self._told.cool(exclusive)
            return True
        self._chunks -= len(run)
        self._in_window[session] -= 1
        self.asked += len(run)
        self.hits += self._plain.serve(run)
        self.hits_with_ends += self._told.serve(run)
        if not self._in_window[session]:
            del self._in_window[session]
            self._told.cool(exclusive)
        return True
