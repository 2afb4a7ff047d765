"""Never stuck: vLLM's time to first token while what is below kvtier's RAM is stuck: a Redis that
is paused, slow to a byte a second, dead or flapping, a disk that has stopped.

    python -m tests.trust.stuck [--rounds 2] [--faults paused dead disk]

Two engines are asked for the same documents in turn, in an order that is drawn anew for each
question: one without kvtier, and one with kvtier as it comes, whose RAM keeps one document and
whose lower tier keeps all: a Redis behind a proxy, then a disk of its own
(:mod:`tests.trust.stopped_disk`). First each document is computed, then served from there. Then
that comes to each fault in turn and stays in it for all rounds (two of them: about 45 s): the
question during which it happens may wait for one deadline. Those after it must stay within 5 % of
the engine without kvtier (the two processes' own difference in speed is measured before each fault,
on requests that keep kvtier out, and divided out). When it ends, nothing is restarted: how many
questions until one is served from the tier again is counted.

A benchmark, with its limits in the results. The exit status is 1 when one is not met or a tier is
not used again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvtier.bench.model import make_model
from kvtier.bench.report import Row, write_results
from kvtier.bench.throttled import (
    Arm,
    Phase,
    ask_all,
    asked,
    asked_apart,
    redis_tier,
    rows_of,
    sum_ratio,
    until_hit,
)
from tests.redis_server import RedisServer
from tests.trust import stopped_disk
from tests.trust.tier_faults import SERVER_FAULTS, Passage

GOAL = 1.05
MOST_ANSWERS = 30
"""Until a tier must be used again: with a rest before each about a minute, and a breaker waits 30 s
at most."""
DISK = "disk"
_DISK_BYTES = 1 << 30
_ARMS = ("none", "auto")
Faults = Mapping[str, Callable[[], AbstractContextManager[None]]]


@contextmanager
def over_redis(given):
    """Redis, the proxy, and both engines."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-stuck-")))
        redis = stack.enter_context(RedisServer())
        passage = Passage(redis.port)
        stack.callback(passage.close)
        engines = stack.enter_context(
            started(given, lambda arm: redis_tier(arm, passage.port), folder)
        )
        named = [name for name in given.faults if name in SERVER_FAULTS]
        yield engines, {name: partial(SERVER_FAULTS[name], redis, passage) for name in named}


@contextmanager
def over_disk(given):
    """The disk, and both engines."""
    with ExitStack() as stack:
        place = Path(given.disk_folder).resolve()
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-stuck-", dir=place))
        )
        disk = stack.enter_context(stopped_disk.disk(folder, _DISK_BYTES))
        tier = {"KVTIER_NVME_PATH": str(disk.folder / "kvtier"), "KVTIER_NVME_BYTES": "512MiB"}
        engines = stack.enter_context(started(given, lambda _arm: tier, folder, disk.take))
        yield engines, {DISK: disk.stopped}


@contextmanager
def started(given, tier, folder, begun=lambda _pid: None):
    """Both engines, side by side. ``begun`` is told each one's process before it does anything."""
    model = make_model(Path(given.models) / given.preset, given.preset)
    with ExitStack() as stack:
        engines = {}
        for arm in _ARMS:
            engines[arm] = Arm(arm, model, given.tokens, tier(arm), folder / f"{arm}.log")
            stack.callback(engines[arm].stop)
            begun(engines[arm].pid)
        for engine in engines.values():
            engine.hear()
        yield engines


def rows_for(fault, heard, recovered):
    """What one fault cost: its first question by itself, the others against none."""
    first = {arm: given[0].seconds for arm, given in heard.answers.items()}
    later = heard.later()
    return [
        *rows_of(fault, later, "none", GOAL),
        Row(
            f"{fault}: sum of all later TTFT, auto / none",
            sum_ratio(later, "auto", "none"),
            "",
            GOAL,
        ),
        Row(f"{fault}: first question, more than none", first["auto"] - first["none"], "s"),
        Row(f"{fault}: answers until the tier is used again", recovered, "answers", MOST_ANSWERS),
    ]


def measured(given, engines, faults):
    """Every fault in turn, and the same engines' answers before it."""
    rows: list[Row] = []
    heard: dict[str, Phase] = {}
    tell("cold:")
    ask_all(engines, given.documents, 1, _ARMS)
    tell("served from below:")
    rows += rows_of(
        f"well before {next(iter(faults))}",
        ask_all(engines, given.documents, 1, _ARMS),
        "none",
        None,
    )
    for name, fault in faults.items():
        tell(f"{name}:")
        apart = asked_apart(engines, _ARMS)
        with fault():
            heard[name] = Phase(
                asked(engines, [*range(given.documents)] * given.rounds, _ARMS), apart
            )
        rows += rows_for(name, heard[name], until_hit(engines, given.documents, MOST_ANSWERS))
        engines["auto"].ask(given.documents - 1)  # so that RAM has not the one that is asked next
    return rows, heard


def run(given):
    rows: list[Row] = []
    heard: dict[str, Phase] = {}
    counts: dict[str, dict[str, int]] = {}
    skipped = stopped_disk.obstacle() if DISK in given.faults else ""
    for name, setting in ((DISK, over_disk), ("redis", over_redis)):
        if not [one for one in given.faults if (one == DISK) == (name == DISK)] or (
            name == DISK and skipped
        ):
            continue
        with setting(given) as (engines, faults):
            found, answers = measured(given, engines, faults)
            counts[name] = engines["auto"].finish()
        rows += found
        heard |= answers
    missed = [row.name for row in rows if row.limit is not None and not within(row)]
    write_results(
        given.output,
        "stuck",
        rows,
        counts=counts,
        missed=missed,
        disk_skipped=skipped,
        answers={name: one._asdict() for name, one in heard.items()},
        tokens=given.tokens,
        model=given.preset,
    )
    for row in rows:
        ratio = "" if row.ratio is None else f"  ratio {row.ratio:.3f}"
        tell(f"{row.name:60} {row.value:7.3f} {row.unit}{ratio}")
    if skipped:
        tell(f"no stopped disk: {skipped}")
    questions = len(_ARMS) * given.documents * given.rounds * len(heard)
    tell(
        json.dumps(
            {"questions": questions, "faults": len(heard), "missed": missed, "counts": counts}
        )
    )
    return bool(missed)


def tell(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def within(row):
    """The median of a row that has one decides. The sum of a few questions is shown beside it."""
    assert row.value is not None and row.limit is not None
    return (row.value if row.ratio is None else row.ratio) <= row.limit


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="times every document is asked in a fault"
    )
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048 + 64, help="a document")
    parser.add_argument(
        "--faults", nargs="*", choices=[*SERVER_FAULTS, DISK], default=[*SERVER_FAULTS, DISK]
    )
    parser.add_argument("--preset", default="demo", help="model, see kvtier.bench.model")
    parser.add_argument("--models", default="build/models")
    parser.add_argument("--disk-folder", default="build", help="where the image of the disk lies")
    parser.add_argument("--output", default="bench/results/stuck.json")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
