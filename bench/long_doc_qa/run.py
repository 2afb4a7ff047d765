"""Long Doc QA: how long readers of long documents wait for the first token, with and without
kvtier.

``kvtier bench long-doc-qa`` or ``python -m kvtier.bench.long_doc_qa``. Three rounds an arm:
*pre-warm-up* (a few unrelated prompts), *warm-up* (every document once: the caches fill) and
*query* (every document again with another question at its end: the caches are read). Only the query
round counts. After a restart its first prompt is the server's first. The servers are started here,
one for each arm (:mod:`kvtier.bench.long_doc_qa.arms`), or ``--base-url`` names a server that runs.
The shape follows LMCache's benchmark of the same name (LMCache/LMCache, benchmarks/long_doc_qa).

A server that runs has no arm without a cache to be compared with. There the warm-up is measured
too, as ``cold``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.bench.command import (
    failures,
    progress_bars,
    run_command,
    stepping,
    terminable,
    waiting,
    wrote,
)
from kvtier.bench.long_doc_qa.arms import COLD, Arm, Sizes, filled, server_args
from kvtier.bench.long_doc_qa.flags import DEFAULTS, add_arguments, chosen
from kvtier.bench.long_doc_qa.report import (
    NAME,
    Round,
    csv_lines,
    print_table,
    summarise,
    verdict,
    write_json,
)
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.engine import (
    cpu_env,
    engine,
    engine_facts,
    geometry,
    mode_told,
    modes_told,
    require_model,
    served_name,
)
from kvtier.bench.processes.servers import VllmServer
from kvtier.bench.report import write_csv
from kvtier.bench.requests import client
from kvtier.bench.requests.prompts import Ask
from kvtier.core.extras import require

__all__ = ["add_arguments", "run"]

if TYPE_CHECKING:
    from rich.progress import Progress

_OTHER_SERVER = "server"


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a request failed, or answers differ and must not.

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
    """Print the table, and write the files. The exit status. ``running``: the server that was not
    started here."""
    from kvtier.bench.long_doc_qa.plot import write_plot

    failed = failures("request", [outcome for arm in rounds for outcome in arm.outcomes])
    summaries = summarise(rounds)
    shape, mode = _shape(args, running), modes_told(one.mode for one in rounds)
    files = [
        write_csv(args.output_dir / f"{NAME}.csv", csv_lines(rounds)),
        write_json(args.output_dir, summaries, rounds, workload=shape, engines=mode),
    ]
    same, words = verdict(summaries)
    if summaries:
        print_table(summaries, mode)
        print(words)
        files.append(write_plot(args.output_dir, summaries, _subtitle(args, running)))
    wrote(files)
    return 1 if failed or (args.require_same_tokens and not same) else 0


def _measure_running(
    args: argparse.Namespace, asker: client.Client, words: Sequence[int | str], progress: Progress
) -> list[Round]:
    """The cold round and the query round. The server has no arm without a cache, so its first
    answers are the base."""
    work = Workload.of(args, words)
    rounds = _Rounds(asker, work, args.max_inflight_requests, _OTHER_SERVER, progress)
    rounds.pre_warm_up()
    cold = rounds.cold()
    time.sleep(args.settle_seconds)
    return [cold, rounds.query()]


def _measure_own(args: argparse.Namespace, arm: Arm, progress: Progress) -> Round:
    """One arm from its server's start to its stop. Its NVMe folder and its companion end with
    it."""
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
            env = filled(arm.beside_env, names)
            ends.enter_context(companion(command, env, ready, place / "beside.log"))
        first, second = (
            own_server(args, arm, sizes, names, place / log) for log in ("server.log", "second.log")
        )
        _start(arm, first, progress, ends)
        measured = _three_rounds(args, arm, _Engines(first, second, ends), progress)
        return replace(measured, mode=mode_told(first.log))


def _start(arm: Arm, server: VllmServer, progress: Progress, ends: ExitStack) -> None:
    with waiting(progress, f"{arm.name}: server"):
        ends.enter_context(server)


class _Engines(NamedTuple):
    """Only arms that have a ``second`` engine start it. Both stop with ``ends``."""

    first: VllmServer
    second: VllmServer
    ends: ExitStack


def _three_rounds(
    args: argparse.Namespace, arm: Arm, engines: _Engines, progress: Progress
) -> Round:
    def connected(server: VllmServer) -> _Rounds:
        name = served_name(args.model)
        asker, words = client.connect(server.base_url, name, args.request_timeout)
        work = Workload.of(args, words)
        return _Rounds(asker, work, args.max_inflight_requests, arm.name, progress)

    rounds = connected(engines.first)
    rounds.fill()
    time.sleep(args.settle_seconds)
    if arm.restart_before_query:
        with waiting(progress, f"{arm.name}: restart"):
            engines.first.restart()
        rounds = connected(engines.first)
    elif arm.second_engine:
        _start(arm, engines.second, progress, engines.ends)
        rounds = connected(engines.second)
        rounds.pre_warm_up()
    return rounds.query()


def _sizes(args: argparse.Namespace) -> Sizes:
    """What the arms' caches must hold for this model and workload."""
    require_model(args, "server")
    block, token_bytes = geometry(args)
    work = Workload.of(args, [0])
    return Sizes(work, args.max_inflight_requests, block, args.chunk_tokens, token_bytes)


