"""What other requests feel while a long document is loaded: ``python -m
kvtier.bench.compare.latency``.

A few requests decode on a real vLLM server. A long one comes whose document is in the arm's cache,
and not in vLLM's own. What counts are the gaps between the tokens of the others, from its arrival
to its first token. Then another question about the same document comes, which is in vLLM's own
cache by then: nothing is loaded, and the rest is the same. The difference is the load's.

The arms are those of :mod:`kvtier.bench.compare.peers.contenders`. Every round starts every arm
once. Another arm begins each time. The results have the form of bench/report.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.bench.command import run_command, terminable
from kvtier.bench.compare import calls
from kvtier.bench.compare.latency.streams import SHORT_LENGTH, Work, pairs
from kvtier.bench.compare.latency.windows import Pair, Window
from kvtier.bench.compare.peers.contenders import CONTENDERS, Contender
from kvtier.bench.compare.rounds import first_cause
from kvtier.bench.compare.serving import DTYPE, locked, serving, sizes_of, token_bytes_of
from kvtier.bench.flags import names_in, positive
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.model import make_model
from kvtier.bench.report import Row, median_row, percentile, print_rows, write_results
from kvtier.bench.requests import client
from kvtier.bench.requests.client import RequestError
from kvtier.core.errors import KVTierError

NAME = "latency"
MODEL = "wide"
NO_LOAD = "no load"
"""The second questions of all pairs."""
ARMS = ("vllm-offloading-ram", "kvtier-ram", "vllm-offloading-disk", "kvtier-nvme")
HOW = {
    "quiet gap": "between two tokens of a request that decodes, before the long request comes; "
    "the mean of a window",
    "gap": "the same from the long request's arrival to its first token: median of a window; p99 "
    "of the gaps of all windows",
    "longest gap": "of all requests in a window",
    "time lost": "a request's gaps in the window, less as many quiet ones; mean over requests",
    "time lost to the load": "time lost, less that of the next question, about the same document, "
    "which is in vLLM's own cache",
    "step": "the same as a gap between the ends of two of the engine's steps, so without what the "
    "server and the client add",
    "longest in the connector": "of a window's steps of either half: what one takes of the "
    "engine's own time in its connector. By so much a load makes a step longer",
    "ttft": "of the long request",
    "load cost": "ttft, less that of the next question",
}
"""What a row means. Each is a median over loads with the lowest and the highest."""
_HELD = 0.99
"""The part of its document of which a long request may not compute a token."""
_REQUEST_S = 300.0


@dataclass(slots=True)
class Found:
    """One arm over all rounds. ``steps``: the same pairs in the engine. ``hits``: prompt tokens of
    all its requests by their place. ``reason``: why it cannot run."""

    pairs: list[Pair] = field(default_factory=list)
    steps: list[Pair] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    reason: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    about = "What other requests feel while a long document is loaded."
    return run_command("compare.latency", about, _add_arguments, _run_all, argv)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    loading = {name: one for name, one in CONTENDERS.items() if one.connector is not None}
    about = f"of {','.join(loading)} (default: {','.join(ARMS)})"
    default = [CONTENDERS[name] for name in ARMS]
    add("--arms", type=names_in(loading), default=default, help=about)
    about = "times every arm is started, in turns (default: 2)"
    add("--rounds", type=positive, default=2, help=about)
    add("--loads", type=positive, default=4, help="of each arm in a round (default: 4)")
    add("--document-length", type=_length, default=32768, help="tokens (default: 32768)")
    add("--question-length", type=positive, default=16)
    add("--streams", type=positive, default=2, help="requests that decode (default: 2)")
    about = "tokens that each of them gets before the long request comes (default: 40)"
    add("--quiet", type=positive, default=40, help=about)
    add("--output", type=Path, default=Path("build/compare/latency.json"))
    add("--output-dir", type=Path, default=Path("build/compare"), help="for the model and logs")
    add("--lock", type=Path, help="a file to lock while an arm runs")


def _length(text: str) -> int:
    if positive(text) < 2 * SHORT_LENGTH:
        raise argparse.ArgumentTypeError(f"{text} is not at least {2 * SHORT_LENGTH}")
    return int(text)


def _run_all(args: argparse.Namespace) -> int:
    """1 when one of kvtier's arms failed."""
    found = {one.name: Found(reason=one.obstacle) for one in args.arms}
    made: list[Row] = []
    with terminable():
        model = make_model(args.output_dir / MODEL, MODEL)
        for number in range(args.rounds):
            first = number % len(args.arms)
            for one in args.arms[first:] + args.arms[:first]:
                own = found[one.name]
                if own.reason:
                    continue
                print(f"round {number + 1} of {args.rounds}: {one.name}", file=sys.stderr)
                try:
                    with locked(args.lock):
                        _measure(args, one, model, own)
                except (KVTierError, OSError) as error:
                    own.reason = first_cause(error)
                    print(f"  cannot run: {own.reason}", file=sys.stderr)
                made = _write(args, model, found)
    print_rows(made)
    print(f"Wrote {args.output}")
    return int(any(own.reason for name, own in found.items() if name.startswith("kvtier")))


def _write(args: argparse.Namespace, model: Path, found: Mapping[str, Found]) -> list[Row]:
    """After each arm, so that what ran is kept."""
    made = rows(args.arms, found)
    about = {one.name: _about(one, found[one.name]) for one in args.arms}
    shape = _shape(args) | {"kv_token_bytes": token_bytes_of(model)}
    write_results(args.output, NAME, made, workload=shape, measures=HOW, arms=about)
    return made


