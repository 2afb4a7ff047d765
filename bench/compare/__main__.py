"""``python -m kvtier.bench.compare``: Long Doc QA over every arm of :mod:`kvtier.bench.compare.contenders`, in turns.

Same machine, model, prompts and memory budget; every round runs every arm once, so that what the machine does besides
falls on all. An arm that cannot run is a row that says why. Results: the one form of bench/report.py, and a table.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from kvtier.bench import long_doc_qa_client as client
from kvtier.bench.companion import run_folder
from kvtier.bench.compare.beside import beside
from kvtier.bench.compare.contenders import CONTENDERS, Contender, names, rendered
from kvtier.bench.compare.plot import write_plot
from kvtier.bench.compare.table import Run, print_table, standings, throughput, write
from kvtier.bench.long_doc_qa_arms import Arm, Sizes, server_args
from kvtier.bench.long_doc_qa_work import Workload
from kvtier.bench.model import kv_token_bytes, make_model, read_config
from kvtier.bench.servers import VllmServer, free_port
from kvtier.errors import KVTierError

_MODEL = "qwen"
_DTYPE, _DTYPE_BYTES = "bfloat16", 2
_BLOCK_TOKENS, _CHUNK_TOKENS = 128, 256
_INFLIGHT = 1
_SETTLE_S = 3.0
_START_S = 300.0
_REQUEST_S = 300.0
_REASON_CHARACTERS = 400


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers, as Ctrl-C does
    try:
        model = make_model(args.output_dir / _MODEL, _MODEL)
        return compare(args, model)
    except KVTierError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvtier.bench.compare", description="Peers and kvtier, side by side.")
    add = parser.add_argument
    add("--arms", type=_arms, default=list(CONTENDERS.values()), help=f"of {','.join(CONTENDERS)} (default: all)")
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
    add("--resume", action="store_true", help="go on with the runs of an earlier call with the same sizes")
    add("--lock", type=Path, help="a file to lock while an arm runs, for machines that others use too")
    parser.set_defaults(repeat_count=1, repeat_mode="tile", hit_miss_ratio=(1, 0), shuffle_seed=0)
    return parser.parse_args(argv)


def _documents(text: str) -> int:
    if int(text) < 3:
        raise argparse.ArgumentTypeError(f"{text} is not at least 3")
    return int(text)


def _arms(text: str) -> list[Contender]:
    unknown = [name for name in text.split(",") if name not in CONTENDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown arm {', '.join(unknown)}; known: {', '.join(CONTENDERS)}")
    return [CONTENDERS[name] for name in text.split(",")]


def compare(args: argparse.Namespace, model: Path) -> int:
    """Run all arms, in turns; results are written after each, so that what ran is kept. 1 when one of ours failed."""
    kept = args.output_dir / "runs.jsonl"
    runs = _earlier(kept) if args.resume else []
    if not args.resume:
        kept.unlink(missing_ok=True)
    reasons = {one.name: one.obstacle for one in args.arms if one.obstacle}
    shape = {
        name: getattr(args, name) for name in ("num_documents", "document_length", "question_length", "output_len")
    }
    shape |= {"kv_token_bytes": _token_bytes(model)}
    shape |= {"rounds": args.rounds, "dtype": _DTYPE, "block_tokens": _BLOCK_TOKENS, "chunk_tokens": _CHUNK_TOKENS}
    for number in range(args.rounds):
        for one in args.arms:
            if one.name in reasons or sum(run.arm == one.name for run in runs) > number:
                continue
            print(f"round {number + 1} of {args.rounds}: {one.name}", file=sys.stderr, flush=True)
            try:
                with _lock(args.lock):
                    runs.append(_run(args, one, model))
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(runs[-1])) + "\n")
            except (KVTierError, OSError) as error:
                reasons[one.name] = _short(error)
                print(f"  cannot run: {reasons[one.name]}", file=sys.stderr, flush=True)
            write(args.output, args.arms, runs, reasons, workload=shape | {"model": _MODEL})
    print_table(args.arms, runs, reasons)
    if runs:
        about = f"{args.num_documents} documents of {args.document_length:,} tokens, {args.rounds} rounds"
        write_plot(args.output.with_suffix(".png"), args.arms, standings(args.arms, runs), about)
    print(f"Wrote {args.output}")
    return int(any(name.startswith("kvtier") for name in reasons))


def _earlier(kept: Path) -> list[Run]:
    lines = kept.read_text().splitlines() if kept.exists() else []
    told = [json.loads(line) for line in lines]
    return [Run(**(one | {"outcomes": [client.Outcome(**each) for each in one["outcomes"]]})) for one in told]


def _run(args: argparse.Namespace, one: Contender, model: Path) -> Run:
    """One arm from its server's start to its stop."""
    place = (args.output_dir / one.name).resolve()
    shutil.rmtree(place, ignore_errors=True)
    (place / "nvme").mkdir(parents=True)
    sizes = Sizes(Workload.of(args, [0]), _INFLIGHT, _BLOCK_TOKENS, _CHUNK_TOKENS, _token_bytes(model))
    with run_folder() as run, ExitStack() as ends:
        ends.callback(shutil.rmtree, place / "nvme", ignore_errors=True)
        values = names(sizes, place, run, (free_port(), free_port(), free_port()))
        if one.yaml is not None:
            (place / "lmcache.yaml").write_text(json.dumps(rendered(one.yaml, values)))  # JSON is YAML
        if one.beside:
            ends.enter_context(beside(one, values, run, place / "beside.log"))
        server = ends.enter_context(_server(args, one, model, sizes, values))
        return _three_rounds(args, one, server)


