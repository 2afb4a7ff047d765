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
        "engines": ("-m", "tests.trust.engine", "--steps", "500", "--only", "in parts, lost"),
    },
    mutants=(
        Mutant(
            _PARTS,
            "            if first.stage is Stage.COPIED and first.end <= self.end:\n",
            "            if first.end <= self.end or first.stage is Stage.FAILED:\n",
            "what some rank could not copy counts as loaded",
        ),
        Mutant(
            _PARTS,
            "        return self.kept == self.end and not self._parts\n",
            "        return self.reading is None\n",
            "vLLM is told of the end while ranks still copy",
        ),
        Mutant(
            _PARTS,
            "        part.end = part.begin + ready\n        part.stage",
            "        part.stage",
            "what has not arrived counts as copied",
        ),
        Mutant(
            _EARLY,
            "        left = list(table[end // size : -(-load.end // size)])\n",
            "        left = list[int]()\n",
            "a promise is kept after the load was cut",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "            self._left.update(end.left)\n",
            "            pass\n",
            "workers do not tell what a cut load has left",
        ),
        Mutant(
            _EARLY,
            "        metadata.loads.append(job)\n",
            "        metadata.loads.append(job)\n        lease.close()\n",
            "a slot is free before all ranks have copied it",
        ),
        Mutant(
            _EARLY,
            "            if coming and not late:\n                break\n",
            "            if coming and not late:\n                ready = part.size\n",
            "a part is copied before it was verified",
        ),
        Mutant(
            _EARLY,
            "                load.is_void = True\n",
            "                pass\n",
            "what other weights have computed is kept",
        ),
        Mutant(
            _EARLY,
            "        return needed <= self._blocks\n",
            "        return True\n",
            "an engine short of blocks gives them to a request that waits for a disk",
        ),
        Mutant(
            _EARLY,
            "        late = now >= load.until or (",
            "        late = (",
            "a load is waited for longer than computing takes",
        ),
    ),
)
