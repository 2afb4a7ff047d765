"""The queue for once with real engines: what ``kvtier bench queue`` simulates, on vLLM.

``python -m kvtier.bench.queue.real --model DIR`` starts, for each policy, a ``kvtier serve`` with
that policy and engines that share it. The requests of a trace come ``--speed`` times as fast as
they did. They wait here, in one queue, and each engine is asked one prompt at a time, for one
token. A chunk of the trace is a chunk of kvtier's, with tokens that its key draws. What vLLM says
it had cached of each prompt are the hits.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvtier.bench.command import progress_bars, run_command, stepping, terminable, waiting, wrote
from kvtier.bench.flags import add_engine_flags, positive, seconds
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.engine import (
    cache_args,
    engine,
    geometry,
    on_cpu,
    served_name,
    transfer,
)
from kvtier.bench.processes.servers import VllmServer
from kvtier.bench.queue import run as simulated
from kvtier.bench.queue.first_come import Waited
from kvtier.bench.queue.report import Felt, print_table, rows_of
from kvtier.bench.report import write_results
from kvtier.bench.requests import client
from kvtier.bench.requests.client import Client, Outcome, RequestError
from kvtier.bench.requests.prompts import Ask, as_prompt, draw
from kvtier.bench.traces.commands.simulate import chunks_of
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Result, unique
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.extras import require
from kvtier.eviction.saved_compute import SavedCompute

NAME = "queue_real"
POLICIES = ("lru", "auto")
"""Those of ``ram.policy``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--model", required=True, help="directory or name that vLLM can serve")
    simulated.add_trace_flags(parser)
    add("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: both")
    add("--engines", type=positive, default=2, metavar="N", help="default: 2")
    about = "how much faster requests come than they did (default: 6: an hour in ten minutes)"
    add("--speed", type=positive, default=6, help=about)
    about = "for one request (default: 600)"
    add("--request-timeout", type=seconds, default=600.0, metavar="S", help=about)
    folder = Path("build", NAME)
    add("--output-dir", type=Path, default=folder, help=f"for results and logs (default: {folder})")
    add_engine_flags(parser.add_argument_group("engines"))


def run(args: argparse.Namespace) -> int:
    """Serve the trace under each policy, print, write. Raises KVTierError when a package is
    missing, or a process does not come up, or a request fails."""
    require("bench")
    trace = simulated.trace_of(args)
    slots = max(1, chunks_of(args.ram, unique(trace.requests)))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    felt = []
    with terminable(), progress_bars() as progress:
        for policy in args.policy:
            with ExitStack() as ends:
                with waiting(progress, f"{policy}: engines"):
                    servers = ends.enter_context(serving(args, policy, slots, trace.requests))
                clients, words = connected(args, servers)
                prompts = Prompts(words, args.chunk_tokens)
                tell = stepping(progress, policy, len(trace.requests))
                line = Line(trace.requests, prompts, args.speed)
                felt.append(line.felt(policy, clients, tell))
    print_table(felt)
    workload = {
        "trace": simulated.name_of(args),
        "policies": args.policy,
        "requests": len(trace.requests),
        "block_tokens": args.chunk_tokens,
        "ram_chunks": slots,
        "engines": args.engines,
        "speed": args.speed,
        "model": served_name(args.model),
    }
    path = args.output_dir / f"{NAME}.json"
    write_results(path, NAME, rows_of(felt), workload=workload)
    wrote([path])
    return 0


@contextmanager
def serving(
    args: argparse.Namespace, policy: str, slots: int, requests: Sequence[Request]
) -> Iterator[list[VllmServer]]:
    """A kvtier server with this policy, and healthy engines. Logs go to the folder of results."""
    block_tokens, token_bytes = geometry(args)
    longest = max(len(request.run) for request in requests) + 1
    if args.chunk_tokens % block_tokens:
        raise ConfigError(
            f"--chunk-tokens {args.chunk_tokens} is not a multiple of the block of {block_tokens} "
            "tokens: give another one, or --block-size"
        )
    length = longest * args.chunk_tokens
    blocks = 2 + math.ceil(1.5 * length / block_tokens)
    gib = math.ceil(blocks * block_tokens * token_bytes / 2**30)
    place = args.output_dir / "servers" / policy
    place.mkdir(parents=True, exist_ok=True)
    with run_folder() as folder, ExitStack() as ends:
        socket = folder / SOCKET
        command = [sys.executable, "-m", "kvtier", "serve", "--listen", f"unix://{socket}"]
        room = {"KVTIER_RAM_BYTES": f"{slots * args.chunk_tokens * token_bytes}B"}
        env = {**room, "KVTIER_POLICY": policy, "KVTIER_ADMIN": "off"}
        ends.enter_context(companion(command, env, partial(listens, socket), place / "kvtier.log"))
        server = {
            "KVTIER_SERVER": f"unix://{socket}",
            "KVTIER_CHUNK_TOKENS": str(args.chunk_tokens),
        }
        cache = cache_args(length, blocks, transfer(load_every_hit=args.load_every_hit))
        engines = [
            engine(
                args,
                block_tokens,
                cache,
                server | _own(index, args.engines, gib),
                place / f"engine-{index + 1}.log",
            )
            for index in range(args.engines)
        ]
        for one in engines:
            ends.callback(one.stop)
        with ThreadPoolExecutor(args.engines) as starting:
            list(starting.map(VllmServer.start, engines))
        yield engines


