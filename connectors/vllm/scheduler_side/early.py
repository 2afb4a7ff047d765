"""Loads in parts (DESIGN.md, "A load in parts"): each part is read into slots, verified and pinned,
and copied by all ranks while later ones are read. The request waits until the last is confirmed.

*Large hits* are those of more than half the slots that the engine may hold, of which some lies
below RAM. Each part gets slots when there is room, and gives them back after its copy. *Hits that
RAM holds* are claimed whole, as :mod:`.claims` says, and keep their slots to the end. Their parts
are as long as a copy of some milliseconds, by the pace of the last copies.

The whole hit is promised with its first part if loading beats computing at twice its estimate (or
too little is known), and if all live requests may hold the blocks that they can come to need.

*How it ends.* Workers are told once: with the last part, or, where that was not known to be the
last, when no rank copies any more. Each rank tells vLLM of blocks that it lacks, and vLLM keeps
what all have, has the blocks back only then, and computes the rest. An aborted request, and one
whose engine got other weights before its last copies, keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.api import LoadLease
from kvtier.connectors.vllm.extension import Duty, Extension, Live, Tools
from kvtier.connectors.vllm.groups import Piece, Run
from kvtier.connectors.vllm.metadata import Job, LoadEnd, StepMetadata
from kvtier.connectors.vllm.scheduler_side.claims import asker, decline
from kvtier.connectors.vllm.scheduler_side.hit_table import ends_of_parts, tokens_with
from kvtier.connectors.vllm.scheduler_side.jobs import ARRIVAL_S, ARRIVALS, BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.parts import InParts, Part
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt, by_place
from kvtier.connectors.vllm.tables import Tables, loading
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import LookupResult, Progress
from kvtier.core.steps import Steps
from kvtier.load_policy.choose import LoadPlan
from kvtier.protocol.wire import Reason

_LEAST_SLOTS = 4
"""Fewest slots with which one part can be read while another is copied."""
_LEAST_HELD = 16
"""Least slots of all parts together, if they are not more than half: some are read, some wait to be
read, and some are copied."""
_AHEAD_PIECES = 8
"""Pieces of a large hit that are read before it has blocks, if there is room. Two parts, if those
are longer."""
_MOST_PIECES = 64
"""Most pieces of a part: a worker confirms a whole part at once."""


@dataclass(slots=True)
class _Candidate:
    run: Run
    until: float
    """Deadline of the first part, in seconds of the clock."""
    leases: list[LoadLease] = field(default_factory=list)
    """Lease of each part that has room; empty before the first has it, and after a decline."""
    slots: int = 0
    """Slots of the leases that count in the room of large hits."""
    pieces: int = 0
    """Number of the run's pieces that are promised."""
    within_s: float = 0.0
    declined: bool = False
    """Whether the prompt falls back to an ordinary load, which waits for RAM."""


@dataclass(slots=True)
class _Load:
    number: int
    prompt: Prompt
    run: Run
    end: int
    """Number of the request's tokens before those that it computes in any case."""
    pieces: Sequence[Piece]
    tables: Tables
    parts: InParts
    until: float
    stalls: float = 0.0
    """Deadline of the next part, in seconds of the clock."""
    is_large: bool = True
    """Whether the load's slots count in the room of large hits."""
    leases: dict[Part, LoadLease] = field(default_factory=dict)
    copying: int = 0
    """Number of slots that ranks read now."""
    sources: list[str] = field(default_factory=list)
    """Place that each arrived piece came from."""
    why: Reason = "refused"
    """Reason for the pieces that are not loaded."""
    is_void: bool = False
    """Whether nothing of the load may be kept."""
    is_told: bool = False

    @property
    def held(self) -> int:
        """Number of slots in the room of large hits."""
        if not self.is_large:
            return 0
        return self.copying + sum(part.size for part in self.leases)


