"""Loads that come in parts: what vLLM is told of them, and how long their slots stay."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_EARLY, _PARTS = (
    "connectors/vllm/scheduler_side/early.py",
    "connectors/vllm/scheduler_side/parts.py",
)

ROOM = Room(
    {
        "parts": (*PYTEST, "tests/property/test_load_in_parts.py"),
        "early": (*PYTEST, "tests/unit/connectors/test_vllm_early.py"),
        "workers": (
            *PYTEST,
            "tests/unit/gpu/test_gpu_worker.py",
            "-k",
            "in_parts or could_not_copy",
        ),
        "leases": (*PYTEST, "tests/unit/client/test_kvstore.py", "-k", "names_what_it_claims"),
        "engines": ("-m", "tests.trust.engine", "--steps", "500", "--only", "in parts, lost"),
        "servers": ("-m", "tests.trust.engine", "--steps", "500", "--only", "early, killed"),
    },
    mutants=(
        Mutant(
            "InParts.copied",
            "first.stage is Stage.COPIED and first.end <= self.end",
            "first.end <= self.end or first.stage is Stage.FAILED",
            "what some rank could not copy counts as loaded",
        ),
        Mutant(
            "EarlyLoads._most_held",
            "min(_LEAST_HELD, slots // 2)",
            "0",
            "where RAM is small the disk waits for each step",
        ),
        Mutant(
            "EarlyLoads._most_held",
            "slots // 2",
            "slots",
            "loads in parts take all of a small RAM",
        ),
        Mutant(
            "InParts.is_over",
            "self.kept == self.end and (not self._parts)",
            "self.reading is None",
            "vLLM is told of the end while ranks still copy",
        ),
        Mutant(
            "InParts.arrived",
            "part.end = part.begin + ready",
            "",
            "what has not arrived counts as copied",
        ),
        Mutant(
            "EarlyLoads._load_end",
            "list(table[begin:-(-load.end // size)])",
            "list[int]()",
            "a promise is kept after the load was cut",
        ),
        Mutant(
            "WorkerHalf._ended_in_parts",
            "self._left.update(end.blocks[end.kept:])",
            "pass",
            "workers do not tell what a cut load has left",
        ),
        Mutant(
            "WorkerHalf._ended_in_parts",
            "self._left |= self._in_parts.pop(end.number, _LoadInParts()).lacking",
            "self._in_parts.pop(end.number, None)",
            "workers do not tell what they could not copy of a load whose end they know",
        ),
        Mutant(
            "WorkerHalf._refuse",
            "self._in_parts[job.end.number].lacking.update(job.end.blocks)",
            "pass",
            "parts of a load are kept though the weights were replaced before the last one",
        ),
        Mutant(
            "WorkerHalf._ended",
            "load.end is not None and (not load.under_way)",
            "load.end is not None and job.end is not None",
            "a load has ended with its last part while others are being copied",
        ),
        Mutant(
            "EarlyLoads._arrived",
            "load.parts.end == part.end",
            "load.parts.reading is None",
            "the end of a load is told while more of it is to come",
        ),
        Mutant(
            "EarlyLoads._arrived",
            "metadata.loads.append(job)",
            "metadata.loads.append(job)\nlease.close()",
            "a slot is free before all ranks have copied it",
        ),
        Mutant(
            "EarlyLoads._go_on",
            "break",
            "ready = part.size",
            "a part is copied before it was verified",
        ),
        Mutant(
            "EarlyLoads.drop",
            "load.is_void = True",
            "pass",
            "what other weights have computed is kept",
        ),
        Mutant(
            "EarlyLoads._blocks_suffice",
            "needed <= self._blocks",
            "True",
            "an engine short of blocks gives them to a request that waits for a disk",
        ),
        Mutant(
            "EarlyLoads._go_on",
            "now >= load.until or (parts.reading is not None and now >= load.stalls)",
            "parts.reading is not None and now >= load.stalls",
            "a load is waited for longer than computing takes",
        ),
        Mutant(
            "_Divided.end_load",
            "not self._open",
            "True",
            "slots of a hit that RAM holds are free before all ranks have copied them",
        ),
        Mutant(
            "_Divided.poll_load",
            "Progress(part.ready, max(0, min(ready + coming, end) - max(ready, begin)))",
            "Progress(len(part.keys), 0)",
            "a part of a hit that RAM holds is copied before it was verified",
        ),
        Mutant(
            "EarlyLoads._divide",
            "found is None or found[0] != pieces or (not self._blocks_suffice)",
            "found is None or found[0] != pieces",
            "an engine short of blocks gives them to a hit that is on its way to RAM",
        ),
        Mutant(
            "Client.load",
            "asked[start:][:most]",
            "asked[start:]",
            "a part that a server was asked for is taken for the whole hit",
        ),
        Mutant(
            "Hosts.load",
            "keys[start:][:most]",
            "keys[start:]",
            "a part that all hosts were asked for is taken for the whole hit",
        ),
        Mutant(
            "EarlyLoads._close",
            "prompt.claim.in_blocks = 0",
            "",
            "a load that has ended takes the room of those that wait",
        ),
    ),
)
