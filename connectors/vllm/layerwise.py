"""A load whose chunks are still on their way: the layers are copied as they come, while the forward pass runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.connectors.vllm.metadata import Flow, Job
from kvtier.errors import TierError
from kvtier.gpu import Job as Copies
from kvtier.gpu import PagedBlocks
from kvtier.layerwise import CONFIRMED, await_parts
from kvtier.pool import Pool


class Flowing:
    """One job of one rank; its worker's thread. ``waited_s`` and ``copied_s`` tell where its time went.

    Every method raises TierError when a chunk fails or does not come in time: then the blocks hold garbage.
    """

    def __init__(self, job: Job, flow: Flow, pool: Pool, paged: PagedBlocks, copies: Sequence[Copies]) -> None:
        self.job = job
        self.waited_s = self.copied_s = 0.0
        self._flow, self._pool, self._paged, self._copies = flow, pool, paged, copies
        self._parts = 0
        """Copied so far."""

    def advance(self, regions: int) -> None:
        """Return when the first ``regions`` regions are in the blocks."""
        ends = self._flow.regions
        while self._parts < len(ends) and (ends[self._parts - 1] if self._parts else 0) < regions:
            self._await(self._parts + 1)
            begun = time.perf_counter()
            self._paged.load(self._copies, range(ends[self._parts - 1] if self._parts else 0, ends[self._parts]))
            self.copied_s += time.perf_counter() - begun
            self._parts += 1

    def confirm(self) -> None:
        """After the forward pass: return when all layers are in the blocks (a draft model's are asked for later) and
        everything is known to be right."""
        if not self._parts:
            raise TierError("the forward pass did not ask for its layers")
        self.advance(self._flow.regions[-1])
        self._await(CONFIRMED)

    def _await(self, parts: int) -> None:
        begun = time.perf_counter()
        for slot, filling in zip(self.job.slots, self._flow.fillings, strict=True):
            if filling:
                await_parts(self._pool, slot, filling, parts, self._flow.until)
        self.waited_s += time.perf_counter() - begun
