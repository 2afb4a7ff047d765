"""What saving costs when nothing is reused: vLLM's throughput on prompts that never repeat, with
and without kvtier.

``python -m kvtier.bench.throughput --rounds 3`` starts engines one after another, with and without
kvtier in turn. Each is a process, and computes the same number of prompts that it has never seen.
kvtier has RAM and NVMe. The ratio of the medians counts: 1.00 means that saving is free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtier.bench.flags import described
from kvtier.bench.model import make_model
from kvtier.bench.report import median_row, print_rows, write_results
from kvtier.cli.launch import TRANSFER

_GOAL = 0.97


def measure(model: str, prompts: int, tokens: int, kvtier: bool) -> float:
    """In a process of its own: tokens computed in a second (prompt and answer), after a warm-up of
    one prompt."""
    from vllm import LLM, SamplingParams

    blocks = 4 * -(-(tokens + 64) // 128)
    more: dict[str, Any] = {"kv_transfer_config": TRANSFER} if kvtier else {}
    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=128,
        max_model_len=tokens + 128,
        num_gpu_blocks_override=blocks,
        **more,
    )
    draw = random.Random(os.getpid())
    vocabulary = llm.get_tokenizer().vocab_size
    asked = [
        {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(tokens)]}
        for _ in range(prompts + 1)
    ]
    settings = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm.generate(asked[:1], settings, use_tqdm=False)
    start = time.perf_counter()
    llm.generate(asked[1:], settings, use_tqdm=False)
    return prompts * (tokens + 16) / (time.perf_counter() - start)


def start(arguments: argparse.Namespace, model: Path, kvtier: bool) -> float:
    """One engine, and its number. Its log is shown when it fails."""
    with tempfile.TemporaryDirectory(dir=Path(arguments.disk).resolve()) as folder:
        # With a connector vLLM reserves other CPU cores than without: both arms get the same.
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        }
        if kvtier:
            environment |= {
                "KVTIER_RAM_BYTES": "1GiB",
                "KVTIER_NVME_PATH": folder,
                "KVTIER_NVME_BYTES": "4GiB",
            }
        out = Path(folder) / "rate.json"
        call = json.dumps([str(model), arguments.prompts, arguments.tokens, kvtier])
        command = [
            sys.executable,
            "-m",
            "kvtier.bench.throughput",
            "--one",
            call,
            "--output",
            str(out),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the engine failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return float(json.loads(out.read_text()))


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="a prompt")
    parser.add_argument("--preset", default="demo", help="model, see kvtier.bench.model")
    parser.add_argument("--models", default="build/models")
    parser.add_argument("--disk", default="build", help="folder on the disk for the NVMe tier")
    parser.add_argument("--output", default="bench/results/throughput.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        Path(arguments.output).write_text(json.dumps(measure(*json.loads(arguments.one))))
        return
    model = make_model(Path(arguments.models) / arguments.preset, arguments.preset)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for kvtier in (False, True):
            rates[kvtier].append(start(arguments, model, kvtier))
            print(
                f"{'kvtier' if kvtier else 'none':8} {rates[kvtier][-1]:10.1f} tokens/s", flush=True
            )
    plain = statistics.median(rates[False])
    ratio = statistics.median(rates[True]) / plain
    name = "vLLM with kvtier RAM + NVMe, prompts never repeat (ratio to without)"
    rows = [
        median_row("vLLM without kvtier, prompts never repeat", rates[False], "tokens/s"),
        median_row(name, rates[True], "tokens/s", plain, ratio),
    ]
    write_results(arguments.output, "throughput", rows)
    print_rows(rows)
    print(f"With kvtier the throughput is {ratio:.3f} of that without (goal {_GOAL}).")


if __name__ == "__main__":
    main()
