"""Claims of waiting requests on the store, and how much of one vLLM may be promised. One
thread. No waits.

A promise cannot be made smaller, so nothing is promised that is not in RAM, verified and pinned.
While chunks are on their way up vLLM is told to ask again, until a deadline. Then what is there
counts.

:mod:`.hit_table` says where the hit may end, and LoadPolicy which of these ends is loaded.
Everything longer is declined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

from kvtier.api import Asker, KVStore, LoadLease
from kvtier.connectors.vllm.groups import Geometry, Run
from kvtier.connectors.vllm.scheduler_side.hit_table import (
    WholeHit,
    WholeHits,
    ends_of_parts,
    longest_hit,
    tokens_with,
)
from kvtier.connectors.vllm.scheduler_side.partial_tails import PartialTails
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt, RequestClaim, TriedEnds
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import LookupResult
from kvtier.load_policy.choose import HitEnd, LoadPlan
from kvtier.load_policy.decide import LoadPolicy
from kvtier.protocol.wire import Reason

_NOTHING = LoadPlan(None, ask=False, within_s=0.0)


class Claims:
    def __init__(
        self,
        store: KVStore,
        geometry: Geometry,
        load_policy: LoadPolicy,
        tails: PartialTails,
    ) -> None:
        self._store = store
        self._tails = tails
        self._geometry = geometry
        self._load_policy = load_policy
        self._held = dict[str, RequestClaim]()
        """Request -> its claim, which may have slots."""

    def promise(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, *, busy: bool, first: bool
    ) -> int | None:
        """Return the tokens beyond the first ``computed`` that are there for the request, or None
        to ask again. ``busy``: the engine computes for others. ``first``: vLLM has asked for no
        other request in this step."""
        claim = prompt.claim
        if claim.begin != computed:
            claim.tried = TriedEnds()
        claim.begin, claim.was_looked_up, claim.asked_first = computed, True, first
        end = (
            self._promise_part(prompt, keys, busy)
            if self._geometry.is_gradual
            else self._promise_whole(prompt, keys, busy)
        )
        return None if end is None else max(0, end - computed)

    # ---- full attention alone --------------------------------------------------------------------

    def _promise_part(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> int | None:
        claim = prompt.claim
        last = longest_hit(self._geometry, prompt.request.num_tokens)
        run = self._geometry.run(keys, claim.begin, last)
        lease = self._claim_part(prompt, run, busy)
        if lease is None:
            return None
        ready, coming = lease.poll()
        if coming and not self._is_late(prompt, ready):
            return None
        if coming or ready < claim.taken_pieces:
            ready = self._cut(prompt, run, ready, coming)
        return tokens_with(self._geometry, claim.begin, run, ready)

    def _claim_part(self, prompt: Prompt, run: Run, busy: bool) -> LoadLease | None:
        """Return the lease, or a new one when it starts elsewhere or the store has learnt of more
        since. None if there is no room for it now."""
        claim = prompt.claim
        lease, result = claim.lease, None
        if lease is not None and claim.run is not None and claim.run.start == run.start:
            ready, coming = lease.poll()
            if coming:
                return lease
            result = self._store.lookup(run.wanted)
            learned = result.ready > ready or result.known > claim.known_pieces
            claim.why, claim.known_pieces = result.why, result.known
            if not learned:
                return lease
        claim.drop()
        if result is None:
            unknown = self._store.load_unknown(run.keys, run.start, asker=asker(prompt))
            if unknown is not None:
                self._take(prompt, run, unknown[0], _NOTHING, unknown[1])
                claim.taken_pieces = 0
                return unknown[1]
            if run.end > claim.begin and self._claim_ready(prompt, run, busy):
                claim.taken_pieces = run.length
                return claim.lease
            result = self._store.lookup(run.wanted)
        return self._load_or_decline(prompt, run, result, busy)

    def _load_or_decline(
        self, prompt: Prompt, run: Run, result: LookupResult, busy: bool
    ) -> LoadLease | None:
        """Claim only the part that is worth it, because claimed chunks start to move."""
        claim, plan, taken = prompt.claim, _NOTHING, 0
        if result.known or result.asking is not None:
            pieces, ends = ends_of_parts(self._geometry, claim.begin, run, result)
            plan = self._load_policy.choose(ends, claim.begin, busy=busy)
            taken = 0 if plan.row is None else pieces[plan.row]
        most = len(run.wanted) if plan.ask else taken
        if not self._has_room(prompt, most):
            return None
        lease = self._store.load(run.keys, run.start, most=most, asker=asker(prompt))
        self._take(prompt, run, result, plan, lease)
        claim.taken_pieces = taken
        if taken < result.known:
            decline(self._store, prompt, run.wanted[taken : result.known], "slower")
        elif result.asking and not plan.ask:
            decline(self._store, prompt, run.wanted[result.known :], "unasked")
        return lease

    def _cut(self, prompt: Prompt, run: Run, ready: int, coming: int) -> int:
        """Cut the claim to what is ready, because the rest comes late (``coming``) or was refused
        or lost. Returns the ready pieces."""
        claim = prompt.claim
        held = 0 if claim.why == "tier_down" else min(claim.taken_pieces, claim.known_pieces)
        wanted = max(claim.taken_pieces, ready + coming) if coming else held
        if coming:
            self._load_policy.gave_up()
            lease = self._store.load(run.keys, run.start, most=ready, asker=asker(prompt))
            ready = lease.poll().ready
            claim.drop()
            claim.lease = lease
        claim.taken_pieces = ready
        decline(self._store, prompt, run.wanted[ready:wanted], "deadline" if coming else "refused")
        return ready

    # ---- windows and states ----------------------------------------------------------------------

    def _promise_whole(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> int | None:
        claim = prompt.claim
        while True:
            if claim.lease is None or claim.run is None or claim.run.computed != claim.begin:
                claim.drop()
                claimed = self._claim_whole(prompt, keys, busy)
                if claimed is None or not claimed:
                    return None if claimed is None else 0
            assert claim.lease is not None
            assert claim.run is not None
            ready, coming = claim.lease.poll()
            if ready == claim.run.length:
                return claim.run.end
            late = bool(coming) and self._is_late(prompt, ready)
            if coming and not late:
                return None
            claim.tried.missing.add(claim.run.end)
            missed = claim.run.wanted[ready : ready + coming] if late else ()
            claim.drop()
            if late:
                self._load_policy.gave_up()
                decline(self._store, prompt, missed, "deadline")
                claim.tried.ready_only = True

    def _claim_whole(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> bool | None:
        """Claim the run that is worth most. False if none is, or nothing has changed since. None if
        there is no room for it now."""
        claim = prompt.claim
        geometry = self._geometry
        most = min(geometry.last_end(prompt.request.num_tokens), len(keys) * geometry.chunk_tokens)
        hits = WholeHits(self._store, geometry, keys, claim.begin)
        tail = self._tails.hit(prompt, keys, most, claim.tried.missing)
        if tail is None and most <= claim.begin:
            return False
        run = hits.run(most) if tail is None else tail.run
        if self._claim_ready(prompt, run, busy):
            return True
        longest = hits.of(run) if tail is None else tail
        claim.why, seen = longest.result.why, _seen(prompt, longest.result)
        if seen == claim.tried.seen:
            return False
        rows = self._rows(prompt, keys, hits, most, longest)
        plan = self._plan_whole(prompt, rows, busy)
        hit = rows[-1] if plan.ask else None if plan.row is None else rows[plan.row]
        if hit is None:
            claim.tried.seen = seen
        elif not self._has_room(prompt, hit.run.length):
            return None
        else:
            run = hit.run
            lease = self._store.load(run.keys, run.start, most=run.length, asker=asker(prompt))
            self._take_whole(prompt, hit, plan, lease)
        if not claim.tried.ready_only:
            self._decline_longer(prompt, rows, plan)
        return hit is not None

    def _rows(
        self,
        prompt: Prompt,
        keys: Sequence[ChunkKey],
        hits: WholeHits,
        most: int,
        longest: WholeHit,
    ) -> list[WholeHit | None]:
        """Return :meth:`WholeHits.rows`, and among them the longest hit that ends within a chunk.
        ``most``: end of the last whole chunk."""
        claim, rows = prompt.claim, list[WholeHit | None]([None])
        tail = longest if longest.run.end > most else None
        if most > claim.begin:
            whole = hits.of(hits.run(most)) if tail else longest
            rows = hits.rows(whole, claim.tried.missing)
            claim.branch = hits.known
            if tail is None and rows[0] is not whole:
                found = [hit.run.end for hit in rows if hit is not None and hit.is_known]
                for tokens in (min(hits.known, most), max(found, default=claim.begin)):
                    tail = tail or self._tails.hit(prompt, keys, tokens, claim.tried.missing)
        if tail is not None:
            last = rows[-1]
            rows.insert(len(rows) - (last is not None and not last.is_known), tail)
        return rows

    def _claim_ready(self, prompt: Prompt, run: Run, busy: bool) -> bool:
        """Claim the longest run if all of it is in RAM and pays: no other row is looked at."""
        claim = prompt.claim
        hit = WholeHit(run, LookupResult([(run.length, 0.0)]))
        if run.end in claim.tried.missing or _seen(prompt, hit.result) == claim.tried.seen:
            return False
        plan = self._plan_whole(prompt, [hit], busy)
        if plan.row is None or not self._has_room(prompt, run.length):
            return False
        lease = self._store.load_ready(run.keys, run.start, asker=asker(prompt))
        if lease is None:
            return False
        self._take_whole(prompt, hit, plan, lease)
        return True

    def _plan_whole(self, prompt: Prompt, rows: Sequence[WholeHit | None], busy: bool) -> LoadPlan:
        claim = prompt.claim
        if claim.tried.ready_only:
            return LoadPlan(0, ask=False, within_s=0.0)
        ends = [HitEnd(0, 0.0) if hit is None else hit.end(claim.begin) for hit in rows]
        return self._load_policy.choose(ends, claim.begin, busy=busy)

    def _take_whole(self, prompt: Prompt, hit: WholeHit, plan: LoadPlan, lease: LoadLease) -> None:
        claim = prompt.claim
        until = claim.deadline if claim.tried.missing else math.inf
        self._take(prompt, hit.run, hit.result, plan, lease)
        claim.deadline = min(claim.deadline, until)

    def _decline_longer(
        self, prompt: Prompt, rows: Sequence[WholeHit | None], plan: LoadPlan
    ) -> None:
        first = 0 if plan.row is None else plan.row + 1
        for hit in rows[first:]:
            if hit is not None and hit.is_known:
                decline(self._store, prompt, hit.run.wanted[-1:], "slower")

    # ---- both ------------------------------------------------------------------------------------

    def _take(
        self, prompt: Prompt, run: Run, result: LookupResult, plan: LoadPlan, lease: LoadLease
    ) -> None:
        claim = prompt.claim
        claim.lease, claim.store_was_asked = lease, True
        if claim.asked_first:
            self._held = {name: one for name, one in self._held.items() if one.held}
        self._held[prompt.request.request_id] = claim
        claim.run = run
        claim.known_pieces, claim.why, claim.declined = result.known, result.why, {}
        now = self._load_policy.clock()
        claim.deadline, claim.next_piece_by = now + plan.within_s, now + self._load_policy.timeout_s
        claim.arrived_pieces = 0

    def _is_late(self, prompt: Prompt, ready: int) -> bool:
        """Return whether the load is late. ``ready``: pieces that have come."""
        claim, now = prompt.claim, self._load_policy.clock()
        if ready > claim.arrived_pieces:
            claim.arrived_pieces, claim.next_piece_by = ready, now + self._load_policy.timeout_s
        return now >= min(claim.deadline, claim.next_piece_by)

    def _has_room(self, prompt: Prompt, pieces: int) -> bool:
        """Return whether ``pieces`` may be claimed. Requests that wait, all of which vLLM asks for
        at each step, may together claim half of the slots that the engine may hold: the rest is for
        saves. The request that vLLM asks for first may always claim."""
        claim = prompt.claim
        if claim.asked_first or not pieces:
            return True
        claimed = sum(other.held for other in self._held.values())
        return claimed + pieces <= self._store.most_held // 2


class Granted:
    """Blocks that requests may need which were granted a load and have not begun to compute.
    ``most``: KV blocks of the engine, None for so many that it does not matter. ``in_flight``: most
    tokens of the steps in flight.

    vLLM takes blocks back from what runs, and never from what waits. Where there are windows it may
    set too few aside. Then two requests hold blocks that neither can do without, for ever. So loads
    are granted only as far as all these requests fit together."""

    def __init__(self, geometry: Geometry, most: int | None, in_flight: int) -> None:
        self._geometry, self._most, self._in_flight = geometry, most, in_flight
        self._needs: dict[str, int] = {}
        self._together = 0
        self._next = ""
        """Request that did not fit, and is granted its load before all others."""

    def fits(self, request: Any) -> bool:
        """Return whether the request may have a load. One that does not fit is not overtaken by
        others, so that it fits once those that were granted a load have begun."""
        if self._needs and self._most is not None:
            together = self._need(request) + self._together
            if together > self._most or self._next not in ("", request.request_id):
                self._next = self._next or request.request_id
                return False
        return True

    def add(self, request: Any) -> None:
        self.gone(request.request_id)
        self._needs[request.request_id] = need = self._need(request)
        self._together += need

    def gone(self, request_id: str) -> None:
        self._together -= self._needs.pop(request_id, 0)
        if self._next == request_id:
            self._next = ""

    def began(self, requests: Set[str]) -> None:
        if self._needs or self._next:
            for request_id in (self._needs.keys() | {self._next}) & requests:
                self.gone(request_id)

    def _need(self, request: Any) -> int:
        return self._geometry.most_blocks(request.num_tokens, self._in_flight)


def decline(store: KVStore, prompt: Prompt, keys: Sequence[ChunkKey], reason: Reason) -> None:
    """Note that pieces which could be had are computed."""
    declined = prompt.claim.declined
    if keys:
        declined[reason] = declined.get(reason, 0) + len(keys)
        store.decline(keys, reason)


def asker(prompt: Prompt) -> Asker:
    claim = prompt.claim
    said, tokens = prompt.said, prompt.request.num_prompt_tokens
    return Asker(said.session, tokens, claim.store_was_asked, prompt.number)


def _seen(prompt: Prompt, result: LookupResult) -> tuple[int, int, bool, int, bool]:
    """Return facts of which one has to change before a declined request is looked at again."""
    claim = prompt.claim
    asks = result.asking is not None
    return (
        result.ready,
        result.known,
        asks,
        len(claim.tried.missing),
        claim.tried.ready_only,
    )
