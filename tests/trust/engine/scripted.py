"""A simulated engine in which nothing is left to chance: a test says what is asked, which copies
are slow or fail, and when other requests hold all blocks."""

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvtier.connectors.vllm.groups import Piece
from kvtier.connectors.vllm.metadata import Job
from kvtier.core.errors import TierError
from tests.trust.engine.simulated import Engine, Rank, ours, step_metadata

_MOST_STEPS = 400


class Scripted(Engine):
    """With ``slow_copies`` each step copies one piece of a load, so that a load of five pieces
    takes five steps."""

    def __init__(self, cell, model, folder):
        super().__init__(cell, model, folder, random.Random(1))
        self.asked: dict[str, Request] = {}
        self.loads: dict[str, list[Job]] = defaultdict(list)
        """By request: what was loaded for it."""
        self.saves: dict[str, list[Job]] = defaultdict(list)
        self.keys: dict[str, list[Any]] = {}
        """By request: the keys of its chunks."""
        self.broken: Callable[[Rank, list[int]], bool] = lambda rank, blocks: False
        """Which ranks cannot load which blocks."""
        self._held: list[Any] = []

    @property
    def half(self):
        """kvtier's half in the scheduler."""
        return ours(self.scheduler.connector)._scheduler

    def worker(self, rank):
        """kvtier's half in a worker."""
        return ours(self.ranks[rank].connector)._worker

    # ---- what is asked ---------------------------------------------------------------------------

    def ask(self, tokens, answer=1, salt="", priority=0, *, elsewhere=False, **sampling):
        name = super().ask(tokens, answer, salt, priority, elsewhere=elsewhere, **sampling)
        self.asked[name] = self.scheduler.requests[name]
        return name

    def keep(self, tokens):
        """Answer a prompt, and take it out of vLLM's own cache: kvtier alone has it then."""
        self.answer(tokens)
        self.crowd_out()

    def answer(self, tokens, answer=1, **more):
        """Ask, and step until nothing is left to do."""
        name = self.ask(tokens, answer, **more)
        self.idle()
        assert self.is_answered(name)
        return name

    def said(self, name):
        """Prompt and answer."""
        return list(self.asked[name].all_token_ids)

    def is_answered(self, name):
        """Whether the request has ended as it should."""
        return bool(self.asked[name].status == RequestStatus.FINISHED_LENGTH_CAPPED)

    def is_loading(self, name):
        return bool(self.asked[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS)

    def loaded(self, name):
        """The tokens of each load of a request."""
        return [job.tokens for job in self.loads[name]]

    def blocks(self, name):
        """The blocks that a request has now, of all groups."""
        if name not in self.scheduler.requests:
            return set()
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        return {block for table in tables for block in table} - {0}

    def pins(self, name):
        """How often each chunk of a request's prompt is pinned in RAM."""
        entries = [self.half.store._directory.get(key) for key in self.keys[name]]
        return [0 if entry is None else entry.pins for entry in entries]

    # ---- steps -----------------------------------------------------------------------------------

    def until(self, holds):
        """Step until something holds."""
        for _ in range(_MOST_STEPS):
            if holds():
                return
            self.step()
        raise AssertionError(f"it never came, in {_MOST_STEPS} steps; live: {self.live}")

    def idle(self):
        """Step until nothing is left to do."""
        self.until(lambda: not self.scheduler.has_requests() and not self._in_flight)

    def take_blocks(self):
        """Others hold every free block, until :meth:`give_back`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self._held += pool.get_new_blocks(pool.get_num_free_blocks())

    def give_back(self):
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held = []

    def preempt(self, name):
        """Take all blocks until the request loses its own, and nothing of it is left in vLLM."""
        self.take_blocks()
        before = self.asked[name].num_preemptions
        self.until(lambda: self.asked[name].num_preemptions > before)
        self.crowd_out()

    # ---- what fails ------------------------------------------------------------------------------

    def drop(self, name, group, number):
        """The store loses one piece of a request's prompt."""
        geometry = self.half._geometry
        piece = Piece(geometry.groups[group], number)
        self.half.store.invalidate([geometry.key(piece, self.keys[name])])

    @contextmanager
    def broken_saves(self, rank):
        """The saves of a rank fail."""

        def save(jobs):
            raise TierError("an injected fault")

        paged = self.worker(rank)._paged
        sound = [one.save for one in paged]
        for one in paged:
            one.save = save
        try:
            yield
        finally:
            for one, its in zip(paged, sound, strict=True):
                one.save = its

    # ---- of the engine ---------------------------------------------------------------------------

    def _copy_s(self):
        return 1.0

    def _fails(self, rank, blocks):
        return self.broken(rank, blocks)

    def _planned(self, output):
        mine = step_metadata(output.kv_connector_metadata)
        for job in mine.loads:
            assert job.request_id is not None
            self.loads[job.request_id].append(job)
        for job in mine.saves + mine.ended_saves:
            for name in self.half._pending[job.number].request_ids:
                self.saves[name].append(job)
        for name, prompt in getattr(self.half, "_prompts", {}).items():
            if prompt.chain is not None:
                self.keys[name] = list(prompt.chain.keys)
        return super()._planned(output)