def _own(index: int, engines: int, gib: int) -> dict[str, str]:
    """Where an engine computes: an equal part of the CPU's cores, or a GPU."""
    if not on_cpu():
        return {"CUDA_VISIBLE_DEVICES": str(index)}
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // engines)
    own = cores[index * each : (index + 1) * each] or cores
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, own)),
    }


def connected(
    args: argparse.Namespace, servers: Sequence[VllmServer]
) -> tuple[list[Client], Sequence[int | str]]:
    """A client for each engine, which has answered once, and the words of prompts."""
    clients = list[Client]()
    words: Sequence[int | str] = ()
    for index, server in enumerate(servers):
        asker, words = client.connect(
            server.base_url, served_name(args.model), args.request_timeout
        )
        warm = Ask(-1 - index, 0, as_prompt(draw(words, args.chunk_tokens, index, "warm-up")), 1)
        client.all_succeeded(f"engine {index + 1}", asker.run([warm], 1, lambda: None))
        clients.append(asker)
    return clients, words


class Prompts(NamedTuple):
    """Tokens for chunks of a trace. ``words`` is what they are drawn from."""

    words: Sequence[int | str]
    chunk_tokens: int

    def of(self, number: int, run: Sequence[ChunkKey]) -> Ask:
        """The request with this number, for one token."""
        said = [word for key in run for word in draw(self.words, self.chunk_tokens, 0, key.hex())]
        said += draw(self.words, max(1, int(simulated.REST * self.chunk_tokens)), 1, number)
        return Ask(number, 0, as_prompt(said), 1)


class Line(NamedTuple):
    """Requests that wait in one queue. They come ``speed`` times as fast as they did."""

    requests: Sequence[Request]
    prompts: Prompts
    speed: float

    def felt(self, policy: str, clients: Sequence[Client], on_done: Callable[[], None]) -> Felt:
        """All of them, each by the first engine that is free. Raises RequestError for the first one
        that failed."""
        outcomes = asyncio.run(self._run(clients, on_done))
        failed = next((one for one in outcomes if not one.successful), None)
        if failed is not None:
            raise RequestError(f"{policy}: request {failed.document} failed: {failed.error}")
        came = [(one.at - self.requests[0].at) / self.speed for one in self.requests]
        waited = [
            Waited(at, one.request_start, one.request_start + (one.ttft or 0.0))
            for at, one in zip(came, outcomes, strict=True)
        ]
        return Felt(policy, self._result(outcomes), waited, len(clients))

    async def _run(self, clients: Sequence[Client], on_done: Callable[[], None]) -> list[Outcome]:
        queue, begun = asyncio.Queue[int | None](), time.perf_counter()
        served = dict[int, Outcome]()

        async def engine_of(asker: Client) -> None:
            import aiohttp

            limit = aiohttp.ClientTimeout(total=asker.timeout_s)
            async with aiohttp.ClientSession(timeout=limit, read_bufsize=2**20) as session:
                while (number := await queue.get()) is not None:
                    ask = self.prompts.of(number, self.requests[number].run)
                    outcome = Outcome(number, 0, False, time.perf_counter() - begun)
                    await asker.ask(session, ask, outcome, begun)
                    served[number] = outcome
                    on_done()

        async def arrive() -> None:
            for number, request in enumerate(self.requests):
                at = begun + (request.at - self.requests[0].at) / self.speed
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                queue.put_nowait(number)
            for _ in clients:
                queue.put_nowait(None)

        await asyncio.gather(arrive(), *map(engine_of, clients))
        return [served[number] for number in range(len(self.requests))]

    def _result(self, outcomes: Sequence[Outcome]) -> Result:
        """What was asked for and hit, in whole chunks."""
        size = self.prompts.chunk_tokens
        saves = SavedCompute(size)
        asked = [len(request.run) for request in self.requests]
        hits = [
            min(chunks, (one.cached_tokens or 0) // size)
            for chunks, one in zip(asked, outcomes, strict=True)
        ]
        compute, saved = sum(map(saves.of, asked)), sum(map(saves.of, hits))
        empty = Result(len(asked), sum(asked), sum(hits), 0, 0, 0, 0, 0, {})
        return empty._replace(compute=compute, saved=saved)


def main(argv: Sequence[str] | None = None) -> int:
    about = "Time to the first token behind a queue, on real engines"
    return run_command("queue.real", about, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
