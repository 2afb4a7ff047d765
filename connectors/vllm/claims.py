"""What a waiting request has claimed of the store, and how much of it vLLM may be promised. One
thread; no waits.

A promise cannot be made smaller, so nothing is promised that is not in RAM, verified and pinned.
While chunks are on their way up vLLM is told to ask again, until a deadline; then what is there
counts.

Where a hit may end is a table, :class:`kvtier.load_policy.choose.HitEnd`. LoadPolicy says which row
of it is loaded, and everything longer is declined. With full attention alone every leading part of
a run serves. With other groups a hit ends where all of them have what they need, so each row is a
run of its own, which is loaded whole or not at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.client.client import Client
from kvtier.client.leases import SharedLoad
from kvtier.connectors.vllm.groups import Geometry, Kind, Run
from kvtier.connectors.vllm.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import LookupResult
from kvtier.load_policy.choose import HitEnd, LoadPlan
from kvtier.load_policy.decide import LoadPolicy
from kvtier.protocol.wire import Reason
from kvtier.store.lease import LoadLease
from kvtier.store.store import Store


class _WholeHit(NamedTuple):
    """A hit that is loaded whole or not at all."""

    run: Run
    result: LookupResult

    @property
    def is_ready(self) -> bool:
        return self.result.ready == len(self.run.pieces)

    @property
    def is_known(self) -> bool:
        """Nobody has to be asked for a part of it."""
        return self.result.known == len(self.run.pieces)


class Claims:
    """``prompts``: all live requests by name. ``load_policy`` says what of a hit is taken."""

    def __init__(
        self,
        store: Store | Client,
        geometry: Geometry,
        load_policy: LoadPolicy,
        prompts: Mapping[str, Prompt],
    ) -> None:
        self._store, self._geometry, self._load_policy, self._prompts = (
            store,
            geometry,
            load_policy,
            prompts,
        )

    def promise(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, *, busy: bool
    ) -> int | None:
        """Tokens beyond the first ``computed`` that are there for the request; None: ask again.
        ``keys``: of its chunks. ``busy``: the engine computes for others."""
        if prompt.begin != computed:
            prompt.missing.clear()
            prompt.seen, prompt.ready_only = None, False
        prompt.begin, prompt.looked = computed, True
        end = (
            self._promise_part(prompt, keys, busy)
            if self._geometry.is_gradual
            else self._promise_whole(prompt, keys, busy)
        )
        return None if end is None else max(0, end - computed)

    # ---- full attention alone --------------------------------------------------------------------

    def _promise_part(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> int | None:
        """Tokens the request has with what is there; None: ask again."""
        last = self._geometry.last_end(prompt.request.num_tokens)
        run = self._geometry.run(keys, prompt.begin, last)
        lease = self._claim_part(prompt, run, busy)
        if lease is None:
            return None
        ready, coming = lease.poll()
        if coming and self._load_policy.clock() < prompt.until:
            return None
        if coming or ready < prompt.taken:
            ready = self._cut(prompt, run, ready, coming)
        return self._end_of(prompt, run, ready)

    def _end_of(self, prompt: Prompt, run: Run, pieces: int) -> int:
        """Tokens there are with so many leading pieces of the run. At least one token must be left
        to compute; whole blocks, like vLLM's own prefix cache."""
        return min(self._geometry.tokens(self._geometry.first(prompt.begin), pieces), run.end)

    def _claim_part(self, prompt: Prompt, run: Run, busy: bool) -> LoadLease | SharedLoad | None:
        """The request's lease; a new one when the old one starts elsewhere or the store has learnt
        of more since. None: there is no room for it now."""
        lease, result = prompt.lease, None
        if lease is not None and prompt.run is not None and prompt.run.start == run.start:
            ready, coming = lease.poll()
            if coming:
                return lease
            result = self._store.lookup(run.wanted)
            learned = result.ready > ready or result.known > prompt.known
            prompt.why, prompt.known = result.why, result.known
            if not learned:
                return lease
        prompt.drop()
        return self._load_or_decline(prompt, run, result or self._store.lookup(run.wanted), busy)

    def _load_or_decline(
        self, prompt: Prompt, run: Run, result: LookupResult, busy: bool
    ) -> LoadLease | SharedLoad | None:
        """Claim the part of a run that is worth it, and no more: what is claimed starts to move."""
        pieces, ends = self._ends_of_parts(prompt, run, result)
        plan = self._load_policy.choose(ends, prompt.begin, busy=busy)
        taken = 0 if plan.row is None else pieces[plan.row]
        most = len(run.wanted) if plan.ask else taken
        if not self._has_room(prompt, most):
            return None
        lease = self._take(prompt, run, result, most, plan)
        prompt.taken = taken
        if taken < result.known:
            self._decline(prompt, run.wanted[taken : result.known], "slower")
        elif result.asking and not plan.ask:
            self._decline(prompt, run.wanted[result.known :], "unasked")
        return lease

    def _ends_of_parts(
        self, prompt: Prompt, run: Run, result: LookupResult
    ) -> tuple[list[int], list[HitEnd]]:
        """The table of a run of which every leading part serves, and the pieces of each row.

        There is a row for each step of the lookup. Between two steps waiting grows evenly while
        what a piece saves grows with its depth, so the best end is a step's.
        """

        def saved(count: int) -> int:
            return max(0, self._end_of(prompt, run, count) - prompt.begin)

        steps = [result.steps[0]]
        steps += (step for last, step in pairwise(result.steps) if step[0] > last[0])
        ends = [HitEnd(saved(count), wait_s) for count, wait_s in steps]
        if result.asking is not None:
            asked = saved(len(run.wanted))
            ends.append(HitEnd(asked, result.asking.arrive_s, result.asking))
        return [count for count, _ in steps], ends

    def _cut(self, prompt: Prompt, run: Run, ready: int, coming: int) -> int:
        """Do with what is ready: the rest is not coming in time (``coming``), or not at all:
        refused, or lost after it was seen. Returns how many pieces the request has now; none when a
        server does not answer."""
        held = 0 if prompt.why == "tier_down" else min(prompt.taken, prompt.known)
        wanted = max(prompt.taken, ready + coming) if coming else held
        if coming:
            lease = self._store.load(run.keys, run.start, most=ready, session=prompt.said.session)
            ready = lease.poll().ready
            prompt.drop()
            prompt.lease = lease
        prompt.taken = ready
        self._decline(prompt, run.wanted[ready:wanted], "deadline" if coming else "refused")
        return ready

    # ---- windows and states ----------------------------------------------------------------------

    def _promise_whole(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> int | None:
        """Tokens the request has with what is there; None: ask again."""
        while True:
            if prompt.lease is None or prompt.run is None or prompt.lease_begin != prompt.begin:
                prompt.drop()
                claimed = self._claim_whole(prompt, keys, busy)
                if claimed is None or not claimed:
                    return None if claimed is None else 0
            assert prompt.lease is not None
            assert prompt.run is not None
            ready, coming = prompt.lease.poll()
            if ready == len(prompt.run.pieces):
                return prompt.run.end
            late = bool(coming) and self._load_policy.clock() >= prompt.until
            if coming and not late:
                return None
            prompt.missing.add(prompt.run.end)
            missed = prompt.run.wanted[ready : ready + coming] if late else ()
            prompt.drop()
            if late:
                self._decline(prompt, missed, "deadline")
                prompt.ready_only = True

    def _claim_whole(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> bool | None:
        """Claim the run that is worth it most. False: there is none, or nothing has changed since
        there was none; None: there is no room for it now."""
        geometry = self._geometry
        most = min(geometry.last_end(prompt.request.num_tokens), len(keys) * geometry.chunk_tokens)
        if most <= prompt.begin:
            return False
        longest = self._look_up_whole(prompt, keys, most)
        result = longest.result
        prompt.why = result.why
        seen = (
            result.ready,
            result.known,
            result.asking is not None,
            len(prompt.missing),
            prompt.ready_only,
        )
        if seen == prompt.seen:
            return False
        hits = self._whole_hits(prompt, keys, longest)
        plan = self._plan_whole(prompt, hits, busy)
        row = len(hits) - 1 if plan.ask else plan.row
        hit = None if row is None else hits[row]
        if hit is None:
            prompt.seen = seen
        elif not self._has_room(prompt, len(hit.run.pieces)):
            return None
        else:
            self._take_whole(prompt, hit, plan)
        if not prompt.ready_only:
            self._decline_longer(prompt, hits, plan)
        return hit is not None

    def _plan_whole(self, prompt: Prompt, hits: Sequence[_WholeHit | None], busy: bool) -> LoadPlan:
        if prompt.ready_only:
            return LoadPlan(0, ask=False, within_s=0.0)
        ends = [self._end_of_whole(prompt, hit) for hit in hits]
        return self._load_policy.choose(ends, prompt.begin, busy=busy)

    def _end_of_whole(self, prompt: Prompt, hit: _WholeHit | None) -> HitEnd:
        """The row of the table."""
        if hit is None:
            return HitEnd(0, 0.0)
        tokens, asking = hit.run.end - prompt.begin, hit.result.asking
        if asking is None or hit.is_known:
            return HitEnd(tokens, hit.result.steps[-1][1])
        return HitEnd(tokens, asking.arrive_s, asking)

    def _whole_hits(
        self, prompt: Prompt, keys: Sequence[ChunkKey], longest: _WholeHit
    ) -> list[_WholeHit | None]:
        """What the rows of the table stand for, the shortest first.

        The first is the longest hit that is all in RAM; None where there is none. Then comes the
        longest one for each tier that the anchors are in, and last the longest one that a shared
        tier has to be asked for.
        """
        steps = self._known_tokens(prompt, keys, longest.result)
        found, asked = list[_WholeHit | None](), list[_WholeHit | None]()
        ready: _WholeHit | None = None
        lowest = len(steps) + 1
        for end in self._geometry.ends(longest.run.end, steps[-1], prompt.begin):
            step = bisect_left(steps, end)
            if end in prompt.missing or (step and step >= lowest):
                continue
            hit = longest if end == longest.run.end else self._hit_at(prompt, keys, end)
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

    def _hit_at(self, prompt: Prompt, keys: Sequence[ChunkKey], end: int) -> _WholeHit | None:
        """The hit that ends after so many tokens; None where it lacks something that nobody can be
        asked for."""
        geometry = self._geometry
        behind = [geometry.key(piece, keys) for piece in geometry.behind(end, prompt.begin)]
        if behind:
            result = self._store.lookup(behind)
            if result.known < len(behind) and result.asking is None:
                return None
        return self._look_up_whole(prompt, keys, end)

    def _look_up_whole(self, prompt: Prompt, keys: Sequence[ChunkKey], end: int) -> _WholeHit:
        run = self._geometry.run(keys, prompt.begin, end)
        return _WholeHit(run, self._store.lookup(run.wanted))

    def _known_tokens(
        self, prompt: Prompt, keys: Sequence[ChunkKey], result: LookupResult
    ) -> list[int]:
        """Tokens of whose chunks the anchors have all pieces, in whole chunks: those in RAM, then
        at each step of the lookup. ``result``: of the longest run."""
        geometry, first = self._geometry, self._geometry.first(prompt.begin)
        if geometry.anchors[0].kind is not Kind.FULL:  # of the run only its end is needed
            result = self._store.lookup(
                [geometry.key(one, keys) for one in geometry.trunk(first, len(keys))]
            )
        size = geometry.chunk_tokens
        return [geometry.tokens(first, count) // size * size for count, _ in result.steps]

    def _take_whole(self, prompt: Prompt, hit: _WholeHit, plan: LoadPlan) -> None:
        until = prompt.until if prompt.missing else math.inf
        self._take(prompt, hit.run, hit.result, len(hit.run.pieces), plan)
        prompt.until = min(prompt.until, until)

    def _decline_longer(
        self, prompt: Prompt, hits: Sequence[_WholeHit | None], plan: LoadPlan
    ) -> None:
        """Longer hits than the one that is loaded are slower than computing."""
        first = 0 if plan.row is None else plan.row + 1
        for hit in hits[first:]:
            if hit is not None and hit.is_known:
                self._decline(prompt, hit.run.wanted[-1:], "slower")

    # ---- both ------------------------------------------------------------------------------------

    def _take(
        self, prompt: Prompt, run: Run, result: LookupResult, most: int, plan: LoadPlan
    ) -> LoadLease | SharedLoad:
        """Claim ``most`` pieces of the run."""
        prompt.lease = self._store.load(run.keys, run.start, most=most, session=prompt.said.session)
        prompt.lease_begin, prompt.run = prompt.begin, run
        prompt.known, prompt.why, prompt.declined = result.known, result.why, {}
        prompt.until = self._load_policy.clock() + plan.within_s
        return prompt.lease

    def _has_room(self, prompt: Prompt, pieces: int) -> bool:
        """vLLM asks for its whole queue at each step. Requests that wait may claim half of RAM
        together, so that there are slots for what running ones save. Whoever vLLM asks for first
        may always claim."""
        pool = self._store.pool
        if pool is None or prompt.first or not pieces:
            return True
        claimed = sum(
            len(other.lease.keys) for other in self._prompts.values() if other.lease is not None
        )
        return claimed + pieces <= pool.slots // 2

    def _decline(self, prompt: Prompt, keys: Sequence[ChunkKey], reason: Reason) -> None:
        if keys:
            prompt.declined[reason] = prompt.declined.get(reason, 0) + len(keys)
            self._store.decline(keys, reason)
