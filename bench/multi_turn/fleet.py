"""Processes of an arm: two vLLM engines, a router in front of them, and a kvtier server."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvtier.bench.multi_turn.arms import ENGINES, Arm, Sizes
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.engine import cache_args, engine, on_cpu, transfer
from kvtier.bench.processes.servers import VllmServer, answers, free_port
from kvtier.bench.requests.client import hit_counters
from kvtier.core.errors import ConfigError

_ROUTER_START_S = 30.0


class Listening(Protocol):
    port: int


class Fleet:
    """``url``: the router's. Not thread-safe."""

    def __init__(self, url: str, engines: list[VllmServer]) -> None:
        self.url = url
        self.engines = engines
        self.dead: set[int] = set()
        self._gone: Counter[str] = Counter()

    def kill(self, index: int) -> None:
        """Send SIGKILL to an engine. Its hits stay counted."""
        self._gone.update(hit_counters(self.engines[index].base_url) or {})
        self.engines[index].kill()
        self.dead.add(index)

    def hits(self) -> dict[str, float]:
        total = Counter(self._gone)
        for index, server in enumerate(self.engines):
            if index not in self.dead:
                total.update(hit_counters(server.base_url) or {})
        return dict(total)


@contextmanager
def fleet(args: argparse.Namespace, arm: Arm, sizes: Sizes, place: Path) -> Iterator[Fleet]:
    """Start the parts, and stop them at the end of the block. Logs go to ``place``, an empty
    folder. Raises KVTierError when a part does not come up."""
    with run_folder() as run, ExitStack() as ends:
        lookup = _asks(run) if arm.asked else {}
        if arm.shared:
            socket = run / SOCKET
            command = [sys.executable, "-m", "kvtier", "serve", "--listen", f"unix://{socket}"]
            env = {"KVTIER_RAM_BYTES": sizes.ram()} | _follows(run, lookup)
            ready = partial(listens, socket)
            ends.enter_context(companion(command, env, ready, place / "kvtier.log"))
        engines = [_engine(args, arm, sizes, run, place, index) for index in range(ENGINES)]
        for engine in engines:
            ends.callback(engine.stop)
        with ThreadPoolExecutor(ENGINES) as starting:
            list(starting.map(VllmServer.start, engines))
        asking = replace(arm, router={**arm.router, **lookup})
        url = ends.enter_context(router(args.router, asking, engines, place / "router.log"))
        yield Fleet(url, engines)


def require_router(command: Sequence[str]) -> None:
    """Raises ConfigError where the router's file or its program is missing, before minutes of
    engines."""
    missing = [word for word in command if word.startswith("deploy/") and not Path(word).exists()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not here: run in a checkout of kvtier, or give --router 'COMMAND'"
        )
    if shutil.which(command[0]) is None:
        raise ConfigError(f"--router {command[0]}: no such program; install it, or name another")


@contextmanager
def router(command: list[str], arm: Arm, engines: Sequence[Listening], log: Path) -> Iterator[str]:
    port = free_port()
    env = {
        "ROUTER_HOST": "127.0.0.1",
        "ROUTER_PORT": str(port),
        "ROUTER_METRICS_PORT": str(free_port()),
        **arm.router,
    }
    env |= {
        f"ENGINE_{number}": f"127.0.0.1:{engine.port}"
        for number, engine in enumerate(engines, start=1)
    }
    url = f"http://127.0.0.1:{port}"
    with companion(command, env, lambda: answers(f"{url}/health"), log, _ROUTER_START_S):
        yield url


def _asks(run: Path) -> dict[str, str]:
    """Environment of a cache-aware router: where it asks, and with what."""
    token = run / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    url = f"http://127.0.0.1:{free_port()}"
    return {"ROUTER_LOOKUP": url, "KVTIER_ADMIN_TOKEN_FILE": str(token)}


def _follows(run: Path, lookup: dict[str, str]) -> dict[str, str]:
    """The kvtier server's side of ``lookup``. It follows every engine."""
    if not lookup:
        return {"KVTIER_ADMIN": "off"}
    events = [_events(run, index) for index in range(ENGINES)]
    streams = [
        f"engine-{number}={one['endpoint']}?replay={one['replay_endpoint']}"
        for number, one in enumerate(events, start=1)
    ]
    return {
        "KVTIER_ADMIN": lookup["ROUTER_LOOKUP"],
        "KVTIER_ADMIN_TOKEN_FILE": lookup["KVTIER_ADMIN_TOKEN_FILE"],
        "KVTIER_ADMIN_ENGINES": ",".join(streams),
    }


def _events(run: Path, index: int) -> dict[str, Any]:
    at = f"ipc://{run}/events-{index}"
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": at,
        "replay_endpoint": f"{at}-replay",
    }


def _engine(
    args: argparse.Namespace, arm: Arm, sizes: Sizes, run: Path, place: Path, index: int
) -> VllmServer:
    env, connector = dict[str, str](), None
    if arm.shared:
        env["KVTIER_SERVER"] = f"unix://{run / SOCKET}"
    elif arm.stores:
        env["KVTIER_RAM_BYTES"] = sizes.ram(ENGINES)
    if arm.shared or arm.stores:
        connector = transfer(load_every_hit=args.load_every_hit)
        env["KVTIER_CHUNK_TOKENS"] = str(sizes.geometry.chunk_tokens)
    if on_cpu():
        env["VLLM_CPU_KVCACHE_SPACE"] = str(sizes.geometry.gib(sizes.gpu_blocks))
        env["VLLM_CPU_OMP_THREADS_BIND"] = _cores(index)
    else:
        env["CUDA_VISIBLE_DEVICES"] = str(index)
    cache = cache_args(sizes.max_model_len, sizes.gpu_blocks, connector)
    if arm.asked:
        cache += ["--kv-events-config", json.dumps(_events(run, index))]
    return engine(args, sizes.geometry.block_tokens, cache, env, place / f"engine-{index + 1}.log")


def _cores(index: int) -> str:
    """An equal part of the CPU's cores, so that two engines do not compute on the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ENGINES)
    return ",".join(map(str, cores[index * each : (index + 1) * each] or cores))
