"""Misses: each chunk that requests of one engine asked for, counted once under one reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.connectors.vllm.extension import Extension, Tools
from kvtier.connectors.vllm.groups import Piece
from kvtier.connectors.vllm.scheduler_side.hit_table import longest_hit
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.connectors.vllm.stats import ZERO_HITS
from kvtier.core.chunk import ChunkKey
from kvtier.store.reports.miss_reasons import FirstChunks
from kvtier.store.reports.zero_hits import ZeroHits

logger = logging.getLogger("kvtier.connectors.vllm")


class Misses(Extension):
    def __init__(self, tools: Tools) -> None:
        self._layout, self._geometry = tools.layout, tools.geometry
        store, clock = tools.store, tools.load_policy.clock
        self._first = FirstChunks()
        own, pool = store.status(), store.pool
        holds = f"the server's RAM holds {pool.slots:,} chunks" if pool else "the server is full"
        self._zero = (
            ZeroHits(holds, clock=clock) if own is None else ZeroHits.of(own, own.slots, clock)
        )
        self._asked = self._hits = self._saved = 0
        self._why: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._warned = False
        """Whether chunks in another size were warned of."""
        self._told = False
        """Last value of :data:`ZERO_HITS` that :meth:`counts` returned."""

    def allocated(self, prompt: Prompt, blocks: Any, tokens: int) -> bool:
        if prompt.chain is None and not prompt.lasts and self not in prompt.notes:
            prompt.notes[self] = True
            count = self._pieces(longest_hit(self._geometry, prompt.request.num_tokens))
            self._count(0, (), {}, ("unnamed", count))
        return False

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        """Count every piece of the anchors from ``prompt.claim.begin`` on."""
        request, claim, geometry = prompt.request, prompt.claim, self._geometry
        size = geometry.chunk_tokens
        if request.num_tokens < size:
            self._too_short()
            return
        last = longest_hit(geometry, request.num_tokens)
        had = geometry.first(claim.begin) * len(geometry.anchors)
        asked, known = (
            self._pieces(last) - had,
            max(0, self._pieces(claim.begin + tokens) - had) if tokens else 0,
        )
        declined_pieces = sum(claim.declined.values())
        missed, why = asked - known - declined_pieces, claim.why or "tier_down"
        if why == "cold" and not prompt.lasts:
            why = "unnamed"
        if why == "cold" and not claim.begin + len(places) + declined_pieces:
            why = self._first.differs(self._content(prompt), prompt.extras) or why
        if why == "other_chunk_size" and not self._warned:
            self._warned = True
            logger.warning(
                "other chunk size: this engine's chunks have %d tokens, and other engines have "
                "saved this model's in chunks of another size, which are misses here. Give all "
                "engines of a model the same chunk_tokens, or none",
                size,
            )
        self._count(geometry.first(claim.begin), places, claim.declined, (why, missed))

    def saving(
        self, prompt: Prompt, saved: int, computed: int, pieces: Mapping[ChunkKey, Piece]
    ) -> None:
        if not saved and computed:
            self._first.saved(self._content(prompt), prompt.extras)

    def _content(self, prompt: Prompt) -> bytes:
        """Return the key of the first chunk's tokens, whatever else names it."""
        if prompt.is_plain and prompt.chain is not None:
            return prompt.chain.keys[0]
        return self._layout.keys(prompt.request.all_token_ids[: self._layout.chunk_tokens])[0]

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        if job.save is not None and not job.failed and not job.dropped:
            self._saved += len(job.keys)

    def _pieces(self, tokens: int) -> int:
        return -(-tokens // self._geometry.piece_tokens) * len(self._geometry.anchors)

    def _count(
        self,
        start: int,
        places: Sequence[str],
        declined: Mapping[str, int],
        missed: tuple[str, int],
    ) -> None:
        """Count from chunk ``start`` on: loaded ones by ``places``, then declined, then missing."""
        why, short = missed
        if places:
            self._counts.update(f"loaded_{place}" for place in places)
        for kind, counts in (("declined", declined), ("missed", {why: short} if short > 0 else {})):
            for reason, count in counts.items():
                self._counts[f"{kind}_{reason}"] += count
                self._why[reason] += count if not start else 0
        self._hits += len(places)
        if not start:  # otherwise vLLM's own prefix cache has served its beginning: all is well
            self._asked += len(places) + sum(declined.values()) + max(0, short)

    def _too_short(self) -> None:
        self._asked += 1
        self._why["short"] += 1

    def counts(self) -> dict[str, int]:
        """Return chunks since the last call as ``loaded_<place>``, ``declined_<reason>`` and
        ``missed_<reason>``, and :data:`ZERO_HITS` as 1 or 0 when it has changed."""
        counts: dict[str, int] = {}
        if self._counts:
            counts, self._counts = self._counts, Counter()
        if self._zero.counted(self._asked, self._hits, self._saved, self._why):
            logger.warning("%s", self._zero.verdict)
        if bool(self._zero.verdict) != self._told:
            self._told = not self._told
            counts[ZERO_HITS] = int(self._told)
        return counts
