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
            "choose.choose",
            "_gain(ends[other].wait_s, saved_s[other]) > gain",
            "_gain(ends[other].wait_s, saved_s[other]) > 0",
            "a prompt waits longer for the rest of its hit than computing that rest takes",
        ),
        Mutant(
            "choose.choose",
            "ends[-1].asking if row == known else None",
            "ends[-1].asking",
            "a shared tier is asked for what lies behind a part that is computed",
        ),
        Mutant(
            "choose.choose",
            "most -= at_once",
            "",
            "a load is waited for longer than computing it takes",
        ),
        Mutant(
            "prefill.looks_back",
            "tokens * before + tokens * tokens / 2",
            "tokens * tokens / 2",
            "the end of a long prompt is held to be as cheap as its beginning",
        ),
        Mutant(
            "WholeHits.rows",
            "step and step >= lowest",
            "step >= lowest",
            "a slow window hides the shorter hit that is all in RAM",
        ),
        Mutant(
            "WholeHits.rows",
            "break",
            "",
            "ends are looked up that no hit can gain from",
        ),
        Mutant(
            "UsesSince.unused",
            "[key for key in run if self._last_use.get(key, 0) < hint]",
            "list(run)",
            "a chunk leaves unwritten although it was saved after its session was said to be over",
        ),
        Mutant(
            "UsesSince.used",
            "self._lost = self._came",
            "pass",
            "uses that were not remembered are held to be none",
        ),
        Mutant(
            "plan._prefill",
            "return prefill",
            "return PrefillTime(prefill.per_token * 2)",
            "an engine starts with another speed than the plan shows",
        ),
    ),
)
