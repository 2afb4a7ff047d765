"""Segments: an eviction order that remembers what left. One setting turns it from LRU into an order
that a scan cannot flush. Pure: only keys and their order.

The order is leaf-first. It gets that for free, because a run is moved from its end to its
beginning: the root is always the most recently used chunk of its run.

Two differences are easily missed. A prompt asked for a chunk (``used``), or the chunk was only
stored or let go (``ordered``). A chunk left to make room and may come back (``evicted``), or it is
unwanted (``discard``).

It has two lists: chunks that were used once, and chunks that came back. The second list may take a
part of the room. A chunk that left is remembered for a while (a ghost), so a chunk that is stored
again soon counts as one that came back. It is a segmented LRU (Karedla, Love, Wherry, *Caching
strategies to improve disk system performance*, IEEE Computer 27(3), 1994) with 2Q's A1out (Johnson
and Shasha, *2Q*, VLDB 1994).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey

_MOST_GHOSTS = 1 << 16
"""Most chunks that left and are remembered, at 250 bytes each."""
_TRIM_CHUNKS = 4
"""Keys moved at a time after a change of the setting, which may have to move thousands."""


class Setting(NamedTuple):
    """Preference of a :class:`Segments` for chunks that came back."""

    share: float
    """The part of the room for chunks that came back, 0 for LRU."""
    memory: float
    """Departures for which a chunk that left is remembered, as a multiple of the room."""

    @property
    def name(self) -> str:
        """Name in statistics: ``lru``, or the percentage and the multiple."""
        return f"keep{self.share * 100:.0f}_{self.memory:g}x" if self.share else "lru"


LRU_SETTING = Setting(0.0, 0.0)
SETTINGS = (LRU_SETTING, Setting(0.9, 4.0), Setting(0.9, 1.0), Setting(0.5, 2.0))
_LONGEST_MEMORY = max(setting.memory for setting in SETTINGS)


class Segments:
    """Order in which keys leave. Not thread-safe: the owner's lock guards it. Unknown keys are
    ignored. ``adapts``: whether :meth:`settle` is called, so that what left is remembered for as
    long as any setting wants it.

    OrderedDicts (key -> owner) and not dicts: taking the front of a dict walks over the places of
    all deleted keys (40 times slower at 100,000 keys)."""

    def __init__(
        self, room: int = 0, setting: Setting = LRU_SETTING, *, adapts: bool = False
    ) -> None:
        self.room, self.setting, self._adapts = room, setting, adapts
        self._once: OrderedDict[ChunkKey, int] = OrderedDict()
        self._again: OrderedDict[ChunkKey, int] = OrderedDict()
        """Chunks that came back, with their owners, coldest first."""
        self._ghosts: OrderedDict[ChunkKey, int] = OrderedDict()
        """Chunks that left, the oldest first, with the number of their departure."""
        self._left = 0
        self.evicts: list[Callable[[Sequence[ChunkKey]], object]] = []
        """Observers, called with the chunks that leave to make room."""
        self._weigh()

    def settle(self, setting: Setting) -> None:
        """Change the setting. Held and remembered chunks stay."""
        self.setting = setting
        self._weigh()

    def resize(self, room: int) -> None:
        """Set the capacity, in chunks."""
        self.room = room
        self._weigh()

    def cool(self, run: Sequence[ChunkKey]) -> None:
        """Let the run leave before all others, its end first."""
        for key in run:
            if key in self:
                owner = self.owner(key)
                self._drop(key)
                self._once[key] = owner
                self._once.move_to_end(key, last=False)

    def _drop(self, key: ChunkKey) -> None:
        if self._once.pop(key, None) is None:
            self._again.pop(key, None)

    def _weigh(self) -> None:
        self._protected = int(self.setting.share * self.room)
        self._known_for = int(self.setting.memory * self.room)
        longest = int(_LONGEST_MEMORY * self.room) if self._adapts else self._known_for
        self._most = min(_MOST_GHOSTS, longest)

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        """Add chunks of ``run``, which are held from now on, or still. Each becomes the hottest of
        its kind, the last one last, and belongs to ``owner``."""
        once, again, ghosts = self._once, self._again, self._ghosts
        for key in run:
            if key in again:
                again[key] = owner
                again.move_to_end(key)
                continue
            left = ghosts.pop(key, None)
            if left is not None and self._left - left < self._known_for and self._protected:
                once.pop(key, None)
                again[key] = owner
                self.trim()
                continue
            if key in once:  # a new key is the hottest without a move
                once.move_to_end(key)
            once[key] = owner

    def owner(self, key: ChunkKey) -> int:
        """Return the owner of ``key``, 0 also for an unknown key."""
        return self._once.get(key) or self._again.get(key, 0)

    def used(self, run: Sequence[ChunkKey]) -> None:
        """Note that a prompt asked for this run, first chunk first."""
        once, again, protected = self._once, self._again, self._protected
        before = len(again)
        for key in reversed(run):
            if key in again:
                again.move_to_end(key)
            elif key in once:
                if protected:
                    again[key] = once.pop(key)
                else:
                    once.move_to_end(key)
        self.trim(len(again) - before + _TRIM_CHUNKS)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        """Make the run hot again, its end coldest: it was stored, or a reader let go of it. That
        does not count as a use, because every prompt is stored in several steps."""
        once, again = self._once, self._again
        in_once, in_again = once.move_to_end, again.move_to_end
        for key in reversed(run):
            if key in once:
                in_once(key)
            elif key in again:
                in_again(key)
        if len(again) > self._protected:
            self.trim()

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        """Note that chunks of ``run`` left to make room, in this order, and remember them."""
        once, again, ghosts, left = self._once, self._again, self._ghosts, self._left
        for key in run:
            if once.pop(key, None) is None:
                again.pop(key, None)
            left += 1
            ghosts[key] = left
        self._left = left
        surplus = min(len(run), max(0, len(ghosts) - self._most))
        for key in list(islice(ghosts, surplus)):
            del ghosts[key]
        for tell in self.evicts:
            tell(run)

    def discard(self, key: ChunkKey) -> None:
        """Forget all about ``key``, which is unwanted or was lost."""
        self._drop(key)
        self._ghosts.pop(key, None)

    def keeps(self, key: ChunkKey) -> bool:
        """Return whether ``key`` is held, and came back often enough to stay longer."""
        return key in self._again

    def coldest(self) -> ChunkKey | None:
        """Return the key to let go first, or None. It stays known until evicted or discarded."""
        for key in self._once or self._again:
            return key
        return None

    def trim(self, most: int = _TRIM_CHUNKS) -> bool:
        """Move up to ``most`` chunks that have no room in the second list to the first one. Returns
        whether more are left."""
        surplus = len(self._again) - self._protected
        for _ in range(min(surplus, most)):
            key, owner = self._again.popitem(last=False)
            self._once[key] = owner
        return surplus > most

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[ChunkKey]:
        """Iterate over the keys, coldest first."""
        return chain(self._once, self._again)
