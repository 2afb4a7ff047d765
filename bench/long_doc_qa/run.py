"""Long Doc QA: how long readers of long documents wait for the first token, with and without
kvtier.

``kvtier bench long-doc-qa`` or ``python -m kvtier.bench.long_doc_qa``. Three rounds an arm:
*pre-warm-up* (a few unrelated prompts), *warm-up* (every document once: the caches fill) and
*query* (every document again, another question at its end: the caches are read; only this round
counts). Against a server of yours (``--base-url``), or against servers started here, one per arm
(:mod:`kvtier.bench.long_doc_qa.arms`). The shape follows LMCache's benchmark of the same name
(LMCache/LMCache, benchmarks/long_doc_qa).

A running server has no arm without a cache to be held against: there the warm-up is measured too,
    as ``cold``.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.bench.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.long_doc_qa import client
from kvtier.bench.long_doc_qa.arms import COLD, Arm, Sizes, filled, server_args
from kvtier.bench.long_doc_qa.flags import DEFAULTS, DTYPE_BYTES, add_arguments, chosen
from kvtier.bench.long_doc_qa.report import (
    Round,
    print_table,
    summarise,
    verdict,
    write_csv,
    write_json,
)
from kvtier.bench.long_doc_qa.work import Ask, Workload
from kvtier.bench.model import kv_token_bytes, read_config
from kvtier.bench.report import machine_facts
from kvtier.bench.servers import VllmServer
from kvtier.core.errors import ConfigError, KVTierError
from kvtier.core.extras import require

__all__ = ["add_arguments", "run"]

if TYPE_CHECKING:
    from rich.progress import Progress

_OTHER_SERVER = "server"


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a request failed (or answers differ and must not).

    Raises KVTierError when a package is missing, or a server does not come up or does not answer.
    """
    require("bench")
    args = chosen(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with terminable(), progress_bars() as progress:
        if args.base_url:
            asker, words = client.connect(args.base_url, args.model, args.request_timeout)
            rounds = _measure_running(args, asker, words, progress)
            return conclude(args, rounds, asker)
        rounds = [_measure_own(args, arm, progress) for arm in args.arms]
    return conclude(args, rounds)


def conclude(
    args: argparse.Namespace, rounds: Sequence[Round], running: client.Client | None = None
) -> int:
    """Print the table, write the files; the exit status. ``running``: the server that was not
    started here."""
    from kvtier.bench.long_doc_qa.plot import write_plot

    failed = [outcome for arm in rounds for outcome in arm.outcomes if not outcome.successful]
    for outcome in failed[:3]:
        print(f"a request failed: {outcome.error}", file=sys.stderr)
    summaries = summarise(rounds)
    shape = _shape(args, running)
    files = [
        write_csv(args.output_dir, rounds),
        write_json(args.output_dir, summaries, rounds, workload=shape),
    ]
    same, words = verdict(summaries)
    if summaries:
        print_table(summaries)
        print(words)
        files.append(write_plot(args.output_dir, summaries, _subtitle(args, running)))
    print("Wrote", ", ".join(map(str, files)))
    return 1 if failed or (args.require_same_tokens and not same) else 0


def _measure_running(
    args: argparse.Namespace, asker: client.Client, words: Sequence[int | str], progress: Progress
) -> list[Round]:
    """The cold round and the query round: the server has no arm without a cache, so its first
    answers are the base."""
    rounds = _Rounds(
        asker, Workload.of(args, words), args.max_inflight_requests, _OTHER_SERVER, progress
    )
    rounds.pre_warm_up()
    cold = rounds.cold()
    time.sleep(args.settle_seconds)
    return [cold, rounds.query()]


def _measure_own(args: argparse.Namespace, arm: Arm, progress: Progress) -> Round:
    """One arm from its server's start to its stop; the arm's NVMe folder and companion live as
    long."""
    place = args.output_dir / "servers" / arm.name
    shutil.rmtree(place, ignore_errors=True)
    (place / "nvme").mkdir(parents=True)
    with run_folder() as run, ExitStack() as ends:
        ends.callback(shutil.rmtree, place / "nvme", ignore_errors=True)
        sizes = _sizes(args)
        names = sizes.names((place / "nvme").resolve(), run)
        if arm.beside:
            command = [word.format_map(names) for word in arm.beside]
            ready = partial(listens, run / SOCKET)
            ends.enter_context(
                companion(command, filled(arm.beside_env, names), ready, place / "beside.log")
            )
        first, second = (
            own_server(args, arm, sizes, names, place / log) for log in ("server.log", "second.log")
        )
        _start(arm, first, progress, ends)
        return _three_rounds(args, arm, _Engines(first, second, ends), progress)


def _start(arm: Arm, server: VllmServer, progress: Progress, ends: ExitStack) -> None:
    starting = progress.add_task(f"{arm.name}: server", total=None)
    ends.enter_context(server)
    progress.remove_task(starting)


class _Engines(NamedTuple):
    """``second`` is started only by arms that have one; what is started ends with ``ends``."""

    first: VllmServer
    second: VllmServer
    ends: ExitStack


def _three_rounds(
    args: argparse.Namespace, arm: Arm, engines: _Engines, progress: Progress
) -> Round:
    def connected(server: VllmServer) -> _Rounds:
        asker, words = client.connect(
            server.base_url, served_name(args.model), args.request_timeout
        )
        return _Rounds(
            asker, Workload.of(args, words), args.max_inflight_requests, arm.name, progress
        )

    rounds = connected(engines.first)
    rounds.fill()
    time.sleep(args.settle_seconds)
    if arm.restart_before_query:
        restarting = progress.add_task(f"{arm.name}: restart", total=None)
        engines.first.restart()
        progress.remove_task(restarting)
        rounds = connected(engines.first)
        rounds.pre_warm_up()
    elif arm.second_engine:
        _start(arm, engines.second, progress, engines.ends)
        rounds = connected(engines.second)
        rounds.pre_warm_up()
    return rounds.query()


def _sizes(args: argparse.Namespace) -> Sizes:
    """What the arms' caches must hold for this model and workload."""
    if not args.model:
        raise ConfigError(
            "--model is missing: a directory or a name that vLLM can serve (or --base-url of "
            "a server)"
        )
    block, token_bytes = geometry(args)
    return Sizes(
        Workload.of(args, [0]), args.max_inflight_requests, block, args.chunk_tokens, token_bytes
    )


def geometry(args: argparse.Namespace) -> tuple[int, int]:
    """Tokens of vLLM's block here, and bytes of a token's KV in all layers."""
    config = read_config(args.model)
    dtype = (
        args.dtype
        if args.dtype != "auto"
        else str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    )
    return args.block_size or (128 if on_cpu() else 16), kv_token_bytes(
        config, DTYPE_BYTES.get(dtype, 2)
    )


def own_server(
    args: argparse.Namespace, arm: Arm, sizes: Sizes, names: Mapping[str, str], log: Path
) -> VllmServer:
    """An arm's server, not started."""
    command = [
        *shared_args(args, sizes.block_tokens),
        *server_args(arm, sizes, load_every_hit=args.load_every_hit),
    ]
    env = filled(arm.kvtier or {}, names)
    if on_cpu():
        command.append("--enforce-eager")
        env["VLLM_CPU_KVCACHE_SPACE"] = str(sizes.gpu_gib(arm))
        # With a connector vLLM reserves other CPU cores than without; all arms must compute on the
        # same ones.
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    command += shlex.split(args.server_args)
    return VllmServer(args.model, command, env, log, args.server_timeout)


def shared_args(args: argparse.Namespace, block_tokens: int) -> list[str]:
    """vLLM's arguments that every server started here has."""
    command = ["--served-model-name", served_name(args.model), "--dtype", args.dtype]
    return [
        *command,
        "--block-size",
        str(block_tokens),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
    ]


def on_cpu() -> bool:
    return "gpu" not in machine_facts()


def served_name(model: str) -> str:
    """What the model is called in requests and results: its last name, never a path."""
    return Path(model).name


class _Rounds:
    """The rounds of one arm, each with its progress bar."""

    def __init__(
        self, asker: client.Client, workload: Workload, inflight: int, arm: str, progress: Progress
    ) -> None:
        self._asker = asker
        self._workload = workload
        self._inflight = inflight
        self._arm = arm
        self._progress = progress

    def fill(self) -> None:
        """Pre-warm-up and warm-up. Raises RequestError when a request fails: the query round would
        measure nothing."""
        self.pre_warm_up()
        self._must_succeed(self._round("warm-up", self._workload.warm_up()))

    def pre_warm_up(self) -> None:
        self._must_succeed(self._round("pre-warm-up", self._workload.pre_warm_up()))

    def cold(self) -> Round:
        """Every document for the first time, with answers as long as the query round's, so that
        both compare."""
        return self._counted(COLD, self._workload.warm_up(self._workload.output_len))

    def query(self) -> Round:
        return self._counted(self._arm, self._workload.queries())

    def _counted(self, arm: str, asks: Sequence[Ask]) -> Round:
        before = client.hit_counters(self._asker.base_url)
        outcomes = self._round("query" if arm == self._arm else arm, asks)
        if arm == COLD:
            self._must_succeed(outcomes)
        after = client.hit_counters(self._asker.base_url)
        hits = None
        if before is not None and after is not None:
            hits = {tier: after[tier] - before.get(tier, 0.0) for tier in after}
        return Round(arm, outcomes, hits)

    def _round(self, name: str, asks: Sequence[Ask]) -> list[client.Outcome]:
        task = self._progress.add_task(f"{self._arm}: {name}", total=len(asks))
        advance: Callable[[], None] = lambda: self._progress.advance(task)  # noqa: E731
        return self._asker.run(asks, self._inflight, advance)

    def _must_succeed(self, outcomes: Sequence[client.Outcome]) -> None:
        for outcome in outcomes:
            if not outcome.successful:
                raise client.RequestError(
                    f"arm {self._arm}: a request before the query round failed: {outcome.error}"
                )


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM stops the servers as Ctrl-C does, instead of leaving them behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns: tuple[Any, ...] = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        yield progress


def _shape(args: argparse.Namespace, running: client.Client | None) -> dict[str, Any]:
    """The workload's parameters as they go into the results."""
    shape = {name: getattr(args, name) for name in DEFAULTS}
    shape["hit_miss_ratio"] = ":".join(map(str, args.hit_miss_ratio))
    if running is not None:
        return shape | {
            "model": served_name(running.model),
            "server": "a running one; machine is its client's",
        }
    return shape | {
        "model": served_name(args.model or ""),
        "dtype": args.dtype,
        "chunk_tokens": args.chunk_tokens,
    }


def _subtitle(args: argparse.Namespace, running: client.Client | None) -> str:
    """What was asked of whom. Of a running server nothing is known here but what it says itself."""
    asked = (
        f"{args.num_documents} documents of {args.document_length:,} tokens, each asked "
        f"{args.repeat_count} times"
    )
    parts = [f"{asked} ({args.repeat_mode}), {args.max_inflight_requests} in flight"]
    if running is not None:
        parts += [
            f"model {served_name(running.model)}",
            f"vLLM {running.version}" if running.version else "",
        ]
        return "; ".join([*filter(None, parts), "a server that ran already"])
    facts = machine_facts()
    parts += [
        f"model {served_name(args.model)}" if args.model else "",
        f"vLLM {facts.get('vllm', 'elsewhere')}",
    ]
    return "; ".join(
        [*filter(None, parts), str(facts.get("gpu", f"{facts['cpu']}, {facts['cores']} cores"))]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvtier.bench.long_doc_qa", description="Long Doc QA")
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KVTierError as error:
        print(f"long-doc-qa: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