def own_server(
    args: argparse.Namespace, arm: Arm, sizes: Sizes, names: Mapping[str, str], log: Path
) -> VllmServer:
    """An arm's server, not started."""
    env = filled(arm.kvtier or {}, names) | cpu_env(sizes.gpu_gib(arm))
    cache = server_args(arm, sizes, load_every_hit=args.load_every_hit)
    return engine(args, sizes.block_tokens, cache, env, log)


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
        """Pre-warm-up and warm-up. Raises RequestError when a request fails."""
        self.pre_warm_up()
        self._must_succeed(self._round("warm-up", self._workload.warm_up()))

    def pre_warm_up(self) -> None:
        self._must_succeed(self._round("pre-warm-up", self._workload.pre_warm_up()))

    def cold(self) -> Round:
        """Every document for the first time. Answers are as long as the query round's, so that both
        can be compared."""
        return self._counted(COLD, self._workload.warm_up(self._workload.output_len))

    def query(self) -> Round:
        return self._counted(self._arm, self._workload.queries())

    def _counted(self, arm: str, asks: Sequence[Ask]) -> Round:
        before = client.hit_counters(self._asker.base_url)
        outcomes = self._round("query" if arm == self._arm else arm, asks)
        if arm == COLD:
            self._must_succeed(outcomes)
        after = client.hit_counters(self._asker.base_url)
        return Round(arm, outcomes, client.hits_between(before, after))

    def _round(self, name: str, asks: Sequence[Ask]) -> list[client.Outcome]:
        advance = stepping(self._progress, f"{self._arm}: {name}", len(asks))
        return self._asker.run(asks, self._inflight, advance)

    def _must_succeed(self, outcomes: Sequence[client.Outcome]) -> None:
        client.all_succeeded(f"arm {self._arm}", outcomes)


def _shape(args: argparse.Namespace, running: client.Client | None) -> dict[str, Any]:
    """The workload's parameters as they go into the results."""
    shape = {name: getattr(args, name) for name in DEFAULTS}
    shape["hit_miss_ratio"] = ":".join(map(str, args.hit_miss_ratio))
    if running is not None:
        server = "a running one; machine is its client's"
        return shape | {"model": served_name(running.model), "server": server}
    own = {"dtype": args.dtype, "chunk_tokens": args.chunk_tokens}
    return shape | {"model": served_name(args.model or "")} | own


def _subtitle(args: argparse.Namespace, running: client.Client | None) -> str:
    """What was asked, and of which server. A running server is known only by what it says."""
    documents = f"{args.num_documents} documents of {args.document_length:,} tokens"
    asked = f"{documents}, each asked {args.repeat_count} times ({args.repeat_mode})"
    model = (running.model if running else args.model) or ""
    parts = [f"{asked}, {args.max_inflight_requests} in flight"]
    parts += [f"model {served_name(model)}"] if model else []
    if running is None:
        return "; ".join([*parts, *engine_facts()])
    parts += [f"vLLM {running.version}"] if running.version else []
    return "; ".join([*parts, "a server that ran already"])


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(NAME, "Long Doc QA", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
