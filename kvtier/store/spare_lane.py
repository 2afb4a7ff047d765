"""SpareLane: a Store's lane without a tier. It makes the pool's pages present in the background,
and then does what is not urgent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvtier.core.lanes import Executor, Work
from kvtier.core.pool import Pool

if TYPE_CHECKING:
    from kvtier.store.directory import Directory


_POPULATE_BYTES = 32 << 20
_POPULATE_S = 5.0


class SpareLane:
    """``lane``: None where there is none, so nothing of this is done. Any thread may call."""

    def __init__(self, directory: Directory, pool: Pool, lane: Executor | None) -> None:
        self._directory, self._pool, self._lane = directory, pool, lane
        self.touched: Future[None] = Future()
        self.on_touched: Callable[[], object] = lambda: None
        """Called on the lane when every page is present."""

    def begin(self) -> None:
        if self._lane is not None:
            self._lane.submit(partial(self._populate, 0))

    def lend(self, lane: Executor | None) -> None:
        """Set the lane late. Pages are made when the slots get room."""
        self._lane = lane
        self.touched.set_result(None)

    def submit(self, work: Work) -> None:
        """Do this if the pages are present already."""
        if self._lane is not None and self.touched.done():
            self._lane.submit(work)

    def populate(self, slot: int) -> None:
        """On a thread that may block: make the pages of one more slot present."""
        if self._lane is not None:
            self._pool.populate(slot, 1)

    def end_populating(self) -> None:
        """Wait before the pool gets fewer slots: what :meth:`_populate` makes present afterwards
        would stay present, although its slots were given back."""
        if self._lane is not None:
            with suppress(CancelledError, TimeoutError):
                self.touched.result(_POPULATE_S)

    def close(self, timeout_s: float) -> bool:
        clean = self._lane is None or self._lane.close(timeout_s)
        self.touched.cancel()
        return clean

    def _populate(self, first: int) -> None:
        """On the lane. The next slots are new work, so that a close can come in between."""
        pool = self._pool
        count = min(max(1, _POPULATE_BYTES // pool.slot_bytes), pool.slots - first)
        pool.populate(first, count)
        if first + count < self._directory.slots.limit == pool.slots and self._lane is not None:
            self._lane.submit(partial(self._populate, first + count))
        elif self.touched.set_running_or_notify_cancel():
            self.touched.set_result(None)
            self.on_touched()
