"""Loads and saves between vLLM's scheduler, the connector and the workers, as the simulated engines see them."""

from __future__ import annotations

from tests.trust.mutations.room import Mutant, Room

_SCHEDULER, _WORKER = "connectors/vllm/scheduler.py", "connectors/vllm/worker.py"

ROOM = Room(
    {
        "failing loads": ("-m", "tests.trust.engine", "--steps", "500", "--only", "failing loads"),
        "few blocks": ("-m", "tests.trust.engine", "--steps", "500", "--only", "few blocks"),
        "all cells": ("-m", "tests.trust.engine", "--steps", "300"),
    },
    mutants=(
        Mutant(
            _WORKER,
            "        poisoned = metadata.failures_seen.get(self._rank, 0) < self._failures",
            "        poisoned = False",
            "what was computed over a failed load is saved under its valid key",
        ),
        Mutant(
            _WORKER,
            "            first, taken = 0, taken + count\n",
            "            taken += count\n",
            "every chunk of a load begins where the first one does",
        ),
        Mutant(
            _SCHEDULER,
            "            if request_id in cached.resumed_req_ids:\n                prompt.saved = 0\n"
            "            else:\n                blocks = prompt.blocks + blocks",
            "            blocks = prompt.blocks + blocks",
            "a request that was preempted is saved from its old blocks",
        ),
        Mutant(
            _SCHEDULER,
            "        known = request.num_tokens if self._save_decode else request.num_prompt_tokens\n"
            "        finished = min(computed + output.num_scheduled_tokens[request_id], known)",
            "        finished = (computed + output.num_scheduled_tokens[request_id])",
            "drafts that nobody accepted are saved",
        ),
        Mutant(
            _SCHEDULER,
            "min(chunks * self._layout.chunk_tokens, (total - 1) // block * block)",
            "min(chunks * self._layout.chunk_tokens, total // block * block)",
            "no token of a prompt is left to compute, and no answer comes",
        ),
        Mutant(
            _SCHEDULER,
            "            if pending.done + pending.failed == len(self._parts):",
            "            if pending.done + pending.failed:",
            "a chunk can be found when the first of several ranks has saved it",
        ),
        Mutant(
            _SCHEDULER,
            "        first, last = prompt.begin // block, (prompt.begin + tokens) // block",
            "        first, last = prompt.begin // block, -(-request.num_tokens // block)",
            "a load overwrites blocks beyond what was promised",
        ),
        Mutant(
            "connectors/vllm/metadata.py",
            "            failed=self.failed + other.failed,",
            "            failed=self.failed,",
            "what failed on the second rank counts for nothing",
        ),
        Mutant(
            "connectors/vllm/versions.py",
            '    policy = "fail" if several else "recompute"',
            '    policy = "recompute"',
            "a failed load gives wrong tokens with several batches in flight",
        ),
    ),
)
