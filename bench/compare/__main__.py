"""``python -m kvtier.bench.compare``: Long Doc QA over every arm of
:mod:`kvtier.bench.compare.peers.contenders`, in turns.

Machine, model, prompts and memory budget are the same for all. Every round runs every arm once, so
that other work on the machine disturbs all of them. The last round goes on with every arm: a second
engine beside the first, and the engine's restart. :mod:`kvtier.bench.compare.calls` times every
arm's connector. An arm that cannot run has a row that says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvtier.bench.command import terminable
from kvtier.bench.compare.peers.contenders import CONTENDERS, Contender
from kvtier.bench.compare.result import Run, about, rows
from kvtier.bench.compare.rounds import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    DTYPE,
    MODEL,
    first_cause,
    measured,
    serving,
    sizes_of,
    token_bytes_of,
    work_of,
)
from kvtier.bench.flags import described, names_in, positive
from kvtier.bench.model import make_model
from kvtier.bench.processes.engine import mode_told, modes_told
from kvtier.bench.report import Row, print_rows, write_results
from kvtier.core.errors import KVTierError

_SHAPE = ("num_documents", "document_length", "question_length", "output_len", "rounds")


def main() -> int:
    parser = described(__doc__)
    add = parser.add_argument
    known = f"of {','.join(CONTENDERS)} (default: all)"
    add("--arms", type=names_in(CONTENDERS), default=list(CONTENDERS.values()), help=known)
    add("--rounds", type=positive, default=3, help="runs of every arm, in turns (default: 3)")
    least = "at least 3: of fewer, vLLM's cache keeps a part (default: 4)"
    add("--num-documents", type=_documents, default=4, help=least)
    add("--document-length", type=positive, default=8192, help="tokens (default: 8192)")
    add("--question-length", type=positive, default=128)
    add("--output-len", type=positive, default=8)
    add("--output", type=Path, default=Path("build/compare/compare.json"))
    add("--output-dir", type=Path, default=Path("build/compare"), help="for the model and logs")
    resumed = "go on with the runs of an earlier call with the same sizes"
    add("--resume", action="store_true", help=resumed)
    args = parser.parse_args()
    with terminable():
        return compare(args, make_model(args.output_dir / MODEL, MODEL))


def _documents(text: str) -> int:
    if positive(text) < 3:
        raise argparse.ArgumentTypeError(f"{text} is not at least 3")
    return int(text)


def compare(args: argparse.Namespace, model: Path) -> int:
    """Run all arms, in turns. Results are written after each, so that what ran is kept. 1 when one
    of kvtier's arms failed."""
    kept = args.output_dir / "runs.jsonl"
    if not args.resume:
        kept.unlink(missing_ok=True)
    lines = kept.read_bytes().splitlines() if kept.exists() else []
    runs = [msgspec.json.decode(line, type=Run) for line in lines]
    reasons = {one.name: one.obstacle for one in args.arms if one.obstacle}
    for number in range(args.rounds):
        for one in args.arms:
            if one.name in reasons or sum(run.arm == one.name for run in runs) > number:
                continue
            print(f"round {number + 1} of {args.rounds}: {one.name}", file=sys.stderr, flush=True)
            try:
                runs.append(_run(args, one, model, last=number == args.rounds - 1))
            except (KVTierError, OSError) as error:
                reasons[one.name] = first_cause(error)
                print(f"  cannot run: {reasons[one.name]}", file=sys.stderr, flush=True)
            else:
                with kept.open("ab") as file:
                    file.write(msgspec.json.encode(runs[-1]) + b"\n")
            write(args, runs, reasons, token_bytes_of(model))
    made = write(args, runs, reasons, token_bytes_of(model))
    print_rows(made)
    print(f"Wrote {args.output}")
    return int(any(name.startswith("kvtier") for name in reasons))


def write(
    args: argparse.Namespace, runs: Sequence[Run], reasons: dict[str, str], token_bytes: int
) -> list[Row]:
    made = rows(args.arms, runs, token_bytes)
    shape = {name: getattr(args, name) for name in _SHAPE}
    shape |= {"model": MODEL, "dtype": DTYPE, "kv_token_bytes": token_bytes}
    shape |= {"block_tokens": BLOCK_TOKENS, "chunk_tokens": CHUNK_TOKENS}
    engines = modes_told(run.mode for run in runs)
    arms = about(args.arms, runs, reasons)
    write_results(args.output, "compare", made, workload=shape, engines=engines, arms=arms)
    return made


def _run(args: argparse.Namespace, one: Contender, model: Path, last: bool) -> Run:
    sizes = sizes_of(work_of(args, [0]), model)
    with serving(one, model, sizes, args.output_dir / one.name) as running:
        run = measured(args, running, last)
        return replace(run, mode=mode_told(running.server.log))


if __name__ == "__main__":
    sys.exit(main())
