"""What a waiting request has claimed of the store, and how much of it vLLM may be promised. One
thread; no waits.

A promise cannot be made smaller, so nothing is promised that is not in RAM, verified and pinned.
While chunks are on their way up vLLM is told to ask again, until a deadline; then what is there
counts.

With full attention alone every leading part of a run serves. With other groups a hit ends where all
of them have what they need, so runs are tried whole, the longest first (:meth:`Geometry.ends`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtier.api import KVStore, LoadLease
from kvtier.connectors.vllm.groups import Geometry, Kind, Run
from kvtier.connectors.vllm.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import LookupResult
from kvtier.load_policy.choose import Choice
from kvtier.load_policy.decide import LoadPolicy
from kvtier.protocol.wire import Reason


class Claims:
    """``prompts``: all live requests by name. ``load_policy`` says what of a hit is taken."""

    def __init__(
        self,
        store: KVStore,
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
        ``keys``: of its
        chunks. ``busy``: the engine computes for others."""
        if prompt.begin != computed:
            prompt.missing.clear()
            prompt.seen, prompt.ready_only = None, False
        prompt.begin, prompt.looked = computed, True
        end = (
            self._gradual(prompt, keys, busy)
            if self._geometry.is_gradual
            else self._whole(prompt, keys, busy)
        )
        return None if end is None else max(0, end - computed)

    # ---- full attention alone --------------------------------------------------------------------

    def _gradual(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> int | None:
        """Tokens the request has with what is there; None: ask again."""
        last = self._geometry.last_end(prompt.request.num_tokens)
        run = self._geometry.run(keys, prompt.begin, last)
        lease = self._claim(prompt, run, busy)
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

    def _claim(self, prompt: Prompt, run: Run, busy: bool) -> LoadLease | None:
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
        return self._decide(prompt, run, result or self._store.lookup(run.wanted), busy)

    def _decide(
        self, prompt: Prompt, run: Run, result: LookupResult, busy: bool
    ) -> LoadLease | None:
        """Claim the part of a run that is worth it, and no more: what is claimed starts to move."""
        rest = run.wanted
        choice = self._load_policy.choose(
            result,
            len(rest),
            prompt.begin,
            lambda count: self._end_of(prompt, run, count),
            busy=busy,
        )
        most = len(rest) if choice.ask else choice.chunks
        if not self._has_room(prompt, most):
            return None
        lease = self._take(prompt, run, result, choice, most)
        if choice.chunks < result.known:
            self._decline(prompt, rest[choice.chunks : result.known], "slower")
        elif result.asking and not choice.ask:
            self._decline(prompt, rest[result.known :], "unasked")
        return lease

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

    def _whole(self, prompt: Prompt, keys: Sequence[ChunkKey], busy: bool) -> int | None:
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
        """Claim the longest run that is worth it. False: there is none; None: there is no room for
        it now."""
        for run, result in self._runs(prompt, keys):
            size = len(run.pieces)
            if prompt.ready_only:
                choice = Choice(size if result.ready == size else 0, ask=False, within_s=0.0)
            else:
                choice = self._load_policy.choose(
                    result,
                    size,
                    prompt.begin,
                    lambda count, run=run, size=size: run.end if count >= size else prompt.begin,  # type: ignore[misc]
                    busy=busy,
                )
            if choice.chunks < size and not choice.ask:
                if result.known == size and not prompt.ready_only:
                    self._decline(prompt, run.wanted[-1:], "slower")
                continue
            if not self._has_room(prompt, size):
                return None
            until = prompt.until if prompt.missing else 0.0
            self._take(prompt, run, result, choice, size)
            if until:
                prompt.until = min(prompt.until, until)
            return True
        return False

    def _runs(self, prompt: Prompt, keys: Sequence[ChunkKey]) -> Iterator[tuple[Run, LookupResult]]:
        """Runs of which everything is known, or may be had by asking, the longest first. Nothing
        where nothing has changed since the last look."""
        geometry, computed = self._geometry, prompt.begin
        most = min(geometry.last_end(prompt.request.num_tokens), len(keys) * geometry.chunk_tokens)
        if most <= computed:
            return
        run = geometry.run(keys, computed, most)
        result = self._store.lookup(run.wanted)
        prompt.why = result.why
        seen = (
            result.ready,
            result.known,
            result.asking is not None,
            len(prompt.missing),
            prompt.ready_only,
        )
        if seen == prompt.seen:
            return
        known = self._known(prompt, keys, result)
        for end in geometry.ends(most, known, computed):
            if end in prompt.missing:
                continue
            if end != most:
                behind = [geometry.key(piece, keys) for piece in geometry.behind(end, computed)]
                if behind:
                    result = self._store.lookup(behind)
                    if result.known < len(behind) and result.asking is None:
                        continue
                run = geometry.run(keys, computed, end)
                result = self._store.lookup(run.wanted)
            if result.known == len(run.pieces) or result.asking is not None:
                yield run, result
        prompt.seen = seen

    def _known(self, prompt: Prompt, keys: Sequence[ChunkKey], result: LookupResult) -> int:
        """Tokens of whose chunks the anchors have all pieces, in whole chunks. ``result``: of the
        longest run."""
        geometry, first = self._geometry, self._geometry.first(prompt.begin)
        known = result.known
        if geometry.anchors[0].kind is not Kind.FULL:  # of the run only its end is needed
            known = self._store.lookup(
                [geometry.key(one, keys) for one in geometry.trunk(first, len(keys))]
            ).known
        size = geometry.chunk_tokens
        return geometry.tokens(first, known) // size * size

    # ---- both ------------------------------------------------------------------------------------

    def _take(
        self, prompt: Prompt, run: Run, result: LookupResult, choice: Choice, most: int
    ) -> LoadLease:
        prompt.lease = self._store.load(run.keys, run.start, most=most, session=prompt.said.session)
        prompt.lease_begin, prompt.run = prompt.begin, run
        prompt.known, prompt.taken, prompt.why, prompt.declined = (
            result.known,
            choice.chunks,
            result.why,
            {},
        )
        prompt.until = self._load_policy.clock() + choice.within_s
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
