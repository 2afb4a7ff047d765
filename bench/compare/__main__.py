"""``python -m kvtier.bench.compare``: Long Doc QA over every arm of
:mod:`kvtier.bench.compare.peers.contenders`, in turns.

Machine, model, prompts and memory budget are the same for all. Every round runs every arm once, so
that other work on the machine disturbs all of them. It measures the machine's limits first. The
last round goes on with every arm: documents asked again between new ones, a second engine beside
the first, and the engine's restart. :mod:`kvtier.bench.compare.calls` times every arm's connector.
An arm that cannot run has a row that says why. The results have the form of bench/report.py, and
there are two tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvtier.bench.command import run_command, terminable
from kvtier.bench.compare import limits
from kvtier.bench.compare.arm_result import arm_results
from kvtier.bench.compare.measures import Run
from kvtier.bench.compare.peers.contenders import CONTENDERS, Contender
from kvtier.bench.compare.plot import write_plot
from kvtier.bench.compare.rounds import MIXED, MODEL, first_cause, measured
from kvtier.bench.compare.rows import write
from kvtier.bench.compare.serving import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    DTYPE,
    locked,
    serving,
    sizes_of,
    token_bytes_of,
)
from kvtier.bench.compare.table import print_tables
from kvtier.bench.flags import names_in
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.model import make_model
from kvtier.bench.processes.engine import mode_told
from kvtier.core.errors import KVTierError


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("compare", "Peers and kvtier, side by side.", _add_arguments, _run_all, argv)


def _run_all(args: argparse.Namespace) -> int:
    with terminable():
        return compare(args, make_model(args.output_dir / MODEL, MODEL))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--arms",
        type=names_in(CONTENDERS),
        default=list(CONTENDERS.values()),
        help=f"of {','.join(CONTENDERS)} (default: all)",
    )
    add("--rounds", type=int, default=3, help="times every arm is run, in turns (default: 3)")
    add(
        "--num-documents",
        type=_documents,
        default=4,
        help="at least 3: of fewer, vLLM's cache keeps a part (default: 4)",
    )
    add("--document-length", type=int, default=8192, help="tokens (default: 8192)")
    add("--question-length", type=int, default=128)
    add("--output-len", type=int, default=8)
    add("--output", type=Path, default=Path("build/compare/compare.json"))
    add("--output-dir", type=Path, default=Path("build/compare"), help="for the model and logs")
    add(
        "--resume",
        action="store_true",
        help="go on with the runs of an earlier call with the same sizes",
    )
    add(
        "--lock",
        type=Path,
        help="a file to lock while an arm runs, for machines that others use too",
    )
    parser.set_defaults(repeat_count=1, repeat_mode="tile", hit_miss_ratio=(1, 0), shuffle_seed=0)


def _documents(text: str) -> int:
    if int(text) < 3:
        raise argparse.ArgumentTypeError(f"{text} is not at least 3")
    return int(text)


def compare(args: argparse.Namespace, model: Path) -> int:
    """Run all arms, in turns. Results are written after each, so that what ran is kept. 1 when one
    of kvtier's arms failed."""
    kept = _Kept(args)
    reasons = {one.name: one.obstacle for one in args.arms if one.obstacle}
    token_bytes = token_bytes_of(model)
    shape = _shape(args) | {"kv_token_bytes": token_bytes}
    for number in range(args.rounds):
        if len(kept.limits) <= number:
            print(f"round {number + 1} of {args.rounds}: limits", file=sys.stderr, flush=True)
            kept.keep_limits(_limits(args, CHUNK_TOKENS * token_bytes))
        for one in args.arms:
            if one.name in reasons or sum(run.arm == one.name for run in kept.runs) > number:
                continue
            print(f"round {number + 1} of {args.rounds}: {one.name}", file=sys.stderr, flush=True)
            try:
                with locked(args.lock):
                    kept.keep_run(_run(args, one, model, last=number == args.rounds - 1))
            except (KVTierError, OSError) as error:
                reasons[one.name] = first_cause(error)
                print(f"  cannot run: {reasons[one.name]}", file=sys.stderr, flush=True)
            write(args.output, args.arms, kept.runs, reasons, kept.limits, workload=shape)
    write(args.output, args.arms, kept.runs, reasons, kept.limits, workload=shape)
    print_tables(args.arms, kept.runs, reasons, token_bytes, kept.limits)
    if kept.runs:
        picture, found = args.output.with_suffix(".png"), arm_results(args.arms, kept.runs)
        write_plot(picture, args.arms, found, about(args))
    print(f"Wrote {args.output}")
    return int(any(name.startswith("kvtier") for name in reasons))


def about(args: argparse.Namespace) -> str:
    """What was done, below the title of the picture."""
    rounds = "1 round" if args.rounds == 1 else f"{args.rounds} rounds"
    return f"{args.num_documents} documents of {args.document_length:,} tokens, {rounds}"


def _limits(args: argparse.Namespace, chunk_bytes: int) -> dict[str, float]:
    """Empty when a tool fails. The arms can run without."""
    try:
        with locked(args.lock):
            return limits.measured(args.output_dir, chunk_bytes)
    except OSError as error:
        print(f"  no limits: {first_cause(error)}", file=sys.stderr, flush=True)
        return {}


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    told = ("num_documents", "document_length", "question_length", "output_len", "rounds")
    shape = {name: getattr(args, name) for name in told}
    return shape | {
        "model": MODEL,
        "dtype": DTYPE,
        "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
    }


class _Kept:
    """What ran so far, here and on disk. An interrupted comparison goes on from there
    (``--resume``)."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._runs, self._limits = args.output_dir / "runs.jsonl", args.output_dir / "limits.jsonl"
        if not args.resume:
            self._runs.unlink(missing_ok=True)
            self._limits.unlink(missing_ok=True)
        self.runs = [Run.told(one) for one in _lines(self._runs)]
        self.limits: list[dict[str, float]] = _lines(self._limits)

    def keep_run(self, run: Run) -> None:
        self.runs.append(run)
        _append(self._runs, asdict(run))

    def keep_limits(self, found: dict[str, float]) -> None:
        self.limits.append(found)
        _append(self._limits, found)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, one: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(one) + "\n")


def _run(args: argparse.Namespace, one: Contender, model: Path, last: bool) -> Run:
    """One arm from its server's start to its stop."""
    everything = replace(
        Workload.of(args, [0]), hit_miss_ratio=MIXED
    )  # room for the mixed round's new documents, for all
    sizes = sizes_of(everything, model)
    with serving(one, model, sizes, args.output_dir / one.name) as running:
        run = measured(args, running, last)
        return replace(run, mode=mode_told(running.server.log))


if __name__ == "__main__":
    sys.exit(main())
