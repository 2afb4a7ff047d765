"""Long Doc QA: how long readers of long documents wait for the first token, with and without
kvtier.

``kvtier bench long-doc-qa`` or ``python -m kvtier.bench.long_doc_qa``. Three rounds an arm:
*pre-warm-up* (a few unrelated prompts), *warm-up* (every document once: the caches fill, where an
arm has any) and *query* (every document again with another question at its end: the caches are
read). Only the query round counts. After a restart its first prompt is the server's first. The
servers are started here, one for each arm (:mod:`kvtier.bench.long_doc_qa.arms`), or ``--base-url``
names a server that runs. The shape follows LMCache's benchmark of the same name (LMCache/LMCache,
benchmarks/long_doc_qa).

A server that runs has no arm without a cache to be compared with. There the warm-up is measured
too, as ``cold``.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.command import (
    each_arm,
    emptied,
    failures,
    measuring,
    stepping,
    waiting,
    wrote,
)
from kvtier.bench.flags import add_engine_flags, add_run_flags, add_shape, chosen, seconds, shape_of
from kvtier.bench.long_doc_qa.arms import (
    ARMS,
    COLD,
    PRESETS,
    Arm,
    Sizes,
    Workload,
    filled,
    installed,
    server_args,
)
from kvtier.bench.long_doc_qa.report import (
    NAME,
    Round,
    arm_line,
    draw,
    shown,
    summarise,
    verdict,
    write,
)
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
from kvtier.bench.report import Found, print_shown
from kvtier.bench.requests import client
from kvtier.bench.requests.client import Ask

_OTHER_SERVER = "server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser, NAME, "server", ARMS, (installed(), "all that are installed"))
    add = parser.add_argument
    about = "a shape with a name; lmi: the one of which AWS publishes numbers"
    add("--preset", choices=PRESETS, help=about)
    add_shape(parser, Workload, PRESETS)
    about = "pause between warm-up and query (default: 2)"
    add("--settle-seconds", type=seconds, default=2.0, metavar="S", help=about)
    add_engine_flags(parser.add_argument_group("servers started here"))


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a request failed, or answers differ and must not.

    Raises KVTierError when a package is missing, or a server does not come up or does not answer.
    """
    chosen(args, Workload, PRESETS)
    running, rounds = None, list[Round]()
    with measuring(args, lambda: rounds and conclude(args, rounds, running, picture=False)):
        if args.base_url:
            running, words = client.connect(args.base_url, args.model, args.request_timeout)
            _measure_running(args, running, words, rounds)
        else:
            for arm in each_arm(args.arms):
                keep(args, rounds, measure(args, arm))
    return conclude(args, rounds, running)


def keep(args: argparse.Namespace, rounds: list[Round], ended: Round) -> None:
    """Add a round that has ended: write all rounds so far into the files, and print its row."""
    rounds.append(ended)
    _write(args, rounds, _shape(args, None))
    summaries = summarise(rounds)
    for row in [arm_line(one, summaries) for one in summaries if one.arm == ended.arm]:
        print(row, flush=True)


def _write(args: argparse.Namespace, rounds: Sequence[Round], workload: Mapping[str, Any]) -> Found:
    engines = modes_told(one.mode for one in rounds)
    return write(args.output_dir, rounds, workload=workload, engines=engines)


def conclude(
    args: argparse.Namespace,
    rounds: Sequence[Round],
    running: client.Client | None = None,
    *,
    picture: bool = True,
) -> int:
    """Print the table, and write the files. The exit status. ``running``: the server that was not
    started here. ``picture``: draw one, which takes seconds."""
    failed = failures("request", [outcome for arm in rounds for outcome in arm.outcomes])
    summaries = summarise(rounds)
    found, files = _write(args, rounds, _shape(args, running)), [args.output_dir / f"{NAME}.json"]
    same, words = verdict(summaries)
    if summaries:
        print("Long Doc QA. Less time is better.")
        print_shown(shown(found))
        if found["engines"]:
            print(f"The engines ran by {found['engines']}.")
        print(words)
    if summaries and picture:
        files.append(draw(args.output_dir, summaries, _subtitle(args, running)))
    wrote(files)
    return 1 if failed or (args.require_same_tokens and not same) else 0


def _measure_running(
    args: argparse.Namespace, asker: client.Client, words: Sequence[int | str], ended: list[Round]
) -> None:
    """The cold round and the query round, into ``ended``. The server has no arm without a cache, so
    its first answers are the base."""
    rounds = Rounds(asker, Workload.of(args, words), _OTHER_SERVER)
    rounds.pre_warm_up()
    ended.append(rounds.cold())
    time.sleep(args.settle_seconds)
    ended.append(rounds.query())


