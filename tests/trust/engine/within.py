"""``python -m tests.trust.engine --within [--steps N]``: what hits bring that end within a block of
a hybrid model, and what they cost.

Engines of vLLM's Qwen 3.5 class with the proportions of Qwen3.6-27B, so that vLLM makes blocks of
784 tokens, with and without ``prefix_match_unit``. Each prompt is asked when vLLM's own cache is
empty. Then random users for so many steps, with loads that fail: every read is compared.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.trust.engine import families
from tests.trust.engine.asked import ask, world
from tests.trust.engine.pretended import pretend

QWEN = {
    **families.FAMILIES["Qwen3.5"].small,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
}
"""A twelfth of its heads. A state is as long as 784 tokens of full attention."""
UNITS = (None, 16)
TURNS, QUESTION, ANSWER = 6, 200, 60


def measured(asked, unit, folder):
    """``(what, prompt tokens, hit tokens, slots kept)`` of each case: a row of SPECS.md."""
    from tests.trust.engine.cells import Cell
    from tests.trust.engine.planned import PlannedEngine
    from tests.trust.engine.simulated import ours

    def engine():
        cell = Cell("within", match_unit=unit, v2=True)
        return PlannedEngine(cell, asked, folder, random.Random(1))

    for what, again in (
        ("the same prompt of 900 tokens", 900),
        ("the same prompt of 400 tokens", 400),
        ("five more turns of a conversation", 0),
    ):
        one = engine()
        talk = _words(again or 900, 0)
        told = hits = 0
        for turn in range(2 if again else TURNS):
            before = _hits(one)
            one.ask(talk, ANSWER)
            one.drain()
            one.crowd_out()
            if turn:
                told, hits = told + len(talk), hits + _hits(one) - before
            if not again:
                talk = [*one.conversations[-1], *_words(QUESTION, turn + 1)]
        half = ours(one.scheduler.connector)._scheduler
        assert not one.violations, one.violations
        yield what, told, hits, half.store.stats()["saved"]
        one.close()


def _words(count, first):
    from tests.trust.engine.cells import words

    return words(count, first)


def _hits(engine):
    return int(sum(n for name, n in engine.counts.items() if name.startswith("tokens from ")))


def simulated(asked, steps, folder):
    """What random users saw, of both runners."""
    from tests.trust.engine.cells import Cell
    from tests.trust.engine.driven import drive
    from tests.trust.engine.planned import PlannedEngine

    counts, violations = dict[str, int](), list[str]()
    for v2 in (False, True):
        cell = Cell("within", match_unit=UNITS[-1], v2=v2, async_scheduling=v2, fails=0.1 * v2)
        engine = PlannedEngine(cell, asked, folder, random.Random(f"{v2} 1"))
        drive(engine, steps)
        engine.close()
        violations += engine.violations
        for name in ("steps", "loads", "hits within a block", "copied blocks", "faults"):
            counts[name] = counts.get(name, 0) + engine.counts[name]
    return counts, violations


def main(words=None):
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--within", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args(words)
    families._quiet()
    pretend()
    with tempfile.TemporaryDirectory(prefix="kvtier-within-") as place:
        folder = Path(place)
        with world(folder):
            name = families.FAMILIES["Qwen3.5"].architecture
            asked = ask(name, QWEN, folder, mamba_ssm_cache_dtype="float32")
            rows = [(unit, *row) for unit in UNITS for row in measured(asked, unit, folder)]
            counts, violations = simulated(asked, given.steps, folder)
    line = {"rows": rows, "counts": counts, "violations": violations}
    sys.stdout.write(json.dumps(line) + "\n")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