class EarlyLoads(Extension):
    """Loads in parts of one engine. The last extension that is asked for a promise."""

    def __init__(self, tools: Tools, duty: Duty) -> None:
        self._store, self._geometry, self._jobs = tools.store, tools.geometry, tools.jobs
        self._load_policy = tools.load_policy
        self._live: Live
        self._is_on = duty.in_parts and tools.geometry.is_simple
        self._steps_alone = duty.steps_alone
        self._blocks, self._in_flight = duty.blocks, duty.in_flight
        self._loads: dict[int, _Load] = {}
        self._copying: dict[int, tuple[_Load, Part]] = {}
        """Job -> its load and part."""

    def join(self, live: Live) -> None:
        self._live = live

    # ---- before a promise ------------------------------------------------------------------------

    def promise(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, *, busy: bool
    ) -> int | None:
        candidate: _Candidate | None = prompt.notes.get(self)
        if candidate is not None and candidate.run.computed != computed:
            self._let_go(prompt)
            candidate = None
        if candidate is None:
            candidate = self._ask(prompt, keys, computed, busy) or self._divide(
                prompt, computed, busy
            )
        if candidate is None or candidate.declined:
            return 0
        if not candidate.pieces:
            if self._is_first_coming(prompt, candidate):
                return None
            if not self._decide(prompt, candidate, busy):
                return 0
        return tokens_with(self._geometry, computed, candidate.run, candidate.pieces) - computed

    def _ask(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, busy: bool
    ) -> _Candidate | None:
        """Begin to wait for the first part of a large hit. None if there is no such hit."""
        geometry, store = self._geometry, self._store
        if not self._is_on:
            return None
        if not store.most_held:  # a server has not said it yet
            store.lookup(keys[:1])
        slots = store.most_held
        if slots < _LEAST_SLOTS or len(keys) - geometry.first(computed) <= slots // 2:
            return None
        if not self._blocks_suffice:
            return None
        run = geometry.run(keys, computed, geometry.last_end(prompt.request.num_tokens))
        result = self._store.lookup(run.wanted)
        if not self._is_large(result.known, result):
            return None
        pieces, ends = ends_of_parts(geometry, computed, run, result)
        plan = self._load_policy.choose(ends, computed, busy=busy)
        if plan.row is None or not self._is_large(pieces[plan.row], result):
            return None
        policy = self._load_policy
        candidate = _Candidate(run, policy.clock() + min(plan.within_s, policy.timeout_s))
        prompt.notes[self] = candidate
        prompt.claim.drop()
        prompt.claim.was_looked_up = True
        return candidate

    def _is_large(self, pieces: int, result: LookupResult) -> bool:
        return (
            result.asking is None and pieces > self._store.most_held // 2 and pieces > result.ready
        )

    @property
    def _blocks_suffice(self) -> bool:
        """Whether all requests of the engine may hold all blocks that they can come to need."""
        if self._blocks is None:
            return True
        longest = (
            prompt.request.num_prompt_tokens + (prompt.request.max_tokens or 0)
            for prompt in self._live.prompts.values()
        )
        needed = sum(self._geometry.most_blocks(tokens, self._in_flight) for tokens in longest)
        return needed <= self._blocks

    def _is_first_coming(self, prompt: Prompt, candidate: _Candidate) -> bool:
        late = self._load_policy.clock() >= candidate.until
        if not candidate.leases:
            if late or not self._may_look():
                candidate.declined = late
                return not late
            self._claim_first(prompt, candidate)
        first = candidate.leases[0]
        ready, coming = first.poll()
        if coming and not late:
            return True
        if ready < len(first.keys):
            if coming:
                self._load_policy.gave_up()
            self._decline(prompt, candidate)
        return False

    def _claim_first(self, prompt: Prompt, candidate: _Candidate) -> None:
        """Claim the first part, and some behind it: otherwise the tier would have nothing to read
        until the request has blocks."""
        run, wanted, size = candidate.run, candidate.run.wanted, self._part_pieces
        candidate.slots = size
        candidate.leases = [self._store.load(run.keys, run.start, most=size, asker=asker(prompt))]
        prompt.claim.store_was_asked = True
        while candidate.slots < max(_AHEAD_PIECES, 2 * size) and self._may_look():
            keys = wanted[candidate.slots : candidate.slots + size]
            candidate.leases.append(self._store.load(keys, asker=asker(prompt)))
            candidate.slots += size

    def _decide(self, prompt: Prompt, candidate: _Candidate, busy: bool) -> bool:
        """Return whether the whole hit is promised, now that the first part is in RAM."""
        if candidate.declined:
            return False
        claim, run = prompt.claim, candidate.run
        result = self._store.lookup(run.wanted)
        found = self._plan(run, result, busy)
        if found is None or not self._is_large(found[0], result) or not self._blocks_suffice:
            self._decline(prompt, candidate)
            return False
        candidate.pieces, candidate.within_s = found[0], found[1].within_s
        claim.begin, claim.known_pieces, claim.why = run.computed, result.known, result.why
        claim.declined = {}
        decline(self._store, prompt, run.wanted[candidate.pieces : result.known], "slower")
        return True

    def _plan(self, run: Run, result: LookupResult, busy: bool) -> tuple[int, LoadPlan] | None:
        """Return how many pieces are worth being loaded in parts, with their plan."""
        pieces, ends = ends_of_parts(self._geometry, run.computed, run, result)
        turns = [-(-count // self._most_held) if row else 0 for row, count in enumerate(pieces)]
        if result.asking is not None:
            return None
        plan = self._load_policy.choose_in_parts(ends, run.computed, turns, busy=busy)
        return None if plan.row is None else (pieces[plan.row], plan)

    def _decline(self, prompt: Prompt, candidate: _Candidate) -> None:
        candidate.declined = True
        for lease in candidate.leases:
            prompt.claim.let_go(lease)
        candidate.leases = []

    def _divide(self, prompt: Prompt, computed: int, busy: bool) -> _Candidate | None:
        """Promise a hit that RAM holds, of which the first part is there and the rest is coming.
        None if that does not pay."""
        claim = prompt.claim
        lease, run = claim.lease, claim.run
        if not self._is_on or lease is None or run is None or run.computed != computed:
            return None
        ready, coming = lease.poll()
        pieces = claim.taken_pieces
        tokens = tokens_with(self._geometry, computed, run, pieces) - computed
        parts = min(pieces, self._load_policy.parts(tokens))
        size = -(-pieces // parts) if parts > 1 else pieces
        if not coming or ready < size or ready + coming != pieces:
            return None
        candidate = prompt.notes[self] = _Candidate(run, claim.deadline)
        whole = any(self._store.paces[name].comes_whole for name in self._below(lease))
        found = None if whole else self._plan(run, self._store.lookup(run.wanted), busy)
        if found is None or found[0] != pieces or not self._blocks_suffice:
            candidate.declined = True
            return candidate
        candidate.pieces, candidate.within_s = pieces, found[1].within_s
        candidate.leases, claim.lease, claim.in_blocks = divided(lease, pieces, size), None, pieces
        candidate.leases[0].poll()
        return candidate

    def _below(self, lease: LoadLease) -> set[str]:
        """Return this process's tiers that the arrived chunks come from."""
        return self._store.paces.keys() & {*lease.sources}

    def _let_go(self, prompt: Prompt) -> None:
        candidate: _Candidate | None = prompt.notes.pop(self, None)
        if candidate is not None:
            if candidate.leases:
                prompt.claim.in_blocks = 0
            self._decline(prompt, candidate)

    # ---- room ------------------------------------------------------------------------------------

    @property
    def _most_held(self) -> int:
        slots = self._store.most_held
        return max(2, slots // 4, min(_LEAST_HELD, slots // 2))

    @property
    def _part_pieces(self) -> int:
        return max(1, min(_MOST_PIECES, self._store.most_held // 16))

    def _may_look(self) -> bool:
        """Return whether a hit may have one more part before it is promised. While there are loads,
        such parts have half of the room: they wait for blocks, and loads that have these wait for
        room."""
        held = self._held_by_first + self._part_pieces
        return self._has_room and (not self._loads or held <= self._most_held // 2)

    def _may_claim(self, load: _Load) -> bool:
        if not load.is_large:
            return False
        held = load.held
        share = self._most_held // sum(one.is_large for one in self._loads.values())
        return self._has_room and (not held or held + self._part_pieces <= share)

    @property
    def _has_room(self) -> bool:
        held = self._held_by_first + sum(load.held for load in self._loads.values())
        return held + self._part_pieces <= self._most_held

    @property
    def _held_by_first(self) -> int:
        waiting = (prompt.notes.get(self) for prompt in self._live.prompts.values())
        return sum(one.slots for one in waiting if one is not None and one.leases)

    # ---- a load ----------------------------------------------------------------------------------

    def allocated(self, prompt: Prompt, blocks: Any, tokens: int) -> bool:
        candidate: _Candidate | None = prompt.notes.get(self)
        if candidate is None or not candidate.leases or not candidate.pieces or tokens <= 0:
            self._let_go(prompt)
            return False
        leases, candidate.leases = candidate.leases, []
        self._let_go(prompt)
        run, geometry, now = candidate.run, self._geometry, self._load_policy.clock()
        end = run.computed + tokens
        pieces = [
            piece
            for piece in geometry.pieces(run)[: candidate.pieces]
            if geometry.begins_before(piece, end)
        ]
        load = _Load(
            self._jobs.number(),
            prompt,
            run,
            end,
            pieces,
            blocks.get_block_ids(),
            InParts(len(pieces)),
            now + candidate.within_s,
            now + self._load_policy.timeout_s,
            is_large=bool(candidate.slots),
        )
        name, keys = prompt.request.request_id, run.wanted[: len(pieces)]
        for lease in leases:
            part = load.parts.claim(len(lease.keys))
            if part is None:
                lease.close()
            else:
                load.leases[part] = lease
        self._loads[load.number] = load
        self._jobs.begin(Pending(load.number, [name], keys, tokens=tokens))
        pool = leases[0].pool
        assert pool is not None, "a lease with slots has a pool"
        self._jobs.begun.append(BegunLoad(load.number, prompt, len(keys) * pool.slot_bytes))
        first = prompt.claim.places(leases[0])[-1]
        prompt.progress.sources = {first: tokens}  # until all places are known
        return True

    def step(self, metadata: StepMetadata, loads: Sequence[BegunLoad]) -> None:
        if not self._loads:
            return
        busy = not self._steps_alone or self._live.running or metadata.computes
        arrivals = 0 if busy else ARRIVALS  # otherwise a wait of some milliseconds delays nothing
        while self._loads:
            for load in list(self._loads.values()):
                self._go_on(load, metadata)
            others = len(self._jobs.pending) > len(self._loads)
            if others or metadata.loads or metadata.ends or not arrivals:
                return
            self._store.wait(ARRIVAL_S)
            arrivals -= 1

    def _go_on(self, load: _Load, metadata: StepMetadata) -> None:
        now, parts = self._load_policy.clock(), load.parts
        late = now >= load.until or (parts.reading is not None and now >= load.stalls)
        while (part := parts.reading) is not None:
            ready, coming = load.leases[part].poll()
            ready = min(ready, part.size)
            if coming and not late:
                break
            if ready < part.size:
                load.why = "deadline" if coming else "refused"
            load.stalls = now + self._load_policy.timeout_s
            self._arrived(load, part, ready, metadata)
        if late:
            before = parts.end
            self._drop(load, parts.cut())
            load.why = "deadline" if parts.end < before else load.why
        while self._may_claim(load) and (part := parts.claim(self._part_pieces)) is not None:
            if not load.leases:
                load.stalls = now + self._load_policy.timeout_s
            keys = load.run.wanted[part.begin : part.end]
            load.leases[part] = self._store.load(keys, asker=asker(load.prompt))
        if parts.is_over and not load.is_told:
            metadata.ends.append(self._load_end(load, 0 if load.is_void else parts.kept))
            self._close(load)

    def _arrived(self, load: _Load, part: Part, ready: int, metadata: StepMetadata) -> None:
        """Begin to copy a part's first ``ready`` pieces, which are in slots: no more will come."""
        lease = load.leases.pop(part)
        self._drop(load, load.parts.arrived(part, ready))
        if not ready:
            lease.close()
            return
        geometry, pieces = self._geometry, load.pieces[part.begin : part.end]
        slots = zip(pieces, lease.slots, strict=False)
        load.sources += load.prompt.claim.places(lease)[:ready]
        begin = max(load.run.computed, pieces[0].number * geometry.piece_tokens)
        end = min(load.end, (pieces[-1].number + 1) * geometry.piece_tokens)
        moves = loading(geometry, slots, load.tables, begin, end)
        where = self._jobs.address(lease.pool)
        job = Job(self._jobs.number(), where, moves, tokens=end - begin, part_of=load.number)
        if load.parts.end == part.end:
            load.is_told, job.end = True, self._load_end(load, part.end)
        keys = lease.keys[:ready]
        names = [load.prompt.request.request_id]
        self._jobs.begin(Pending(job.number, names, keys, load=lease, tokens=end - begin))
        self._load_policy.load_began(end - begin)
        load.copying += ready
        self._copying[job.number] = load, part
        metadata.loads.append(job)

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        if job.number not in self._copying:
            return
        load, part = self._copying.pop(job.number)
        load.copying -= part.size
        self._drop(load, load.parts.copied(part, well=not job.failed))
        if load.is_told and load.parts.is_over:
            self._close(load)

    def _drop(self, load: _Load, dropped: Sequence[Part]) -> None:
        for part in dropped:
            load.leases.pop(part).close()

    def _load_end(self, load: _Load, kept: int) -> LoadEnd:
        group = self._geometry.groups[0]
        size, table = group.block_tokens, load.tables[group.number]
        begin, end = load.run.computed // size, self._end_with(load, kept) // size
        blocks = list(table[begin : -(-load.end // size)])
        return LoadEnd(load.number, load.prompt.request.request_id, blocks, end - begin)

    def _end_with(self, load: _Load, kept: int) -> int:
        """Return the request's tokens with its own blocks and the first ``kept`` pieces."""
        run = load.run
        end = min(load.end, tokens_with(self._geometry, run.computed, run, kept))
        return max(end, run.computed)

    def _close(self, load: _Load) -> None:
        prompt, run, name = load.prompt, load.run, load.prompt.request.request_id
        kept = 0 if load.is_void else load.parts.kept
        end = self._end_with(load, kept)
        del self._loads[load.number]
        prompt.claim.in_blocks = 0
        prompt.claim.brought = {}
        if self._live.prompts.get(name) is not prompt:
            return
        if not load.is_void:
            decline(self._store, prompt, run.wanted[kept : len(load.pieces)], load.why)
        sources, told = load.sources[:kept], prompt.progress.sources
        told.clear()
        found = zip(load.pieces, sources, strict=False)
        told.update(by_place(self._geometry, found, run.computed, end))
        self._live.answer(prompt, sources, end - run.computed)

    # ---- ends ------------------------------------------------------------------------------------

    def drop(self, prompt: Prompt) -> None:
        """End the prompt's load without any use, as soon as no rank copies a part of it."""
        self._let_go(prompt)
        for load in self._loads.values():
            if load.prompt is prompt:
                load.is_void = True
                self._drop(load, load.parts.cut())


def divided(lease: LoadLease, pieces: int, size: int) -> list[LoadLease]:
    """Divide a lease into leases of ``size`` chunks each. Its slots are let go with the last of
    them."""
    begins = range(0, pieces, size)
    keeper, keys = _Divided(lease, len(begins)), lease.keys[:pieces]
    return [LoadLease(keeper, lease.pool, keys[at : at + size], at) for at in begins]


class _Divided:
    """Keeper of a divided lease's parts. ``held`` of each is the place of its first chunk."""

    def __init__(self, whole: LoadLease, parts: int) -> None:
        self._whole = whole
        self._open = parts

    def poll_load(self, part: LoadLease) -> Steps[Progress]:
        begin, end = part.held, part.held + len(part.keys)
        ready, coming = self._whole.ready, 0
        if ready < end:
            ready, coming = yield from self._whole.polling()
        part.slots, part.sources = self._whole.slots[begin:end], self._whole.sources[begin:end]
        return Progress(part.ready, max(0, min(ready + coming, end) - max(ready, begin)))

    def end_load(self, part: LoadLease) -> Steps[None]:
        self._open -= 1
        if not self._open:
            yield from self._whole.closing()

    def end_save(self, lease: object, *, commit: bool) -> Steps[None]:
        raise NotImplementedError
