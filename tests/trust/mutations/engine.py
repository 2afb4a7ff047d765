"""Loads and saves between vLLM's scheduler, the connector and the workers, as the simulated engines
see them."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SCHEDULER, _WORKER = (
    "connectors/vllm/scheduler_side/scheduler.py",
    "connectors/vllm/worker_side/worker.py",
)
_V1 = ("-m", "tests.trust.engine", "--steps", "500", "--every", "2")
"""Every second cell is one for V2."""

ROOM = Room(
    {
        "scheduler": (*PYTEST, "tests/unit/connectors/test_vllm_scheduler.py"),
        "saves": (*PYTEST, "tests/unit/connectors/test_vllm_saves.py"),
        "rules": (*PYTEST, "tests/unit/connectors/test_vllm_rules.py"),
        "preempted": (*PYTEST, "tests/trust/engine/ported/test_preempted.py"),
        "admission": (*PYTEST, "tests/trust/engine/ported/test_groups.py", "-k", "granted"),
        "failing loads": (*_V1, "--only", "failing loads"),
        "few blocks": (*_V1, "--only", "few blocks"),
        "slow copies": (*_V1, "--only", "slow copies"),
        "several connectors": (*_V1, "--only", "several connectors"),
        "cells": ("-m", "tests.trust.engine", "--steps", "300", "--every", "3"),
    },
    mutants=(
        Mutant(
            _WORKER,
            "            if failed or not left:\n                self._copying.popleft()\n",
            "            if True:\n                self._copying.popleft()\n",
            "a load is told before it is copied",
        ),
        Mutant(
            _WORKER,
            "        self._finished, self._failed = set(), set()\n",
            "        self._failed = set()\n",
            "the end of a load is told twice",
        ),
        Mutant(
            _WORKER,
            "            self._failed.add(job.request_id)\n",
            "            pass\n",
            "a failed load is told as one that went well",
        ),
        Mutant(
            _SCHEDULER,
            "            prompt.progress.fail_load()\n",
            "            pass\n",
            "a request is offered what failed again, for ever",
        ),
        Mutant(
            _SCHEDULER,
            "        prompt = self._prompts.pop(request.request_id, None)\n        self._running",
            "        prompt = self._prompts.pop(request.request_id, None)\n"
            "        for one in self._pending.values():\n"
            "            if one.request_id == request.request_id:\n"
            "                one.lease.close()\n        self._running",
            "an abort gives back slots that a worker still reads",
        ),
        Mutant(
            _SCHEDULER,
            "promised = None\n        return promised, bool(promised)",
            "promised = None\n        return promised, False",
            "a step computes over blocks before they are loaded",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "        return None if among_others else self._own_layout()",
            "        return self._own_layout()",
            "another connector's handshake is answered by ours",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "        own = self._own_layout() if self._step().asks_layout else None",
            "        own = None",
            "an engine with several connectors waits for a layout without end",
        ),
        Mutant(
            _SCHEDULER,
            (
                "    return bool(\n"
                "        request.skip_reading_prefix_cache\n"
                '        or (request.kv_transfer_params or {}).get("do_remote_prefill")\n'
                "    )\n"
            ),
            "    return bool(request.skip_reading_prefix_cache)\n",
            "two connectors load the same prompt",
        ),
        Mutant(
            _SCHEDULER,
            "        known = request.num_tokens if self._duty.save_decode else "
            "request.num_prompt_tokens\n"
            "        finished = min(computed + output.num_scheduled_tokens[request_id], known)",
            "        finished = (computed + output.num_scheduled_tokens[request_id])",
            "drafts that nobody accepted are saved",
        ),
        Mutant(
            _SCHEDULER,
            "            if pending.done + pending.failed == self._jobs.ranks:",
            "            if pending.done + pending.failed:",
            "a chunk can be found when the first of several ranks has saved it",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "in_flight=versions.in_flight_tokens(self._vllm_config),",
            "in_flight=self._vllm_config.scheduler_config.max_num_batched_tokens,",
            "loads are granted as if one step were in flight",
        ),
        Mutant(
            "connectors/vllm/tables.py",
            "[first : -(-end // block)])",
            "[first:])",
            "a load overwrites blocks beyond what was promised",
        ),
        Mutant(
            "connectors/vllm/metadata.py",
            "            failed=self.failed + other.failed,",
            "            failed=self.failed,",
            "what failed on the second rank counts for nothing",
        ),
    ),
)