def measure(args: argparse.Namespace, arm: Arm) -> Round:
    with engines_of(args, arm) as engines:
        return _three_rounds(args, arm, engines)


class Engines(NamedTuple):
    """An arm's servers. ``first`` runs. Only arms that have a ``second`` engine start it. Both stop
    with ``ends``."""

    first: VllmServer
    second: VllmServer
    ends: ExitStack


@contextmanager
def engines_of(args: argparse.Namespace, arm: Arm) -> Iterator[Engines]:
    """An arm's servers, the first one started. Its NVMe folder and its companion end with them."""
    place = emptied(args.output_dir / "servers" / arm.name)
    (place / "nvme").mkdir()
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
        _start(arm, first, ends)
        yield Engines(first, second, ends)


def _start(arm: Arm, server: VllmServer, ends: ExitStack) -> None:
    with waiting(f"{arm.name}: server starts"):
        ends.enter_context(server)


def _three_rounds(args: argparse.Namespace, arm: Arm, engines: Engines) -> Round:
    server = engines.first
    rounds = rounds_at(args, server, arm.name)
    rounds.pre_warm_up()
    if arm.caches:
        rounds.warm_up()
        time.sleep(args.settle_seconds)
    if arm.restart_before_query:
        with waiting(f"{arm.name}: server restarts"):
            server.restart()
        rounds = rounds_at(args, server, arm.name)
    elif arm.second_engine:
        server = engines.second
        _start(arm, server, engines.ends)
        rounds = rounds_at(args, server, arm.name)
        rounds.pre_warm_up()
    return rounds.query()


def rounds_at(args: argparse.Namespace, server: VllmServer, name: str) -> Rounds:
    """The rounds of the arm ``name`` at a server that runs."""
    asker, words = client.connect(server.base_url, served_name(args.model), args.request_timeout)
    return Rounds(asker, Workload.of(args, words), name, mode_told(server.log))


def _sizes(args: argparse.Namespace) -> Sizes:
    require_model(args, "server")
    return Sizes(Workload.of(args, [0]), geometry(args))


def own_server(
    args: argparse.Namespace, arm: Arm, sizes: Sizes, names: Mapping[str, str], log: Path
) -> VllmServer:
    env = filled(arm.kvtier or {}, names) | cpu_env(sizes.gpu_gib(arm))
    cache = server_args(arm, sizes, load_every_hit=args.load_every_hit)
    return engine(args, sizes.geometry.block_tokens, cache, env, log)


class Rounds:
    """The rounds of one arm. ``mode``: how its engine runs, where that is told."""

    def __init__(
        self, asker: client.Client, workload: Workload, arm: str, mode: str | None = None
    ) -> None:
        self._asker, self._workload, self._arm, self._mode = asker, workload, arm, mode

    def pre_warm_up(self) -> Sequence[client.Outcome]:
        return self._must_succeed(self._round("pre-warm-up", self._workload.pre_warm_up()))

    def warm_up(self) -> None:
        self._must_succeed(self._round("warm-up", self._workload.warm_up()))

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
        return Round(arm, outcomes, client.hits_between(before, after), self._mode)

    def _round(self, name: str, asks: Sequence[Ask]) -> list[client.Outcome]:
        advance = stepping(f"{self._arm}: {name}", len(asks))
        return self._asker.run(asks, self._workload.max_inflight_requests, advance)

    def _must_succeed(self, outcomes: Sequence[client.Outcome]) -> Sequence[client.Outcome]:
        return client.all_succeeded(f"arm {self._arm}", outcomes)


def _shape(args: argparse.Namespace, running: client.Client | None) -> dict[str, Any]:
    shape = shape_of(args, Workload)
    if running is not None:
        server = "a running one; machine is its client's"
        return shape | {"model": served_name(running.model), "server": server}
    own = {"dtype": args.dtype, "chunk_tokens": args.chunk_tokens}
    return shape | {"model": served_name(args.model or "")} | own


def _subtitle(args: argparse.Namespace, running: client.Client | None) -> str:
    """Workload and server. A running server is known only by what it says."""
    documents = f"{args.num_documents} documents of {args.document_length:,} tokens"
    asked = f"{documents}, each asked {args.repeat_count} times ({args.repeat_mode})"
    model = (running.model if running else args.model) or ""
    parts = [f"{asked}, {args.max_inflight_requests} in flight"]
    parts += [f"model {served_name(model)}"] if model else []
    if running is None:
        return "; ".join([*parts, *engine_facts()])
    parts += [f"vLLM {running.version}"] if running.version else []
    return "; ".join([*parts, "a server that ran already"])
