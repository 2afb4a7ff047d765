"""Multi-turn: how long users wait for the first token when a conversation goes on, on two engines
behind a router.

``kvtier bench multi-turn`` or ``python -m kvtier.bench.multi_turn``. Conversations are held at
once: each thinks, says something more, and is answered. Every prompt is all that was said before
and a little more, so that whoever kept the KV cache has little to compute. The arms
(:mod:`kvtier.bench.multi_turn.arms`) differ in two things: whether the router keeps a conversation
with its engine, and whether one kvtier server is under the engines. Turns from the second on count.
With ``--kill-after-turn`` an engine dies, and its conversations go on elsewhere.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtier.bench.long_doc_qa import client
from kvtier.bench.long_doc_qa.run import geometry, progress_bars, served_name, terminable
from kvtier.bench.long_doc_qa.work import Ask
from kvtier.bench.multi_turn.arms import RUNNING, Arm, Sizes
from kvtier.bench.multi_turn.flags import SHAPE, add_arguments
from kvtier.bench.multi_turn.fleet import Fleet, fleet
from kvtier.bench.multi_turn.report import Run, differing, print_table, write_csv, write_json
from kvtier.bench.multi_turn.talk import Pause, Talk
from kvtier.bench.multi_turn.work import Conversations
from kvtier.bench.report import machine_facts
from kvtier.core.errors import ConfigError, KVTierError
from kvtier.core.extras import require

__all__ = ["add_arguments", "run"]

if TYPE_CHECKING:
    from rich.progress import Progress

_KILLED = 0


def run(args: argparse.Namespace) -> int:
    """Run every arm, print, write. 1 when a turn failed (or answers differ and must not).

    Raises KVTierError when a package or a program is missing, or something does not come up or does
    not answer.
    """
    require("bench")
    _check(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with terminable(), progress_bars() as progress:
        if args.base_url:
            return conclude(args, [_running(args, progress)])
        return conclude(args, [_arm(args, arm, progress) for arm in args.arms])


def conclude(args: argparse.Namespace, runs: Sequence[Run]) -> int:
    """Print the table, write the files; the exit status."""
    from kvtier.bench.multi_turn.plot import write_plot

    failed = [turn for run in runs for turn in run.turns if not turn.successful]
    for turn in failed[:3]:
        print(f"a turn failed: {turn.error}", file=sys.stderr)
    files = [
        write_csv(args.output_dir, runs),
        write_json(args.output_dir, runs, workload=_shape(args)),
    ]
    answered = [run for run in runs if run.good]
    if answered:
        print_table(runs)
        files.append(write_plot(args.output_dir, answered, _subtitle(args)))
    print("Wrote", ", ".join(map(str, files)))
    differ = any(differing(run, runs[0]) for run in runs[1:])
    return 1 if failed or (args.require_same_tokens and differ) else 0


def _check(args: argparse.Namespace) -> None:
    if not (args.base_url or args.model):
        raise ConfigError(
            "--model is missing: a directory or a name that vLLM can serve (or --base-url of "
            "a router)"
        )
    after = args.kill_after_turn
    if after is not None and (args.base_url or after >= args.turns):
        what = (
            "kills an engine that was started here"
            if args.base_url
            else f"needs a turn before the last, {args.turns}"
        )
        raise ConfigError(f"--kill-after-turn {after}: it {what}")


def _running(args: argparse.Namespace, progress: Progress) -> Run:
    """A router that runs already: what its engines cached is what each answer says of itself."""
    asker, words = client.connect(args.base_url, args.model, args.request_timeout)
    work = Conversations.of(args, words)
    return Run(
        RUNNING, Talk(asker, work, args.session_by, _advance(progress, RUNNING, work)).run(), None
    )


def _arm(args: argparse.Namespace, arm: Arm, progress: Progress) -> Run:
    """One arm from its processes' start to their end."""
    place = args.output_dir / "servers" / arm.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    starting = progress.add_task(f"{arm.name}: engines", total=None)
    with fleet(args, arm, _sizes(args), place) as running:
        progress.remove_task(starting)
        return _measured(args, arm, running, progress)


def _measured(args: argparse.Namespace, arm: Arm, running: Fleet, progress: Progress) -> Run:
    name = served_name(args.model)
    for index, engine in enumerate(running.engines):
        asker, words = client.connect(engine.base_url, name, args.request_timeout)
        work = Conversations.of(args, words)
        warm = asker.run([Ask(-1 - index, 0, work.warm_up(index), 2)], 1, lambda: None)[0]
        if not warm.successful:
            raise client.RequestError(
                f"arm {arm.name}: an engine's first request failed: {warm.error}"
            )
    asker = replace(asker, base_url=running.url)
    before, pause = running.hits(), None
    if args.kill_after_turn:
        pause = Pause(args.kill_after_turn, lambda: running.kill(_KILLED))
    session_by = args.session_by if arm.sticky else None
    turns = Talk(asker, work, session_by, _advance(progress, arm.name, work), pause).run()
    hits = {tier: tokens - before.get(tier, 0) for tier, tokens in running.hits().items()}
    killed = f"engine-{_KILLED + 1}" if pause else ""
    return Run(arm.name, turns, hits, killed, args.kill_after_turn or 0)


def _advance(progress: Progress, name: str, work: Conversations) -> Callable[[], None]:
    task = progress.add_task(name, total=work.sessions * work.turns)
    return lambda: progress.advance(task)


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
    return (
        shape
        | {"model": served_name(args.model), "router": args.router[0]}
        | {name: getattr(args, name) for name in own}
    )


def _subtitle(args: argparse.Namespace) -> str:
    lengths = f"{args.first_length:,} + {args.turn_length:,} tokens a turn"
    asked = f"{args.sessions} conversations of {args.turns} turns, {lengths}"
    if args.base_url:
        return f"{asked}; a router that ran already"
    facts = machine_facts()
    parts = [
        asked,
        f"router {args.router[0]}, by {args.session_by}",
        f"model {served_name(args.model)}",
    ]
    parts += [
        f"vLLM {facts.get('vllm', 'elsewhere')}",
        str(facts.get("gpu", f"{facts['cpu']}, {facts['cores']} cores")),
    ]
    return "; ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvtier.bench.multi_turn", description="Multi-turn conversations"
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KVTierError as error:
        print(f"multi-turn: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
