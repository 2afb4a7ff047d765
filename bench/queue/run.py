"""Queue: how long a person waits for the first token under each eviction policy, when requests meet
a few busy engines.

``kvtier bench queue`` or ``python -m kvtier.bench.queue``. It is a simulation: the requests of a
trace wait in one queue for engines that share one cache, as behind ``kvtier serve``. The cache is
that of ``kvtier simulate``, with the Store's own index and policies. A request loads its hits when
it is begun, and what its engine had to compute is saved when that is through. So a policy that
saves compute shortens the queue too, and every request's wait.

An engine takes a time for what it computes that grows with the position of each token
(:mod:`kvtier.eviction.saved_compute`), one prompt at a time. Loads take no time, answers do not
slow down prompts, and the engines have no prefix cache of their own. How fast they are follows from
``--load``: as fast as would make them busy for that part of the time under the first policy, if
each request were served at once. All policies are compared at that speed, with the same requests at
the same times.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvtier.bench.command import wrote
from kvtier.bench.flags import between, positive
from kvtier.bench.queue.report import NAME, Felt, first_come, print_table, rows_of
from kvtier.bench.queue.traffic import KINDS, traffic
from kvtier.bench.report import write_results
from kvtier.bench.traces.commands.simulate import (
    ChunkPrefill,
    add_model_flags,
    chunks_of,
    prefill_of,
)
from kvtier.bench.traces.formats import FORMS, Trace, read
from kvtier.bench.traces.mooncake import BLOCK_TOKENS, Request
from kvtier.bench.traces.simulate import POLICIES, Begun, Cache, unhinted, unique
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import progress

_LOAD = 0.8
_LOAD_OF = between("between 0 and 1: at 1 a queue grows for ever", 0, math.nextafter(1, 0))
REST = 0.5
"""Chunks of each prompt that no cache holds: its last one is not full, half of one in the mean."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace_flags(parser)
    about = "the others are compared with the first one (default: lru auto)"
    add("--policy", nargs="+", choices=POLICIES, default=["lru", "auto"], help=about)
    add("--engines", type=positive, default=4, metavar="N", help="behind one queue (default: 4)")
    about = "part of the time that engines would be busy under the first policy, if each request "
    about += f"were served at once (default: {_LOAD})"
    add("--load", type=_LOAD_OF, help=about)
    add_model_flags(parser)
    about = "file of the results (default: build/queue/queue.json)"
    add("--output", type=Path, default=Path("build", NAME, f"{NAME}.json"), help=about)


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what is asked, and how much of it RAM holds."""
    add = parser.add_argument
    about = "recorded requests, in any form that 'kvtier simulate' reads; default: generated"
    add("--trace", metavar="FILE", help=about)
    add("--format", choices=tuple(FORMS), help="the form of --trace; default: told from the file")
    about = "of generated agents, chats and questions about documents (default: 1)"
    add(
        "--hours",
        type=between("hours, more than 0 and at most 1,000", 0, 1000),
        default=1.0,
        help=about,
    )
    about = "what is generated (default: mixed, all of them)"
    add("--kind", choices=tuple(KINDS), default="mixed", help=about)
    about = "of that traffic, with as many kinds of agents and documents (default: 1)"
    add("--part", type=between("more than 0 and at most 1", 0, 1), default=1.0, help=about)
    add("--seed", type=int, default=0, help="of what is generated (default: 0)")
    about = "chunks in RAM, or a percentage of all chunks of the trace (default: 5%%)"
    add("--ram", default="5%", metavar="SIZE", help=about)


def run(args: argparse.Namespace) -> int:
    """Serve the trace under each policy, print, write. Raises ConfigError for a trace that says no
    times or no tokens, for what is no size, and for a speed beside a load."""
    if args.load is not None and args.prefill is not None:
        raise ConfigError(
            "--load and --prefill: each says how fast the engines are; give one of them"
        )
    trace = trace_of(args)
    slots = max(1, chunks_of(args.ram, unique(trace.requests)))
    prefill = prefill_of(trace, args)
    cache = partial(Cache, slots, compute=prefill.saves)
    if prefill.tokens_per_s is None:
        speed = _speed(trace, cache(policy=args.policy[0]), prefill, args)
        prefill = prefill._replace(tokens_per_s=speed)
    felt = [
        Engines(trace.requests, cache(policy=policy), prefill).serve(policy, args.engines)
        for policy in args.policy
    ]
    print(f"{_shown(trace, args)}; RAM for {slots:,} chunks; {args.engines} engines that compute")
    print(f"{prefill.tokens_per_s:,.0f} tokens/s at a prompt's beginning ({prefill.saves.source})")
    print_table(felt)
    workload = {
        "trace": name_of(args),
        "policies": args.policy,
        "requests": len(trace.requests),
        "block_tokens": trace.block_tokens,
        "ram_chunks": slots,
        "engines": args.engines,
        "prefill_tokens_per_s": prefill.tokens_per_s,
        "s0": prefill.saves.s0,
    }
    write_results(args.output, NAME, rows_of(felt), workload=workload)
    wrote([args.output])
    return 0


class Engines:
    """Engines with one cache. They compute as fast as ``prefill`` says."""

    def __init__(self, requests: Sequence[Request], cache: Cache, prefill: ChunkPrefill) -> None:
        self._requests, self._cache, self._prefill = requests, cache, prefill
        self._computing: dict[int, Begun] = {}

    def serve(self, policy: str, engines: int) -> Felt:
        tell = progress(policy, len(self._requests))
        waited = first_come(
            [request.at for request in self._requests],
            engines,
            partial(self._begin, tell),
            self._end,
        )
        return Felt(policy, self._cache.result(), waited, engines)

    def _begin(self, tell: Callable[[int], object], number: int, now: float) -> float:
        tell(number + 1)
        request = self._requests[number]
        begun = self._computing[number] = self._cache.load(request, now)
        compute = computed(self._prefill, len(request.run), begun.hits)
        seconds = self._prefill.seconds(compute)
        assert seconds is not None, "a speed was given, or follows from the load"
        return seconds

    def _end(self, number: int, now: float) -> None:
        self._cache.save(self._computing.pop(number), now)


def computed(prefill: ChunkPrefill, chunks: int, hits: int) -> float:
    """Compute of a prompt with so many whole chunks, in chunks at a prompt's
    beginning."""
    saves = prefill.saves
    return saves.of(chunks - hits, hits) + REST * saves.of(1, chunks)


def _speed(trace: Trace, cache: Cache, prefill: ChunkPrefill, args: argparse.Namespace) -> float:
    """Tokens a second of each engine with which all of them have this load. Raises ConfigError."""
    requests = trace.requests
    seconds = requests[-1].at - requests[0].at
    if not seconds > 0:
        raise ConfigError(
            f"{name_of(args)}: its {len(requests):,} requests all come at once, so that there is "
            "no load: give --prefill TOKENS/S, or a trace with times"
        )
    tell, compute = progress("the load", len(requests)), 0.0
    for number, request in enumerate(requests, 1):
        begun = cache.load(request, request.at)
        cache.save(begun, request.at)
        compute += computed(prefill, len(request.run), begun.hits)
        tell(number)
    load: float = _LOAD if args.load is None else args.load
    engines: int = args.engines
    return compute * trace.block_tokens / (load * engines * seconds)


def trace_of(args: argparse.Namespace) -> Trace:
    """The requests by their times, without hints. Raises ConfigError for a trace without tokens or
    without a whole chunk."""
    if args.trace is None:
        if args.format is not None:
            raise ConfigError(f"--format {args.format} says how --trace is read: give --trace too")
        made = traffic(args.hours, args.seed, args.part, args.kind)
        return Trace("generated", made, BLOCK_TOKENS)
    found = read(args.trace, args.format)
    prompts = [one for one in unhinted(found.requests) if one.about is None]
    if not found.block_tokens or not any(one.run for one in prompts):
        what = "has no full block" if found.block_tokens else "counts objects and no tokens"
        raise ConfigError(
            f"{args.trace}: this {found.form} trace {what}, so that no prefill is known: give a "
            "trace of prompts (Mooncake, Bailian, kv-cache-tester), or none"
        )
    return found._replace(requests=sorted(prompts, key=lambda request: request.at))


def name_of(args: argparse.Namespace) -> str:
    """The trace's, without its folder."""
    if args.trace is not None:
        return Path(args.trace).name
    part = f", part {args.part:g}" if args.part < 1 else ""
    kind = f" {args.kind}" if args.kind != "mixed" else ""
    return f"generated{kind}, {args.hours:g} h, seed {args.seed}{part}"


def _shown(trace: Trace, args: argparse.Namespace) -> str:
    asked = sum(len(request.run) for request in trace.requests)
    return (
        f"{name_of(args)}: {len(trace.requests):,} requests, {asked:,} chunks of "
        f"{trace.block_tokens} tokens, {unique(trace.requests):,} of them different"
    )
