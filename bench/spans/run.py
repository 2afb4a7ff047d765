"""Spans: how long the first token takes when a search puts documents into the prompts.

``kvtier bench spans`` or ``python -m kvtier.bench.spans``. Each question comes with some documents
of a pool, in shuffled order. The arms (:mod:`kvtier.bench.spans.arms`) are vLLM servers started
here, one after the other. All are asked the same questions, from an empty cache on, so what is
computed for the first time counts too. Every arm's answers are compared with those of full prefill,
because a time says nothing where the answer is another one.

``--model`` asks a model of yours with documents of random tokens. ``--toy`` trains a toy, and asks
it questions whose answers are known. ``--base-url`` with ``--prompts`` asks a running server what
you ask it.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.bench.command import (
    each_arm,
    emptied,
    failures,
    measuring,
    stepping,
    waiting,
    wrote,
)
from kvtier.bench.flags import add_engine_flags, add_run_flags, add_shape, shape_of
from kvtier.bench.processes.engine import cpu_env, engine, geometry, served_name
from kvtier.bench.processes.servers import VllmServer
from kvtier.bench.report import print_shown
from kvtier.bench.requests import client
from kvtier.bench.requests.client import Client, Outcome
from kvtier.bench.spans.arms import (
    ARMS,
    DEFAULT,
    FULL,
    ONE_SERVER,
    RUN,
    Arm,
    Retrieval,
    Sizes,
    server_args,
    server_env,
)
from kvtier.bench.spans.one_server import ask_running, ask_toy
from kvtier.bench.spans.report import NAME, Answers, Results, Run, answers, shown, shown_toy, write
from kvtier.core.errors import ConfigError
from kvtier.spans import Order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arms = {arm.name: arm for arm in RUN}
    add_run_flags(parser, NAME, "vLLM with kvtier", arms, (None, "what suits"))
    add = parser.add_argument
    about = "train a toy (once, some minutes) and ask it what it knows; sizes are its own"
    add("--toy", action="store_true", help=about)
    about = (
        'your prompts for --base-url, whose engine.spans is on: lines of {"anchor": ..., '
        '"documents": [...], "question": ...}, each part a text or token ids; --chunk-tokens is '
        "then that engine's"
    )
    add("--prompts", type=Path, metavar="JSONL", help=about)
    add_shape(parser, Retrieval)
    add_engine_flags(parser.add_argument_group("servers started here"))


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a request failed (or answers differ and must not).

    Raises KVTierError when a package is missing, or a server does not come up or does not answer.
    """
    _check(args)
    runs, orders = list[Run](), dict[Order, Answers]()
    results, shape = Results(runs, orders), shape_of(args, Retrieval)
    with measuring(args, lambda: runs and conclude(args, results, shape)):
        if args.base_url:
            results, shape = ask_running(args)
        elif args.toy:
            results, shape = ask_toy(args)
        else:
            shape = own_shape(args)
            args.arms = args.arms or DEFAULT
            for arm in each_arm(args.arms):
                runs.append(_arm(args, arm, orders))
                write(args.output_dir, results, workload=shape)
    return conclude(args, results, shape)


def conclude(args: argparse.Namespace, results: Results, shape: dict[str, Any]) -> int:
    """Print the table and write the files. Returns the exit status."""
    failed = failures("request", [outcome for run in results.runs for outcome in run.failed])
    found = write(args.output_dir, results, workload=shape)
    if results.known and results.base:
        print_shown(shown_toy(found))
    print_shown(shown(found))
    print("KL: mean, at least; of the first token, from what full prefill says of it")
    for arm in ARMS.values():
        if arm.cannot_run:
            print(f"{arm.name}: {arm.cannot_run}")
    wrote([args.output_dir / f"{NAME}.json"])
    return 1 if failed or (args.require_same_tokens and not results.exact) else 0


def _check(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.model and not args.base_url, args.toy, args.base_url))) != 1:
        raise ConfigError("expected one of --model, --toy, and --base-url with --prompts")
    if bool(args.base_url) != bool(args.prompts):
        raise ConfigError("--base-url and --prompts go together: expected both or none of them")
    others = [arm.name for arm in args.arms or () if arm not in ONE_SERVER]
    if others and (args.toy or args.base_url):
        known = ", ".join(arm.name for arm in ONE_SERVER)
        raise ConfigError(f"--arms {','.join(others)}: one server has the arms {known} only")
    if args.documents > args.pool:
        raise ConfigError(
            f"--documents {args.documents}: expected at most --pool {args.pool}, because a prompt "
            "has each document once"
        )


def _arm(args: argparse.Namespace, arm: Arm, full: dict[Order, Answers]) -> Run:
    """One arm from its server's start to its stop. The arm ``none`` fills ``full`` too."""
    emptied(args.output_dir / "servers" / arm.name)
    server = _server(args, arm)
    with contextlib.ExitStack() as running:
        with waiting(f"{arm.name}: server"):
            running.enter_context(server)
        asker, words = client.connect(
            server.base_url, served_name(args.model), args.request_timeout
        )
        work = Retrieval.of(args, [word for word in words if isinstance(word, int)])
        client.all_succeeded(f"arm {arm.name}", asker.run(work.warm_up(), 1, lambda: None))
        homes = _homes(args, arm, asker, work)
        before = client.hit_counters(server.base_url)
        rounds = _rounds(args, arm.name, asker, work, arm)
        hits = client.hits_between(before, client.hit_counters(server.base_url))
        spans = client.span_tokens(server.base_url)
        found = Run(arm, rounds, hits, homes, spans["computed"], spans["moved"])
        if arm.name == FULL:
            full["given"] = answers(found.good)
            if any(other.order == "stable" for other in args.arms):
                name = f"{arm.name}, stable order"
                sorted_arm = replace(arm, order="stable")
                again = _rounds(args, name, asker, work, sorted_arm)
                full["stable"] = answers([outcome for one in again for outcome in one])
    return found


def _rounds(
    args: argparse.Namespace, name: str, asker: Client, work: Retrieval, arm: Arm
) -> list[list[Outcome]]:
    step = stepping(name, args.rounds * args.requests)
    inflight = args.max_inflight_requests
    rounds = [work.asks(number, arm.order, arm.first) for number in range(args.rounds)]
    return [asker.run(asks, inflight, step) for asks in rounds]


def _homes(args: argparse.Namespace, arm: Arm, asker: Client, work: Retrieval) -> list[Outcome]:
    """Warm the documents of all rounds, one at a time; only for an arm that takes them from there.
    Raises RequestError when that fails."""
    if arm.first is None:
        return []
    asks = [ask for number in range(args.rounds) for ask in work.homes(number, args.chunk_tokens)]
    step = stepping(f"{arm.name}: homes", len(asks))
    return list(client.all_succeeded(f"arm {arm.name}", asker.run(asks, 1, step)))


def _server(args: argparse.Namespace, arm: Arm) -> VllmServer:
    sizes = Sizes(Retrieval.of(args, [0]), geometry(args))
    env = server_env(arm, sizes) | cpu_env(sizes.gpu_gib(arm))
    cache = server_args(arm, sizes, load_every_hit=args.load_every_hit)
    log = args.output_dir / "servers" / arm.name / "server.log"
    return engine(args, sizes.geometry.block_tokens, cache, env, log)


def own_shape(args: argparse.Namespace) -> dict[str, Any]:
    own = {"dtype": args.dtype, "block_size": args.block_size, "chunk_tokens": args.chunk_tokens}
    return shape_of(args, Retrieval) | {"model": served_name(args.model)} | own
