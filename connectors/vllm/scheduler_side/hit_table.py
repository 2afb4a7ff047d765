"""Hit table: where the hit of a prompt may end. LoadPolicy chooses one of its rows. Looks into the
store's memory and claims nothing.

With full attention alone every leading part of a run serves. With other groups a hit ends where all
of them have what they need, so each row is a run of its own, which is loaded whole or not at
all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.api import KVStore
from kvtier.connectors.vllm.groups import Geometry, Kind, Run
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import LookupResult
from kvtier.load_policy.choose import HitEnd


def longest_hit(geometry: Geometry, tokens: int) -> int:
    """Return the tokens of the longest hit that a prompt may have, 0 without a whole chunk."""
    size = geometry.chunk_tokens
    return min(geometry.last_end(tokens), tokens // size * size)


# ---- full attention alone ------------------------------------------------------------------------


def tokens_with(geometry: Geometry, begin: int, run: Run, pieces: int) -> int:
    """Return the tokens up to the end of a run's first ``pieces`` pieces, in whole blocks. One
    token at least is left to compute."""
    return min(geometry.tokens(geometry.first(begin), pieces), run.end)


def ends_of_parts(
    geometry: Geometry, begin: int, run: Run, result: LookupResult
) -> tuple[list[int], list[HitEnd]]:
    """Return the pieces of each row, and the rows, one for each step of the lookup. Between two
    steps waiting grows evenly, and what a piece saves with its depth: the best end is a step's."""

    def saved(pieces: int) -> int:
        return max(0, tokens_with(geometry, begin, run, pieces) - begin)

    steps = [result.steps[0]]
    steps += (step for last, step in pairwise(result.steps) if step[0] > last[0])
    ends = [HitEnd(saved(pieces), wait_s) for pieces, wait_s in steps]
    if result.asking is not None:
        ends.append(HitEnd(saved(len(run.wanted)), result.asking.arrive_s, result.asking))
    return [pieces for pieces, _ in steps], ends


# ---- windows and states --------------------------------------------------------------------------


class WholeHit(NamedTuple):
    run: Run
    result: LookupResult

    @property
    def is_ready(self) -> bool:
        return self.result.ready == self.run.length

    @property
    def is_known(self) -> bool:
        """Whether no shared tier has to be asked for a part of it."""
        return self.result.known == self.run.length

    def end(self, begin: int) -> HitEnd:
        tokens, asking = self.run.end - begin, self.result.asking
        if asking is None:
            return HitEnd(tokens, self.result.steps[-1][1])
        return HitEnd(tokens, asking.arrive_s, asking)


class WholeHits:
    """Whole hits of a prompt. ``begin``: tokens of it that vLLM has by itself."""

    def __init__(
        self, store: KVStore, geometry: Geometry, keys: Sequence[ChunkKey], begin: int
    ) -> None:
        self._store, self._geometry, self._keys, self._begin = store, geometry, keys, begin
        self.known = 0
        """Tokens of chunks of which the anchors have all pieces, once :meth:`rows` has looked."""

    def run(self, end: int) -> Run:
        return self._geometry.run(self._keys, self._begin, end)

    def of(self, run: Run) -> WholeHit:
        return WholeHit(run, self._store.lookup(run.wanted))

    def rows(self, longest: WholeHit, missing: Container[int]) -> list[WholeHit | None]:
        """Return the longest hit that is all in RAM (or None), the longest one for each tier that
        the anchors are in, and the longest one that a shared tier has to be asked for. ``missing``:
        ends that turned out not to be there."""
        if longest.is_ready and longest.run.end not in missing:
            return [longest]
        steps = self._known_tokens(longest.result)
        self.known = steps[-1]
        ready: WholeHit | None = None
        found, asked = list[WholeHit | None](), list[WholeHit | None]()
        lowest = len(steps) + 1
        for end in self._geometry.ends(longest.run.end, steps[-1], self._begin):
            step = bisect_left(steps, end)
            if end in missing or (step and step >= lowest):
                continue
            hit = longest if end == longest.run.end else self._possible(end)
            if hit is None:
                continue
            if hit.is_ready:
                ready = hit
                break
            if hit.is_known:
                found, lowest = [hit, *found], step
            elif hit.result.asking is not None and not found and not asked:
                asked = [hit]
        return [ready, *found, *asked]

    def _possible(self, end: int) -> WholeHit | None:
        """Return a hit, or None if a piece behind its end is nowhere, nor can be asked for."""
        geometry, keys = self._geometry, self._keys
        behind = geometry.behind_keys(keys, end, self._begin)
        if behind:
            result = self._store.lookup(behind)
            if result.known < len(behind) and result.asking is None:
                return None
        return self.of(self.run(end))

    def _known_tokens(self, result: LookupResult) -> list[int]:
        """Return the tokens in chunks of which the anchors have all pieces: in RAM, then at each
        step of the lookup."""
        geometry, keys = self._geometry, self._keys
        first, size = geometry.first(self._begin), geometry.chunk_tokens
        if geometry.anchors[0].kind is not Kind.FULL:  # of the run only its end is needed
            trunk = geometry.trunk(first, len(keys))
            result = self._store.lookup([geometry.key(piece, keys) for piece in trunk])
        return [geometry.tokens(first, pieces) // size * size for pieces, _ in result.steps]
