"""Misses: what happened to every chunk for which requests of one engine asked, counted once under
one reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvtier.api import KVStore
from kvtier.store.reports.miss_reasons import FirstChunks
from kvtier.store.reports.zero_hits import ZeroHits

logger = logging.getLogger("kvtier.connectors.vllm")

ZERO_HITS = "zero_hits"


class Misses:
    """Counts for vLLM's metrics, and a warning when nothing is ever hit. Called only by the thread
    of vLLM's scheduling loop.

    ``clock``: monotonic seconds.
    """

    def __init__(self, store: KVStore, clock: Callable[[], float]) -> None:
        self.first = FirstChunks()
        own, pool = store.status(), store.pool
        holds = f"the server's RAM holds {pool.slots:,} chunks" if pool else "the server is full"
        self._zero = (
            ZeroHits(holds, clock=clock) if own is None else ZeroHits.of(own, own.slots, clock)
        )
        self._asked = self._hits = self._saved = 0
        self._why: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """What :meth:`new` returns. Others count here too."""
        self._told = False
        """The last value of :data:`ZERO_HITS` that :meth:`new` returned."""

    def saved(self, chunks: int) -> None:
        self._saved += chunks

    def prompt(
        self,
        start: int,
        places: Sequence[str],
        declined: Mapping[str, int],
        missed: tuple[str, int],
    ) -> None:
        """A request got its blocks. From chunk ``start`` on there are loaded chunks (each with the
        place from which it came), then declined chunks by reason, then missing chunks by
        reason."""
        why, short = missed
        self.counts.update(f"loaded_{place}" for place in places)
        for kind, counts in (("declined", declined), ("missed", {why: short} if short > 0 else {})):
            for reason, count in counts.items():
                self.counts[f"{kind}_{reason}"] += count
                self._why[reason] += count if not start else 0
        self._hits += len(places)
        if not start:  # otherwise vLLM's own prefix cache has served its beginning: all is well
            self._asked += len(places) + sum(declined.values()) + max(0, short)
        self._check()

    def too_short(self) -> None:
        """A prompt without a whole chunk came."""
        self._asked += 1
        self._why["short"] += 1
        self._check()

    def new(self) -> dict[str, int]:
        """Since the last call: chunks as ``loaded_<place>``, ``declined_<reason>`` and
        ``missed_<reason>``, what others have counted, and :data:`ZERO_HITS` as 1 or 0 when it has
        changed."""
        counts = dict(self.counts)
        self.counts.clear()
        if bool(self._zero.verdict) != self._told:
            self._told = not self._told
            counts[ZERO_HITS] = int(self._told)
        return counts

    def _check(self) -> None:
        if self._zero.counted(self._asked, self._hits, self._saved, self._why):
            logger.warning("%s", self._zero.verdict)
