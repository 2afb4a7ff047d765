"""Time to the first token of hits from NVMe, on one slow disk and on four, of a real engine.

    python -m kvtier.bench.micro.disks_engine

Two engines are asked for the same documents in turn. RAM keeps one document, and the disks all of
them. A disk is a folder behind the throttle of :mod:`kvtier.bench.micro.disks`. Every hit is
loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvtier.tiers.nvme.files
from kvtier.bench.flags import described
from kvtier.bench.micro.disks import Throttle
from kvtier.bench.model import kv_token_bytes, make_model, read_config
from kvtier.bench.report import Row, median_row, print_rows, write_results
from kvtier.bench.throttled import Arm, asked, serve_documents

_DISKS = {"1 slow disk": 1, "4 slow disks": 4}
_DOCUMENTS, _TOKENS = 4, 2048 + 64


def begun(disks: int, rate: float, model: Path, folder: Path) -> Arm:
    paths = [str(folder / f"{disks}-{at}") for at in range(disks)]
    tier = {
        "KVTIER_NVME_PATH": ",".join(paths),
        "KVTIER_NVME_BYTES": "1GiB",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the throttle is where the tier is
    }
    command = ("kvtier.bench.micro.disks_engine", "--rate", str(rate))
    return Arm("always", model, _TOKENS, tier, folder / f"{disks}.log", command)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times every document is a hit")
    parser.add_argument("--rate", type=float, default=15e6, help="bytes a second of a disk")
    parser.add_argument("--models", type=Path, default=Path("build/models"))
    parser.add_argument("--output", default="")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        folders, files = os.environ["KVTIER_NVME_PATH"].split(","), kvtier.tiers.nvme.files
        vars(files)["os"] = Throttle(dict.fromkeys(map(Path, folders), arguments.rate))
        serve_documents(*json.loads(arguments.engine))
        return
    model = make_model(arguments.models / "demo", "demo")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtier-bench-"))).resolve()
        engines = dict[str, Arm]()
        for name, disks in _DISKS.items():
            engines[name] = begun(disks, arguments.rate, model, folder)
            stack.callback(engines[name].stop)
        for engine in engines.values():
            engine.hear()
        cold = asked(engines, range(_DOCUMENTS), list(engines))
        hits = asked(engines, [*range(_DOCUMENTS)] * arguments.rounds, list(engines))
    rows, one = list[Row](), statistics.median(each.seconds for each in hits["1 slow disk"])
    for name in _DISKS:
        for what, answers in (("computed", cold[name]), ("a hit", hits[name])):
            times = [answer.seconds for answer in answers]
            ratio = statistics.median(times) / one
            rows.append(median_row(f"{name}: TTFT, {what}", times, "s", one, ratio))
        cached = [answer.cached for answer in hits[name]]
        rows.append(median_row(f"{name}: tokens of a hit", cached, "tokens"))
    print_rows(rows)
    if arguments.output:
        size = _TOKENS * kv_token_bytes(read_config(model), 4)
        more: dict[str, Any] = {"document_bytes": size, "rate_bytes_per_second": arguments.rate}
        write_results(arguments.output, "disks_engine", rows, **more)


if __name__ == "__main__":
    main()
