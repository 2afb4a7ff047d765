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
            "WorkerHalf._copy_on",
            "failed or not left",
            "True",
            "a load is told before it is copied",
        ),
        Mutant(
            "WorkerHalf.transfers",
            "self._finished, self._failed = (set(), set())",
            "self._failed = set()",
            "the end of a load is told twice",
        ),
        Mutant(
            "WorkerHalf._ended",
            "self._failed.add(job.request_id)",
            "pass",
            "a failed load is told as one that went well",
        ),
        Mutant(
            "SchedulerHalf._end_load",
            "prompt.progress.fail_load()",
            "pass",
            "a request is offered what failed again, for ever",
        ),
        Mutant(
            "SchedulerHalf.finished",
            "self._running.discard(request.request_id)",
            "for one in self._pending.values():\n"
            "    if one.request_id == request.request_id:\n"
            "        one.lease.close()\n"
            "self._running.discard(request.request_id)",
            "an abort gives back slots that a worker still reads",
        ),
        Mutant(
            "SchedulerHalf.matched",
            "bool(promised)",
            "False",
            "a step computes over blocks before they are loaded",
        ),
        Mutant(
            "KVTierConnector.get_handshake_metadata",
            "None if among_others else self._own_layout()",
            "self._own_layout()",
            "another connector's handshake is answered by ours",
        ),
        Mutant(
            "KVTierConnector.build_connector_worker_meta",
            "self._own_layout() if self._step().asks_layout else None",
            "None",
            "an engine with several connectors waits for a layout without end",
        ),
        Mutant(
            "scheduler._is_served_elsewhere",
            "request.skip_reading_prefix_cache or (request.kv_transfer_params or "
            "{}).get('do_remote_prefill')",
            "request.skip_reading_prefix_cache",
            "two connectors load the same prompt",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "known = request.num_tokens if self._duty.save_decode else "
            "request.num_prompt_tokens\n"
            "finished = min(computed + output.num_scheduled_tokens[request_id], known) // "
            "size",
            "finished = (computed + output.num_scheduled_tokens[request_id]) // size",
            "drafts that nobody accepted are saved",
        ),
        Mutant(
            "SchedulerHalf.report",
            "pending.done + pending.failed == self._jobs.ranks",
            "pending.done + pending.failed",
            "a chunk can be found when the first of several ranks has saved it",
        ),
        Mutant(
            "KVTierConnector._duty",
            "versions.in_flight_tokens(self._vllm_config)",
            "self._vllm_config.scheduler_config.max_num_batched_tokens",
            "loads are granted as if one step were in flight",
        ),
        Mutant(
            "tables.loading",
            "tables[group.number][first:-(-end // block)]",
            "tables[group.number][first:]",
            "a load overwrites blocks beyond what was promised",
        ),
        Mutant(
            "StepReport.aggregate",
            "self.failed + other.failed",
            "self.failed",
            "what failed on the second rank counts for nothing",
        ),
    ),
)
