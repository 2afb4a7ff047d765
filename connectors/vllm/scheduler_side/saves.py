"""Saves of a step, and how they end. vLLM's scheduling loop, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from kvtier.api import SaveLease
from kvtier.connectors.vllm.extension import Tools
from kvtier.connectors.vllm.groups import Kind, Piece
from kvtier.connectors.vllm.metadata import Job, StepMetadata
from kvtier.connectors.vllm.scheduler_side.due_steps import DueSteps
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.connectors.vllm.tables import State, Tables, blocks_of, saving
from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import PIECE_CHUNKS


@dataclass(slots=True, eq=False)
class Offer:
    """Pieces of a request that may be saved, which are in the blocks of ``tables``."""

    prompt: Prompt
    pieces: dict[ChunkKey, Piece]
    tables: Tables
    chunks: tuple[int, int] | None = None
    """Number of chunks offered before, and with this. None for a part of a chunk."""
    taken: dict[ChunkKey, Piece] = field(default_factory=dict)
    """Pieces that the store takes."""


class Saves:
    """Saves of one engine. ``told``: hooks for what the store takes of an offer."""

    def __init__(
        self,
        tools: Tools,
        prompts: Mapping[str, Prompt],
        due: DueSteps,
        told: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._store, self._geometry, self._jobs = tools.store, tools.geometry, tools.jobs
        self._told = told
        self.of_ended: list[Job] = []
        """Jobs of requests that have ended since the last step."""
        self._pending, self._prompts, self._due = tools.jobs.pending, prompts, due
        self._reading: set[str] = set()
        """Requests whose blocks workers may still be reading while the engine computes."""

    def finished(
        self,
        prompt: Prompt,
        keys: Sequence[ChunkKey],
        tables: Tables,
        finished: int,
        early: Set[State],
    ) -> dict[ChunkKey, Piece]:
        """Return the pieces of ``finished`` chunks that are worth keeping, but states that are
        ``early``. First come those that all hits need, then those behind the ends that are new. The
        first ones stay longest."""
        geometry, request = self._geometry, prompt.request
        size = geometry.chunk_tokens
        found = dict(
            zip(geometry.trunk_keys(keys, finished), geometry.trunk(0, finished), strict=True)
        )
        if geometry.is_gradual:
            return found
        branches, behind = prompt.branches, list[Piece]()
        for chunk in range(finished, prompt.progress.saved, -1):
            if geometry.is_kept(chunk * size, request.num_prompt_tokens, branches):
                behind += (
                    piece
                    for piece in geometry.behind(chunk * size)
                    if piece.group.kind is not Kind.STATE
                )
        behind += self._states(prompt, tables, finished, early)
        found |= {geometry.key(piece, keys): piece for piece in behind}
        return {
            key: piece
            for key, piece in found.items()
            if blocks_of(geometry, piece, tables) is not None
        }

    def begin(self, offers: Sequence[Offer]) -> list[Job]:
        """Begin to save what the store takes of each offer. Runs are offered together as long as
        they are short."""
        jobs, owners = list[Job](), dict[ChunkKey, Offer]()
        for offer in offers:
            if owners and len(owners) + len(offer.pieces) > PIECE_CHUNKS:
                jobs += self._begin(owners)
                owners = {}
            owners |= dict.fromkeys(offer.pieces, offer)
        jobs += self._begin(owners) if owners else ()
        for offer in offers:
            if offer.chunks is not None:
                before, now = offer.chunks
                for saving in self._told:
                    saving(offer.prompt, before, now, offer.taken)
        return jobs

    def _begin(self, owners: Mapping[ChunkKey, Offer]) -> list[Job]:
        """Begin one job, if the store takes anything."""
        lease = self._store.save(list(owners))
        if not lease.keys:
            lease.close()
            return []
        found = list[tuple[Piece, int, Tables]]()
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            offer = owners[key]
            piece = offer.taken[key] = offer.pieces[key]
            found.append((piece, slot, offer.tables))
        moves = saving(self._geometry, found)
        job = Job(self._jobs.number(), self._jobs.address(lease.pool), moves)
        offers = dict.fromkeys(owners.values())
        names = dict.fromkeys(one.prompt.request.request_id for one in offers if one.taken)
        self._jobs.begin(Pending(job.number, [*names], lease.keys, save=lease))
        return [job]

    def step(self, metadata: StepMetadata, output: Any) -> None:
        """Decide whether the engine has to wait until workers have read the blocks of this step's
        saves, and of earlier ones. Called when the step's saves have begun.

        It does not while each of these requests has more of its prompt to compute and all its
        layers are full attention: then its blocks stay its own, and what is saved of them stays as
        it is. vLLM takes blocks from a request that it preempts, aborts or resumes, and none of
        these is computed in the step that may give them to another."""
        metadata.ended_saves, self.of_ended = self.of_ended, []
        if not self._reading and not metadata.saves:
            metadata.may_reuse = False  # no block is being read
            return
        scheduled = output.num_scheduled_tokens
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        began = resumed | {new.req_id for new in output.scheduled_new_reqs}
        metadata.may_reuse = not all(
            request_id in scheduled and request_id not in began for request_id in self._reading
        )
        if metadata.may_reuse:
            self._reading.clear()
        if not metadata.saves:
            return
        saved = {one for job in metadata.saves for one in self._pending[job.number].request_ids}
        metadata.reads_on = self._geometry.is_gradual and all(
            request_id not in resumed
            and self._prompts[request_id].request.num_computed_tokens + scheduled[request_id]
            < self._prompts[request_id].request.num_prompt_tokens
            for request_id in saved
        )
        self._reading = self._reading | saved if metadata.reads_on else set()

    def end(self, pending: Pending, lease: SaveLease) -> None:
        """End a save that all ranks have reported: chunks can be found when every one has written
        its part."""
        if not pending.failed and not pending.dropped:
            lease.commit()
            return
        lease.close()
        for request_id in pending.request_ids if pending.failed else ():
            if (prompt := self._prompts.get(request_id)) is not None:
                # The worker refuses saves for a while after weights were replaced.
                prompt.progress.retry()
                self._due.wait(request_id, 0)

    def _states(
        self, prompt: Prompt, tables: Tables, finished: int, early: Set[State]
    ) -> list[Piece]:
        """Return recurrent states at the end of a finished chunk that are worth their room. A state
        that is ``early`` waits for the next step, and one whose tokens are not known yet until they
        are."""
        found, waiting, size = list[Piece](), [], self._geometry.chunk_tokens
        begin, told = prompt.progress.saved * size, prompt.request.num_prompt_tokens
        for state in prompt.progress.states:
            number, block, tokens = state
            group = next((one for one in self._geometry.groups if one.number == number), None)
            if group is None or not tokens or tokens % size:
                continue
            piece = Piece(group, tokens // size - 1)
            if blocks_of(self._geometry, piece, tables) != [block]:
                continue
            if tokens > finished * size or state in early:
                waiting.append(state)
            elif self._geometry.is_state_kept(tokens, begin, told, prompt.branches):
                found.append(piece)
        prompt.progress.states = waiting
        return found
