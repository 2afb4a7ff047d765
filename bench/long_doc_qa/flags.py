"""Long Doc QA's command line: its flags, and the shapes of workload that have a name."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa.arms import ARMS, Arm, installed
from kvtier.bench.long_doc_qa.work import REPEAT_MODES

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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
"""The shape of a workload; lengths in tokens."""
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # What AWS publishes numbers of for its LMI containers; all else as its runner has it.
    "lmi": {"num_documents": 46, "document_length": 10000, "max_inflight_requests": 4},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; every length is in tokens. What parses them is to be completed by
    :func:`chosen`."""
    add = parser.add_argument
    add(
        "--model", help="directory or name; with --base-url the name it serves (default: its first)"
    )
    add(
        "--base-url",
        type=url,
        metavar="URL",
        help="measure this running server instead of starting one per arm",
    )
    add(
        "--arms",
        type=_arms,
        default=installed(),
        help=f"of {','.join(ARMS)} (default: all that are installed)",
    )
    add(
        "--preset",
        choices=PRESETS,
        help="a shape with a name; lmi: the one that AWS publishes numbers of",
    )
    _add_shape(parser)
    add(
        "--hit-miss-ratio",
        type=_ratio,
        default=(1, 0),
        metavar="H:M",
        help="after H queries, M on unseen documents (default: 1:0)",
    )
    add(
        "--settle-seconds",
        type=seconds,
        default=2.0,
        metavar="S",
        help="pause between warm-up and query (default: 2)",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="for one request (default: 600)",
    )
    add(
        "--output-dir",
        type=Path,
        default=Path("build/long_doc_qa"),
        help="for long_doc_qa.json, .csv, .png and logs (default: build/long_doc_qa)",
    )
    add(
        "--require-same-tokens",
        action="store_true",
        help="exit with 1 when an arm answers differently from none",
    )
    _add_own(parser)


def _add_own(parser: argparse.ArgumentParser) -> None:
    """For servers that the benchmark starts itself."""
    own = parser.add_argument_group("servers started here").add_argument
    about = "float32 makes answers comparable bit by bit (default: auto, the model's own)"
    own("--dtype", choices=["auto", *DTYPE_BYTES], default="auto", help=about)
    own(
        "--block-size",
        type=positive,
        help="vLLM's block in tokens (default: 128 on CPU, 16 on GPU)",
    )
    own(
        "--load-every-hit",
        action="store_true",
        help="load hits even where computing is sooner, as with a tiny model in a test",
    )
    own("--chunk-tokens", type=positive, default=256, help="kvtier's chunk (default: 256)")
    own(
        "--server-args",
        type=words,
        default="",
        metavar="'ARGS'",
        help="more arguments for vLLM, the same for every arm",
    )
    own(
        "--server-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="until a server must be healthy (default: 600)",
    )


def _add_shape(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, about: str, **more: Any) -> None:
        key = flag.removeprefix("--").replace("-", "_")
        others = [f"; {name}: {preset[key]}" for name, preset in PRESETS.items() if key in preset]
        parser.add_argument(
            flag, help=f"{about} (default: {DEFAULTS[key]}{''.join(others)})", **more
        )

    add("--num-documents", "documents", type=positive)
    add("--document-length", "tokens of a document", type=positive)
    add("--question-length", "tokens of the question behind it", type=positive)
    add("--output-len", "tokens of an answer", type=positive)
    add("--repeat-count", "times each document is asked about in the query round", type=positive)
    add("--repeat-mode", "order of repeats: abcabc, aabbcc or shuffled", choices=REPEAT_MODES)
    add("--max-inflight-requests", "requests at once", type=positive)
    add(
        "--shuffle-seed",
        "of documents and order; another number gives documents never seen before",
        type=int,
    )


def chosen(args: argparse.Namespace) -> argparse.Namespace:
    """``args`` with every part of the shape: as given, else the preset's, else the default."""
    preset = PRESETS.get(args.preset or "", {})
    given = {key: getattr(args, key) for key in DEFAULTS if getattr(args, key) is not None}
    return argparse.Namespace(**{**vars(args), **DEFAULTS, **preset, **given})


def _arms(text: str) -> list[Arm]:
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown arm {', '.join(unknown)}; known: {', '.join(ARMS)}"
        )
    return [ARMS[name] for name in text.split(",")]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address; expected for example http://localhost:8000"
        )
    return text


def words(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def _ratio(text: str) -> tuple[int, int]:
    hits, _, misses = text.partition(":")
    if not (hits.isdigit() and misses.isdigit() and int(hits)):
        raise argparse.ArgumentTypeError(f"{text!r} is not H:M with H at least 1, such as 3:1")
    return int(hits), int(misses)
