"""UsesSince: what was used or saved between a hint and the work on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.store.observer import Observer


class UsesSince(Observer):
    """Which chunks were used or saved after a hint came and before it was followed.

    Hints are followed in the order in which they came. Every method is called under the Store's
    lock. ``most``: how many chunks are remembered.
    """

    __slots__ = ("_came", "_followed", "_last_use", "_lost", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._last_use: dict[ChunkKey, int] = {}
        """The number of the newest hint when the chunk was used last."""
        self._came = self._followed = 0
        """Numbers of the newest hint, and of the last one that was followed."""
        self._lost = 0
        """The newest hint for which too many chunks were used to remember them."""

    def hinted(self) -> int:
        """A hint came: its number."""
        self._came += 1
        return self._came

    def used(self, run: Sequence[ChunkKey]) -> None:
        """A prompt used or saved this run."""
        if self._followed == self._came:
            return
        self._last_use.update(dict.fromkeys(run, self._came))
        if len(self._last_use) > self._most:
            self._last_use.clear()
            self._lost = self._came

    def stored(self, run: Sequence[ChunkKey]) -> None:
        self.used(run)

    def unused(self, run: Sequence[ChunkKey], hint: int) -> list[ChunkKey]:
        """The chunks of ``run`` that were not used since this hint. None where that was not
        remembered."""
        if hint <= self._lost:
            return []
        return [key for key in run if self._last_use.get(key, 0) < hint]

    def followed(self, hint: int) -> None:
        """This hint needs nothing any more."""
        self._followed = hint
        if hint == self._came:
            self._last_use.clear()