def _measure(args: argparse.Namespace, one: Contender, model: Path, own: Found) -> None:
    """One arm from its server's start to its stop. Raises RequestError where the document of a
    long request was computed."""
    document, question = args.document_length, args.question_length
    sizes = sizes_of(Workload([0], 1, document, question, output_len=1), model)
    with serving(one, model, sizes, args.output_dir / one.name) as running:
        asker, words = client.connect(running.server.base_url, MODEL, _REQUEST_S)
        work = Work(words, document, question, args.streams, args.quiet)
        before = client.hit_counters(asker.base_url)
        made = pairs(asker, work, args.loads)
        own.hits.update(client.hits_between(before, client.hit_counters(asker.base_url)) or {})
    least = _HELD * document
    for window in (window for pair in made for window in (pair.loaded, pair.warm)):
        if window.cached < least:
            raise RequestError(f"only {window.cached:,} tokens of a long request were cached")
    steps = calls.read(running.calls)
    if steps is None:
        raise RequestError("the engine's steps could not be read")
    own.pairs += made
    own.steps += [pair.of_engine(steps) for pair in made]


def rows(arms: Sequence[Contender], found: Mapping[str, Found]) -> list[Row]:
    """Every arm that ran. A ``limit`` is the value of the kvtier arm with which it is compared."""
    ran = {one.name: found[one.name] for one in arms if found[one.name].pairs}
    made: dict[str, Row] = {}
    for name, own in ran.items():
        made |= _felt(name, "gap", [pair.loaded for pair in own.pairs])
        made |= _row(name, "time lost to the load", [pair.lost for pair in own.pairs])
        made |= _felt(name, "step", [pair.loaded for pair in own.steps])
        made |= _row(name, "steps lost to the load", [pair.lost for pair in own.steps])
        spent = [pair.loaded.spent for pair in own.steps]
        made |= _row(name, "longest in the connector", [max(each) for each in spent])
        made |= _row(name, "in the connector", [sum(each) for each in spent])
        made |= _row(name, "ttft", [pair.loaded.ttft for pair in own.pairs])
        made |= _row(name, "load cost", [pair.cost for pair in own.pairs])
    if ran:
        warm = [pair.warm for own in ran.values() for pair in own.pairs]
        made |= _felt(NO_LOAD, "gap", warm)
        made |= _felt(NO_LOAD, "step", [pair.warm for own in ran.values() for pair in own.steps])
        made |= _row(NO_LOAD, "ttft", [window.ttft for window in warm])
    like = {one.name: one.like for one in arms}
    return [_held(row, made, like) for row in made.values()]


def _felt(name: str, what: str, windows: Sequence[Window]) -> dict[str, Row]:
    """``what``: gap or step."""
    every = [gap for window in windows for gap in window.every]
    p99 = Row(f"{name}: {what}, p99", 1000 * percentile(every, 99), "ms")
    lost = {"gap": "time lost", "step": "steps lost"}[what]
    return (
        _row(name, f"quiet {what}", [window.quiet_gap for window in windows])
        | _row(name, f"{what}, median", [window.gap for window in windows])
        | {p99.name: p99}
        | _row(name, f"longest {what}", [window.longest for window in windows])
        | _row(name, lost, [window.lost for window in windows])
    )


def _row(name: str, what: str, values: Sequence[float]) -> dict[str, Row]:
    row = median_row(f"{name}: {what}", [1000 * value for value in values], "ms")
    return {row.name: row}


def _held(row: Row, made: Mapping[str, Row], like: Mapping[str, str | None]) -> Row:
    """Beside that of the kvtier arm with which it is compared."""
    name, _, what = row.name.partition(": ")
    bound = made.get(f"{like.get(name)}: {what}")
    if bound is None or not bound.value or row.value is None:
        return row
    ratio = row.value / bound.value
    return Row(row.name, row.value, row.unit, bound.value, ratio, row.min, row.max)


def _about(one: Contender, own: Found) -> dict[str, Any]:
    return {
        "about": one.about,
        "held_against": one.like,
        "note": one.note,
        "cannot_run": own.reason or None,
        "hit_tokens": {place: round(count) for place, count in own.hits.items()},
        "loads": [_told(pair.loaded) for pair in own.pairs],
        "loads_in_the_engine": [_told(pair.loaded) for pair in own.steps],
        "no_load": [_told(pair.warm) for pair in own.pairs],
        "no_load_in_the_engine": [_told(pair.warm) for pair in own.steps],
    }


def _told(window: Window) -> dict[str, Any]:
    return {
        "gaps": round(statistics.fmean(map(len, window.gaps)), 1),
        "quiet_gap_ms": round(1000 * window.quiet_gap, 2),
        "longest_gap_ms": round(1000 * window.longest, 2),
        "lost_ms": round(1000 * window.lost, 2),
        "ttft_ms": round(1000 * window.ttft, 1),
        "cached_tokens": window.cached,
    }


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    told = ("document_length", "question_length", "streams", "quiet", "loads", "rounds")
    shape = {name: getattr(args, name) for name in told}
    return shape | {"short_length": SHORT_LENGTH, "model": MODEL, "dtype": DTYPE}


if __name__ == "__main__":
    sys.exit(main())
