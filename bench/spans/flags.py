"""The command line of the benchmark of spans."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.bench.flags import add_engine_flags, names_in, positive, seconds, url
from kvtier.bench.spans.arms import RUN

SHAPE = (
    *("pool", "documents", "requests", "rounds", "zipf", "anchor_length", "document_length"),
    *("question_length", "output_len", "max_inflight_requests", "seed"),
)
"""What goes into the results as the workload."""
_NAMES = {arm.name: arm for arm in RUN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. Every length is in tokens."""
    add = parser.add_argument
    about = "directory or name of a model that vLLM can serve; with --base-url the name served"
    add("--model", help=about)
    about = "train a toy (once, some minutes) and ask it what it knows; sizes are its own"
    add("--toy", action="store_true", help=about)
    about = "ask this running vLLM with kvtier, whose engine.spans is on; needs --prompts"
    add("--base-url", type=url, metavar="URL", help=about)
    about = (
        'your prompts: lines of {"anchor": ..., "documents": [...], "question": ...}, each part '
    )
    about += "a text or token ids; --chunk-tokens is then that engine's"
    add("--prompts", type=Path, metavar="JSONL", help=about)
    about = f"of {','.join(_NAMES)} (default: what suits)"
    add("--arms", type=names_in(_NAMES), help=about)
    add("--pool", type=positive, default=12, help="documents that there are (default: 12)")
    add("--documents", type=positive, default=4, help="of the pool, a prompt (default: 4)")
    add("--requests", type=positive, default=24, help="a round (default: 24)")
    about = "each with documents of its own, on the same server (default: 3)"
    add("--rounds", type=positive, default=3, help=about)
    about = "exponent: how much more often the first of the pool are found (default: 1.0)"
    add("--zipf", type=seconds, default=1.0, metavar="S", help=about)
    about = "tokens that every prompt of a round begins with (default: 128)"
    add("--anchor-length", type=positive, default=128, help=about)
    about = "mean tokens of a document; they vary by half of it (default: 256)"
    add("--document-length", type=positive, default=256, help=about)
    add("--question-length", type=positive, default=32, help="tokens of it (default: 32)")
    add("--output-len", type=positive, default=32, help="tokens of an answer (default: 32)")
    add("--max-inflight-requests", type=positive, default=1, help="at once (default: 1)")
    add("--seed", type=int, default=0, help="of documents, questions and order (default: 0)")
    add("--request-timeout", type=seconds, default=600.0, metavar="S", help="(default: 600)")
    about = "exit with 1 when a reused prefix changed an answer"
    add("--require-same-tokens", action="store_true", help=about)
    folder = Path("build/spans")
    about = f"for spans.json and the servers' logs (default: {folder})"
    add("--output-dir", type=Path, default=folder, help=about)
    add_engine_flags(parser.add_argument_group("servers started here"))
