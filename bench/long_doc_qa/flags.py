"""The command line of Long Doc QA, and the workload shapes that have a name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kvtier.bench.flags import add_engine_flags, add_run_flags, positive, seconds
from kvtier.bench.long_doc_qa.arms import ARMS, installed
from kvtier.bench.long_doc_qa.work import REPEAT_MODES

DEFAULTS: Mapping[str, Any] = {
    "num_documents": 8,
    "document_length": 20000,
    "question_length": 64,
    "output_len": 100,
    "repeat_count": 2,
    "repeat_mode": "tile",
    "max_inflight_requests": 2,
    "shuffle_seed": 0,
}
"""The shape of a workload. Lengths are in tokens."""
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # AWS publishes numbers of this shape for its LMI containers. Its runner has the other defaults.
    "lmi": {"num_documents": 46, "document_length": 10000, "max_inflight_requests": 4},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. Every length is in tokens. :func:`chosen` completes what was parsed."""
    add_run_flags(parser, "long_doc_qa", "server", ARMS, installed())
    add = parser.add_argument
    about = "a shape with a name; lmi: the one of which AWS publishes numbers"
    add("--preset", choices=PRESETS, help=about)
    _add_shape(parser)
    about = "after H queries, M on unseen documents (default: 1:0)"
    add("--hit-miss-ratio", type=_ratio, default=(1, 0), metavar="H:M", help=about)
    about = "pause between warm-up and query (default: 2)"
    add("--settle-seconds", type=seconds, default=2.0, metavar="S", help=about)
    add_engine_flags(parser.add_argument_group("servers started here"))


def _add_shape(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, about: str, **more: Any) -> None:
        key = flag.removeprefix("--").replace("-", "_")
        others = [f"; {name}: {preset[key]}" for name, preset in PRESETS.items() if key in preset]
        about += f" (default: {DEFAULTS[key]}{''.join(others)})"
        parser.add_argument(flag, help=about, **more)

    add("--num-documents", "documents", type=positive)
    add("--document-length", "tokens of a document", type=positive)
    add("--question-length", "tokens of the question behind it", type=positive)
    add("--output-len", "tokens of an answer", type=positive)
    add("--repeat-count", "times each document is asked about in the query round", type=positive)
    add("--repeat-mode", "order of repeats: abcabc, aabbcc or shuffled", choices=REPEAT_MODES)
    add("--max-inflight-requests", "requests at once", type=positive)
    about = "for documents and order; another number gives documents never seen before"
    add("--shuffle-seed", about, type=int)


def chosen(args: argparse.Namespace) -> argparse.Namespace:
    """``args`` with every part of the shape: as given, or as the preset says, or the default."""
    preset = PRESETS.get(args.preset or "", {})
    given = {key: getattr(args, key) for key in DEFAULTS if getattr(args, key) is not None}
    return argparse.Namespace(**{**vars(args), **DEFAULTS, **preset, **given})


def _ratio(text: str) -> tuple[int, int]:
    hits, _, misses = text.partition(":")
    if not (hits.isdigit() and misses.isdigit() and int(hits)):
        raise argparse.ArgumentTypeError(f"{text!r} is not H:M with H at least 1, such as 3:1")
    return int(hits), int(misses)
