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
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.bench.command import (
    failures,
    progress_bars,
    run_command,
    say,
    stepping,
    terminable,
    told_early,
    waiting,
    wrote,
)
from kvtier.bench.multi_turn.arms import RUNNING, Arm, Sizes
from kvtier.bench.multi_turn.flags import add_arguments
from kvtier.bench.multi_turn.fleet import Fleet, fleet, require_router
from kvtier.bench.multi_turn.report import (
    NAME,
    Run,
    csv_lines,
    differing_turns,
    print_table,
    write_json,
)
from kvtier.bench.multi_turn.talk import Pause, Talk
from kvtier.bench.multi_turn.work import SHAPE, Conversations
from kvtier.bench.processes.engine import engine_facts, geometry, require_model, served_name
from kvtier.bench.report import write_csv
from kvtier.bench.requests import client
from kvtier.bench.requests.prompts import Ask, as_prompt
from kvtier.core.errors import ConfigError
from kvtier.core.extras import require

__all__ = ["add_arguments", "run"]

if TYPE_CHECKING:
    from rich.progress import Progress

_KILLED = 0


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a turn failed, or answers differ and must not.

    Raises KVTierError when a package or a program is missing, or a process does not come up or does
    not answer.
    """
    require("bench")
    _check(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []

    def tell() -> None:
        if runs:
            conclude(args, runs, picture=False)

    with terminable():
        with told_early(tell), progress_bars() as progress:
            if args.base_url:
                runs.append(_running(args, progress))
            else:
                for number, arm in enumerate(args.arms, 1):
                    say(f"arm {number} of {len(args.arms)}, {arm.name}: {arm.about}")
                    runs.append(_arm(args, arm, progress))
                    _write(args, runs)
        return conclude(args, runs)


def _write(args: argparse.Namespace, runs: Sequence[Run]) -> list[Path]:
    return [
        write_csv(args.output_dir / f"{NAME}.csv", csv_lines(runs)),
        write_json(args.output_dir, runs, workload=_shape(args)),
    ]


def conclude(args: argparse.Namespace, runs: Sequence[Run], *, picture: bool = True) -> int:
    """Print the table, and write the files. The exit status. ``picture``: draw one too."""
    failed = failures("turn", [turn for run in runs for turn in run.turns])
    files = _write(args, runs)
    answered = [run for run in runs if run.good]
    if answered:
        print_table(runs)
    if answered and picture:
        from kvtier.bench.multi_turn.plot import write_plot

        files.append(write_plot(args.output_dir, answered, _subtitle(args)))
    wrote(files)
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


def _running(args: argparse.Namespace, progress: Progress) -> Run:
    """A router that runs already. Each answer says what was cached of its prompt."""
    asker, words = client.connect(args.base_url, args.model, args.request_timeout)
    work = Conversations.of(args, words)
    advance = stepping(progress, RUNNING, work.sessions * work.turns)
    return Run(RUNNING, Talk(asker, work, args.session_by, advance).run(), None)


def _arm(args: argparse.Namespace, arm: Arm, progress: Progress) -> Run:
    """One arm from its processes' start to their end."""
    place = args.output_dir / "servers" / arm.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    with ExitStack() as ends:
        with waiting(progress, f"{arm.name}: engines"):
            running = ends.enter_context(fleet(args, arm, _sizes(args), place))
        return _measured(args, arm, running, progress)


def _measured(args: argparse.Namespace, arm: Arm, running: Fleet, progress: Progress) -> Run:
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
    session_by = args.session_by if arm.sticky else None
    advance = stepping(progress, arm.name, work.sessions * work.turns)
    turns = Talk(asker, work, session_by, advance, pause).run()
    hits = client.hits_between(before, running.hits())
    killed = f"engine-{_KILLED + 1}" if pause else ""
    return Run(arm.name, turns, hits, killed, args.kill_after_turn or 0)


def _sizes(args: argparse.Namespace) -> Sizes:
    block, token_bytes = geometry(args)
    return Sizes(
        Conversations.of(args, [0]), args.gpu_conversations, block, args.chunk_tokens, token_bytes
    )


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    """The workload's parameters as they go into the results."""
    shape = {name: getattr(args, name) for name in SHAPE} | {"session_by": args.session_by}
    if args.base_url:
        return shape | {"server": "a running one; machine is its client's"}
    own = ("kill_after_turn", "gpu_conversations", "dtype", "chunk_tokens")
    shape |= {"model": served_name(args.model), "router": args.router[0]}
    return shape | {name: getattr(args, name) for name in own}


def _subtitle(args: argparse.Namespace) -> str:
    lengths = f"{args.first_length:,} + {args.turn_length:,} tokens a turn"
    asked = f"{args.sessions} conversations of {args.turns} turns, {lengths}"
    if args.base_url:
        return f"{asked}; a router that ran already"
    router = f"router {args.router[0]}, by {args.session_by}"
    return "; ".join([asked, router, f"model {served_name(args.model)}", *engine_facts()])


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(NAME, "Multi-turn conversations", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