def _three_rounds(args: argparse.Namespace, one: Contender, server: VllmServer) -> Run:
    """Pre-warm-up, warm-up (fills the caches), query (reads them; the only one that counts)."""
    asker, words = client.connect(server.base_url, _MODEL, _REQUEST_S)
    work = Workload.of(args, words)
    fill = 0.0
    for asks in (work.pre_warm_up(), work.warm_up()):
        outcomes = asker.run(asks, _INFLIGHT, _nothing)
        for outcome in outcomes:
            if not outcome.successful:
                raise client.RequestError(f"a request before the query round failed: {outcome.error}")
        fill = throughput(outcomes)
    time.sleep(_SETTLE_S)
    before = _cpu_s()
    outcomes = asker.run(work.queries(), _INFLIGHT, _nothing)
    return Run(one.name, outcomes, fill, _cpu_s() - before)


def _cpu_s() -> float:
    """CPU seconds of the whole machine since its start, the kernel's work for disks and sockets included."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _server(
    args: argparse.Namespace, one: Contender, model: Path, sizes: Sizes, values: Mapping[str, str]
) -> VllmServer:
    arm = Arm(one.name, one.about, keeps_all_on_gpu=one.keeps_all_on_gpu)
    command = ["--served-model-name", _MODEL, "--dtype", _DTYPE, "--block-size", str(_BLOCK_TOKENS), "--enforce-eager"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *server_args(arm, sizes)]
    if one.connector is not None:
        connector = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | rendered(one.connector, values)
        command += ["--kv-transfer-config", json.dumps(connector, separators=(",", ":"))]
    env = {name: template.format_map(values) for name, template in one.env.items()}
    env["VLLM_CPU_KVCACHE_SPACE"] = str(sizes.gpu_gib(arm))
    env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"  # with a connector vLLM reserves other cores than without
    log = Path(values["place"]) / "server.log"
    return VllmServer(str(model), command, env, log, _START_S, one.interpreter)


@contextmanager
def _lock(path: Path | None) -> Iterator[None]:
    """Machines that are shared: one arm at a time holds this file."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _token_bytes(model: Path) -> int:
    return kv_token_bytes(read_config(str(model)), _DTYPE_BYTES)


def _short(error: Exception) -> str:
    """The first of the causes that a server's log tells, or the beginning of the message."""
    lines = str(error).splitlines()
    causes = lines[lines.index("its first errors:") + 1 :][:1] if "its first errors:" in lines else lines[:1]
    return " ".join(causes)[:_REASON_CHARACTERS]


def _nothing() -> None:
    """Nobody watches."""


if __name__ == "__main__":
    sys.exit(main())
