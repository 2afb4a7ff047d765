"""``make demo``: what kvtier gains on real vLLM on this machine. It takes about ten minutes on two
idle cores.

It makes a small model in ``build/demo/kvtier-demo`` (once) and runs Long Doc QA over the arms of
one host. Computing a document of this model takes seconds, and the size of its KV cache is in
proportion to that as a real model's is. It computes in float32, so that every arm must give exactly
the same tokens. This is checked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.bench.long_doc_qa import run as long_doc_qa
from kvtier.bench.model import make_model
from kvtier.core.errors import KVTierError

_MODEL = "kvtier-demo"
_SHAPE = (
    *(
        "--num-documents",
        "4",
        "--document-length",
        "4096",
        "--question-length",
        "128",
        "--output-len",
        "16",
    ),
    *(
        "--repeat-count",
        "2",
        "--max-inflight-requests",
        "1",
        "--dtype",
        "float32",
        "--require-same-tokens",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvtier.bench.demo", description="Show what kvtier gains on this machine."
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("build/demo"), help="(default: build/demo)"
    )
    given, more = parser.parse_known_args(argv)
    begun = time.monotonic()
    try:
        model = make_model(given.output_dir / _MODEL, "demo")
        status = long_doc_qa.run(_arguments(model, given.output_dir, more))
    except KVTierError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print(
        f"Took {time.monotonic() - begun:.0f} s. Logs of the servers: "
        f"{given.output_dir / 'servers'}"
    )
    return status


def _arguments(model: Path, folder: Path, more: Sequence[str]) -> argparse.Namespace:
    """The demo's arguments of Long Doc QA. ``more`` are flags that come after the demo's own, and
    so win."""
    parser = argparse.ArgumentParser(prog="kvtier.bench.demo")
    long_doc_qa.add_arguments(parser)
    return parser.parse_args(["--model", str(model), "--output-dir", str(folder), *_SHAPE, *more])


if __name__ == "__main__":
    sys.exit(main())
