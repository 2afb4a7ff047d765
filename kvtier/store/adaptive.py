"""Adaptive: a RAM order of leaving that changes its setting when another one would hit more (``policy: auto``).

The live order is the Directory's, guarded by the Store's lock. The shadows run on a lane thread without the lock, and
let go of the interpreter after each of them: whoever waits for it waits for one prompt in one shadow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvtier.core.chunk import ChunkKey
from kvtier.store.segments import Segments
from kvtier.store.shadows import Shadows

_MOST_WAITING = 256
_AT_ONCE = 8
_MOST_RECENT = 8


class Adaptive:
    """Called as a policy's maker it gives the one live order.

    :meth:`note` is called by any thread, :meth:`work` by one thread at a time.
    """

    def __init__(self) -> None:
        self.live = Segments(0)
        self.shadows = Shadows(0)
        self.dropped = 0
        """Prompts that came faster than the shadows could follow, or before a lane was free; never many wait."""
        self._waiting: deque[Sequence[ChunkKey]] = deque()
        self._recent: deque[ChunkKey] = deque(maxlen=_MOST_RECENT)

    def __call__(self, room: int) -> Segments:
        self.live = Segments(room)
        self.shadows = Shadows(room)
        return self.live

    def note(self, run: Sequence[ChunkKey]) -> bool:
        """A prompt asked for this run. True: :meth:`work` should be called, soon and elsewhere."""
        if not run or run[-1] in self._recent:  # a prompt that waits for a tier asks again
            return bool(self._waiting)
        if len(self._waiting) >= _MOST_WAITING:
            self.dropped += 1
            return True
        self._recent.append(run[-1])
        self._waiting.append(tuple(run))
        return True

    def work(self, lock: AbstractContextManager[object], pause: Callable[[], object]) -> bool:
        """Without the lock: follow some prompts; ``pause`` is called often. True: more are waiting."""
        for _ in range(_AT_ONCE):
            try:
                run = self._waiting.popleft()
            except IndexError:
                return False
            self._follow(run, lock, pause)
        return bool(self._waiting)

    def _follow(
        self, run: Sequence[ChunkKey], lock: AbstractContextManager[object], pause: Callable[[], object]
    ) -> None:
        shadows = self.shadows
        if shadows.room != self.live.room:
            shadows.resize(self.live.room)
        before = shadows.now
        for _ in shadows.seeing(run):
            pause()
        if shadows.now != before:
            with lock:
                self.live.settle(shadows.settings[shadows.now])

    def counts(self) -> dict[str, int]:
        """Which setting rules, and what each of them hit of what its shadow was asked for; in chunks, but
        ``policy_now``, the setting's number, and ``policy_dropped``, in prompts."""
        shadows = self.shadows
        hits = {f"policy_hits_{each.name}": hits for each, hits in zip(shadows.settings, shadows.hits, strict=True)}
        return {"policy_asked": shadows.asked, **hits, "policy_now": shadows.now, "policy_dropped": self.dropped}
