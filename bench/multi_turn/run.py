"""Multi-turn: how long users wait for the first token when a conversation goes on, on two engines
behind a router.

``kvtier bench multi-turn`` or ``python -m kvtier.bench.multi_turn``. Several users talk at the same
time. Each thinks, says something more, and is answered. Every prompt is all that was said before
and a little more, so that an engine that finds the KV cache has little to compute. The arms
(:mod:`kvtier.bench.multi_turn.arms`) differ in two things: whether the router keeps a conversation
with its engine, and whether the engines share one kvtier server. Turns from the second on count.
With ``--kill-after-turn`` an engine is killed, and the other engine continues its conversations.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
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
from kvtier.bench.flags import (
    add_engine_flags,
    add_run_flags,
    add_shape,
    positive,
    seconds,
    shape_of,
    words,
)
from kvtier.bench.multi_turn.arms import ARMS, RUNNING, Arm, Conversations, Sizes
from kvtier.bench.multi_turn.fleet import Fleet, fleet, require_router
from kvtier.bench.multi_turn.report import NAME, Run, differing_turns, shown, write
from kvtier.bench.multi_turn.talk import Pause, Talk
from kvtier.bench.processes.engine import geometry, require_model, served_name
from kvtier.bench.report import print_shown
from kvtier.bench.requests import client
from kvtier.bench.requests.client import Ask, as_prompt
from kvtier.core.errors import ConfigError

_ROUTER = "haproxy -db -f deploy/routing/haproxy.cfg"
_KILLED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser, NAME, "router", ARMS)
    add_shape(parser, Conversations)
    group = parser.add_argument_group("engines and router started here")
    add_engine_flags(group)
    own = group.add_argument
    about = "after this turn of all conversations one engine is killed (default: none)"
    own("--kill-after-turn", type=positive, metavar="TURN", help=about)
    about = "command of the router, which reads ROUTER_HOST, ROUTER_PORT, ENGINE_1, ENGINE_2"
    about += f" and for cache-aware arms ROUTER_LOOKUP (default: {_ROUTER})"
    own("--router", type=_command, default=_command(_ROUTER), metavar="'COMMAND'", help=about)
    about = "conversations that the GPU cache of an engine holds (default: 1.5)"
    own("--gpu-conversations", type=seconds, default=1.5, metavar="N", help=about)


def _command(text: str) -> list[str]:
    found = shlex.split(words(text))
    if not found:
        raise argparse.ArgumentTypeError("the router's command is empty")
    return found


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a turn failed, or answers differ and must not.

    Raises KVTierError when a package or a program is missing, or a process does not come up or does
    not answer.
    """
    _check(args)
    runs: list[Run] = []
    with measuring(args, lambda: runs and conclude(args, runs)):
        if args.base_url:
            runs.append(_running(args))
        else:
            for arm in each_arm(args.arms):
                runs.append(_arm(args, arm))
                write(args.output_dir, runs, workload=_shape(args))
    return conclude(args, runs)


def conclude(args: argparse.Namespace, runs: Sequence[Run]) -> int:
    """Print the table, and write the file. The exit status."""
    failed = failures("turn", [turn for run in runs for turn in run.turns])
    found = write(args.output_dir, runs, workload=_shape(args))
    if found["arms"]:
        print("Multi-turn. Less time is better.")
        print_shown(shown(found))
    wrote([args.output_dir / f"{NAME}.json"])
    differ = any(differing_turns(run, runs[0]) for run in runs[1:])
    return 1 if failed or (args.require_same_tokens and differ) else 0


def _check(args: argparse.Namespace) -> None:
    require_model(args, "router")
    asked = [arm.name for arm in args.arms if arm.asked and not args.base_url]
    if asked and Path(args.router[0]).name != "haproxy":
        text = f"only HAProxy asks kvtier: leave {asked[0]} out of --arms"
        raise ConfigError(f"--router {args.router[0]}: {text}")
    after = args.kill_after_turn
    if after is not None and args.base_url:
        raise ConfigError(f"--kill-after-turn {after}: it kills an engine that was started here")
    if after is not None and after >= args.turns:
        text = f"it needs a turn before the last, {args.turns}"
        raise ConfigError(f"--kill-after-turn {after}: {text}")
    if not args.base_url:
        require_router(args.router)


def _running(args: argparse.Namespace) -> Run:
    asker, words = client.connect(args.base_url, args.model, args.request_timeout)
    work = Conversations.of(args, words)
    advance = stepping(RUNNING, work.sessions * work.turns)
    return Run(RUNNING, Talk(asker, work, True, advance).run(), None)


def _arm(args: argparse.Namespace, arm: Arm) -> Run:
    place = emptied(args.output_dir / "servers" / arm.name)
    with ExitStack() as ends:
        with waiting(f"{arm.name}: engines"):
            running = ends.enter_context(fleet(args, arm, _sizes(args), place))
        return _measured(args, arm, running)


def _measured(args: argparse.Namespace, arm: Arm, running: Fleet) -> Run:
    name = served_name(args.model)
    for index, engine in enumerate(running.engines):
        asker, words = client.connect(engine.base_url, name, args.request_timeout)
        work = Conversations.of(args, words)
        ask = Ask(-1 - index, 0, as_prompt(work.warm_up(index)), 2)
        client.all_succeeded(f"arm {arm.name}", asker.run([ask], 1, lambda: None))
    asker = replace(asker, base_url=running.url)
    before, pause = running.hits(), None
    if args.kill_after_turn:
        pause = Pause(args.kill_after_turn, lambda: running.kill(_KILLED))
    advance = stepping(arm.name, work.sessions * work.turns)
    turns = Talk(asker, work, arm.sticky, advance, pause).run()
    hits = client.hits_between(before, running.hits())
    killed = f"engine-{_KILLED + 1}" if pause else ""
    return Run(arm.name, turns, hits, killed, args.kill_after_turn or 0)


def _sizes(args: argparse.Namespace) -> Sizes:
    return Sizes(Conversations.of(args, [0]), args.gpu_conversations, geometry(args))


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    shape = shape_of(args, Conversations)
    if args.base_url:
        return shape | {"server": "a running one; machine is its client's"}
    own = ("kill_after_turn", "gpu_conversations", "dtype", "chunk_tokens")
    shape |= {"model": served_name(args.model), "router": args.router[0]}
    return shape | {name: getattr(args, name) for name in own}
