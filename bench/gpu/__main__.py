"""The GPU path on this machine's GPU: copies, how they are queued, and by how much they slow
computing.

    python -m kvtier.bench.gpu [--rounds N] [--parts copies compute] [--output FILE]

It needs torch, numpy and Triton, and takes some minutes. Without a CUDA device it says so and exits
with 2. The KV of ``--tokens`` (4 GiB for 32768 of the largest shape) is needed twice in host
memory, which is page-locked, and twice in device memory.
"""

from __future__ import annotations

import sys

import torch

from kvtier.bench.flags import described
from kvtier.bench.gpu.copies import SHAPES, measure_copies, measure_slowdown
from kvtier.bench.report import write_results

PARTS = ("copies", "compute")


def main(argv: list[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--tokens", type=int, default=32768, help="of the prompt that is saved and loaded"
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--output", default="bench/results/gpu.json")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "kvtier.bench.gpu: no CUDA device is here (or torch is built without CUDA): nothing "
            "measured",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    if "copies" in given.parts:
        rows += measure_copies(given.shapes, given.tokens, given.rounds, device)
    if "compute" in given.parts:
        rows += measure_slowdown(given.shapes, given.rounds, device)
    write_results(given.output, "gpu", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
