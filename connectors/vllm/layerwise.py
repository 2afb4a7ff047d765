"""Loads that go on while the forward pass runs: what it has to wait for when it comes to a layer, and afterwards.

:class:`Flowing`, on a CPU device: chunks that are on their way from a lower tier are copied as they come.
:class:`Ahead`, on a GPU: all is in RAM, and the device brings it layer by layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kvtier.connectors.vllm.metadata import Flow, Job
from kvtier.core.errors import TierError
from kvtier.core.pool import Pool
from kvtier.gpu import Copy, PagedBlocks
from kvtier.gpu import Job as Copies
from kvtier.store.layerwise import CONFIRMED, await_parts, cut

_AHEAD_PARTS = 4
"""Every part of every chunk is a DMA and a kernel that the host has to queue before the forward pass begins: with 4,
three quarters of a load can be hidden for about the queueing that whole chunks take."""


def asks_for_layers(forward_context: Any) -> bool:
    """Whether vLLM's forward pass will call ``wait_for_layer_load``: there is one, and not as one CUDA graph, which
    calls nobody. (A graph is meant for decoding; prompts with a hit are computed in pieces, between which it calls.)"""
    mode = getattr(getattr(forward_context, "cudagraph_runtime_mode", None), "name", "FULL")
    return mode != "FULL" and getattr(forward_context, "attn_metadata", None) is not None


def ahead_ends(paged: PagedBlocks) -> tuple[int, ...]:
    """Where :meth:`PagedBlocks.load_ahead` cuts chunks; empty where it cannot, or where one part would be all."""
    if not paged.runs_ahead:
        return ()
    ends = list(accumulate(row * paged.blocks_per_chunk for row in paged.describe()["row_bytes"]))
    _, parts = cut(ends, 1, ends[-1], _AHEAD_PARTS)
    return parts if len(parts) > 1 else ()


class Ahead:
    """One job of one rank that the device works on while the forward pass runs; its worker's thread."""

    def __init__(self, job: Job, copy: Copy) -> None:
        self.job, self.copy = job, copy
        self._asked = False

    def advance(self, regions: int) -> None:
        """What the device does from now on finds the first ``regions`` regions in the blocks."""
        self.copy.need(regions)
        self._asked = True

    def confirm(self, regions: int) -> None:
        """After the forward pass; ``regions`` are all (a draft model's are asked for later). Raises TierError when the
        pass asked for none: it ran over garbage. Then the copy is through."""
        if self._asked:
            self.copy.need(regions)
            return
        self.copy.wait()
        raise TierError("the forward pass did not ask for its layers")


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
