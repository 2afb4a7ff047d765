"""Never stuck: vLLM's time to first token while kvtier's Redis is paused, slow to a byte a second, dead or flapping.

    python -m tests.trust.stuck [--rounds 2] [--plights paused dead]

Two engines are asked for the same documents in turn, in an order that is drawn anew for each question: one without
kvtier, and one with kvtier as it comes, whose RAM keeps one document and whose Redis, behind a proxy, keeps all. First
each document is computed, then served from Redis. Then Redis comes to each plight in turn and stays in it for all
rounds (two of them: about 45 s): the question during which it happens may wait for one deadline; those after it must
stay within 5 % of the engine without kvtier (the two processes' own difference in speed is measured before each plight,
on requests that keep kvtier out, and divided out). When it ends, nothing is restarted: how many questions until one is
served from Redis again is counted.

A benchmark, with its limits in the results; the exit status is 1 when one is not met or Redis is not used again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.bench.model import kv_token_bytes, make_model, read_config
from kvtier.bench.report import Row, write_results
from kvtier.bench.throttled import Arm, Phase, Setup, ask_all, asked, asked_apart, rows_of, sum_ratio, until_hit
from tests.redis_server import RedisServer
from tests.trust.plights import REDIS_PLIGHTS, Passage

GOAL = 1.05
MOST_ANSWERS = 30
"""Until Redis must be used again: with a rest before each about a minute, and the breaker waits 30 s at most."""
_ARMS = ("none", "auto")


@contextmanager
def started(given: argparse.Namespace) -> Iterator[tuple[Setup, RedisServer, Passage]]:
    """Redis, the proxy, and both engines, which start side by side."""
    model = make_model(Path(given.models) / given.preset, given.preset)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-stuck-")))
        redis = stack.enter_context(RedisServer())
        passage = Passage(redis.port)
        stack.callback(passage.close)
        engines = {}
        for arm in _ARMS:
            engines[arm] = Arm(arm, model, given.tokens, passage.port, folder / f"{arm}.log")
            stack.callback(engines[arm].stop)
        for engine in engines.values():
            engine.wait()
        yield Setup(engines, passage, given.tokens * kv_token_bytes(read_config(model), 4)), redis, passage


def rows_for(plight: str, heard: Phase, recovered: int) -> list[Row]:
    """What one plight cost: its first question by itself, the others against none."""
    first = {arm: given[0].seconds for arm, given in heard.answers.items()}
    later = heard.later()
    return [
        *rows_of(plight, later, "none", GOAL),
        Row(f"{plight}: sum of all later TTFT, auto / none", sum_ratio(later, "auto", "none"), "", GOAL),
        Row(f"{plight}: first question, more than none", first["auto"] - first["none"], "s"),
        Row(f"{plight}: answers until Redis is used again", recovered, "answers", MOST_ANSWERS),
    ]


def run(given: argparse.Namespace) -> int:
    rows: list[Row] = []
    heard: dict[str, Phase] = {}
    with started(given) as (setup, redis, passage):
        tell("cold:")
        ask_all(setup, given.documents, 1, _ARMS)
        tell("served from Redis:")
        rows += rows_of("well", ask_all(setup, given.documents, 1, _ARMS), "none", None)
        for name in given.plights:
            tell(f"{name}:")
            apart = asked_apart(setup, _ARMS)
            with REDIS_PLIGHTS[name](redis, passage):
                heard[name] = Phase(asked(setup, [*range(given.documents)] * given.rounds, _ARMS), apart)
            rows += rows_for(name, heard[name], until_hit(setup, given.documents, MOST_ANSWERS))
            setup.engines["auto"].ask(given.documents - 1)  # so that RAM has not the one that is asked next
        counts = setup.engines["auto"].finish()
    missed = [row.name for row in rows if row.limit is not None and not within(row)]
    write_results(
        given.output,
        "stuck",
        rows,
        counts=counts,
        missed=missed,
        answers={name: one._asdict() for name, one in heard.items()},
        tokens=given.tokens,
        model=given.preset,
    )
    for row in rows:
        ratio = "" if row.ratio is None else f"  ratio {row.ratio:.3f}"
        tell(f"{row.name:60} {row.value:7.3f} {row.unit}{ratio}")
    questions = len(_ARMS) * given.documents * given.rounds * len(given.plights)
    tell(json.dumps({"questions": questions, "plights": len(given.plights), "missed": missed, "counts": counts}))
    return bool(missed)


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def within(row: Row) -> bool:
    """The median of a row that has one decides; the sum of a few questions is shown beside it."""
    assert row.value is not None and row.limit is not None
    return (row.value if row.ratio is None else row.ratio) <= row.limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="times every document is asked in a plight")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048 + 64, help="a document")
    parser.add_argument("--plights", nargs="*", choices=REDIS_PLIGHTS, default=list(REDIS_PLIGHTS))
    parser.add_argument("--preset", default="demo", help="model, see kvtier.bench.model")
    parser.add_argument("--models", default="build/models")
    parser.add_argument("--output", default="bench/results/stuck.json")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
