"""Whether a hit is loaded or declined, and what a hint may mark that somebody used after it."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "policy": (*PYTEST, "tests/unit/load_policy"),
        "claims": (*PYTEST, "tests/unit/connectors/test_vllm_claims.py"),
        "hints": (*PYTEST, "tests/unit/eviction/test_hints.py"),
        "plan": (*PYTEST, "tests/unit/autoconfig/test_plan.py"),
    },
    (
        Mutant(
            "load_policy/choose.py",
            "        if _gain(ends[other].wait_s, saved_s[other]) > gain:\n",
            "        if _gain(ends[other].wait_s, saved_s[other]) > 0:\n",
            "a prompt waits longer for the rest of its hit than computing that rest takes",
        ),
        Mutant(
            "load_policy/choose.py",
            "    asking = ends[-1].asking if row == known else None\n",
            "    asking = ends[-1].asking\n",
            "a shared tier is asked for what lies behind a part that is computed",
        ),
        Mutant(
            "load_policy/choose.py",
            "    most -= at_once\n",
            "",
            "a load is waited for longer than computing it takes",
        ),
        Mutant(
            "load_policy/prefill.py",
            "    return tokens * before + tokens * tokens / 2\n",
            "    return tokens * tokens / 2\n",
            "the end of a long prompt is held to be as cheap as its beginning",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/hit_table.py",
            "(step and step >= lowest)",
            "step >= lowest",
            "a slow window hides the shorter hit that is all in RAM",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/hit_table.py",
            "            if hit.is_ready:\n                ready = hit\n                break\n",
            "            if hit.is_ready:\n                ready = hit\n",
            "ends are looked up that no hit can gain from",
        ),
        Mutant(
            "store/observers/uses_since.py",
            "        return [key for key in run if self._last_use.get(key, 0) < hint]\n",
            "        return list(run)\n",
            "a chunk leaves unwritten although it was saved after its session was said to be over",
        ),
        Mutant(
            "store/observers/uses_since.py",
            "            self._lost = self._came\n",
            "            pass\n",
            "uses that were not remembered are held to be none",
        ),
        Mutant(
            "autoconfig/plan.py",
            "    return prefill\n",
            "    return PrefillTime(prefill.per_token * 2)\n",
            "an engine starts with another speed than the plan shows",
        ),
    ),
)
