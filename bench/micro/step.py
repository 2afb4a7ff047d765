"""Cost of a step of vLLM's scheduling thread: its real Scheduler, both halves of the connector, and
a model that computes nothing.

    python -m kvtier.bench.micro.step [--trace TRACE]

Without a connector, with kvtier's, with vLLM's two that offload, and with LMCache's in turn, each
in a process of its own; some for vLLM's AsyncScheduler too, and for models with windows and states.
A row is CPU time of the scheduling thread in one step, the mean of 80, because not every step
saves: vLLM's own, and what all hooks of a connector add. *Message*: the step's metadata, as vLLM
pickles it for workers. *Worker*: a worker's hooks in the step; SimpleCPUOffload's copies, which
need a GPU, are left out. *Waited*: how long the thread waited in the step for others of this
process, which had the interpreter or a lock, and for answers of a server.

- *decode of N*: N requests that each get one token a step, none of which ends.
- *eight cold prompts*: of 1,024 tokens each, in one step, of which nothing is known. In the same
  step eight others end. Then the same prompts, *known*.
- *32k cold*, *from RAM*, *from NVMe*: the dearest step of a prompt of 32,768 tokens beside 512 that
  decode.
- *mixed*: a request of a recorded trace (Mooncake's form) every fourth step, beside 256.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.compare.peers.contenders import CONTENDERS
from kvtier.bench.flags import run_micro
from kvtier.bench.micro.server import BenchError, server
from kvtier.bench.model import make_model
from kvtier.bench.processes.companion import companion
from kvtier.bench.processes.servers import free_port
from kvtier.bench.report import Row, median_row, percentile
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT

LONGEST_TOKENS, BATCH_TOKENS, BLOCKS = 40_960, 8_192, 30_000
ALONE = "vLLM"
DECODING, MOST_DECODING = (64, 256, 512), 1_024
LONG_TOKENS, PROMPT_TOKENS, PROMPTS = 32_768, 1_024, 8
MIXED_DECODING, ARRIVES_EVERY = 256, 4
TRACE_BLOCK_TOKENS, WINDOW_TOKENS = 512, 1_024
ENGINES: dict[str, tuple[bool, int, tuple[str, ...]]] = {
    "": (False, 16, ("full",)),
    ", async": (True, 16, ("full",)),
    ", with windows": (False, 16, ("full", "window")),
    ", with states": (False, 256, ("full", "state")),
}
"""The end of a row's name: whether AsyncScheduler plans, tokens of a block, the model's groups."""
HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output", "request_finished_all_groups"),
    *("take_events", "get_kv_connector_stats", "has_pending_push_work"),
)
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
_BYTES = 512 << 20
_OURS = {"ram_bytes": _BYTES, "log_level": "ERROR", LOAD_EVERY_HIT: True}
"""Nothing takes time to compute here, so no hit would pay."""
NVME, SERVED = "kvtier, RAM and NVMe", "kvtier, served"
OFFLOADING, LMCACHE = "OffloadingConnector", "LMCacheMPConnector"
_LMCACHE = CONTENDERS["lmcache-ram"]
_OFFLOADING = {
    "spec_name": "OffloadOnCPU",
    "spec_module_path": "kvtier.bench.compare.peers.offloading_cpu",
    "cpu_bytes_to_use": _BYTES,
    "block_size": 256,
}
ARMS: dict[str, dict[str, Any] | None] = {
    ALONE: None,
    "kvtier": _OURS,
    NVME: _OURS | {"ram_bytes": 4 << 20, "nvme_bytes": _BYTES},
    SERVED: _OURS,
    OFFLOADING: _OFFLOADING,
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use": _BYTES},
    LMCACHE: {"lmcache.mp.save_decode_cache": True},
}
"""Extra configuration of kvtier's connector, and of vLLM's by their names. RAM over NVMe is that of
four long prompts."""
PLACES: dict[str, Callable[[ExitStack], dict[str, Any]]] = {
    NVME: lambda ends: {"nvme_path": ends.enter_context(tempfile.TemporaryDirectory())},
    SERVED: lambda ends: {"server": f"unix://{ends.enter_context(server(_BYTES))[0]}"},
    LMCACHE: lambda ends: {"lmcache.mp.port": lmcache_server(ends)},
}
"""More configuration of an arm: where its places are, until the end."""


class Spent(NamedTuple):
    """CPU seconds of a step: vLLM's own, all of the connector's calls, and its longest call, with
    and without Python's collections. For how long the thread waited. Of its message the bytes, and
    the time to pickle it. The worker's time."""

    vllm_s: float
    added_s: float
    longest_s: float
    longest_own_s: float
    waited_s: float
    message_bytes: float
    message_s: float
    worker_s: float


ROWS = {
    "added_s": " adds",
    "p99_s": " adds, p99",
    "longest_s": ", longest call",
    "longest_own_s": ", longest call but for collections",
    "waited_s": ", waited",
    "message_s": ", message pickled",
    "worker_s": ", worker",
    "message_bytes": ", message",
}
"""The end of a row's name."""


def lmcache_server(ends: ExitStack) -> int:
    """The port of LMCache's own server, of another process."""
    port, log = free_port(), Path(ends.enter_context(tempfile.TemporaryDirectory()), "log")
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(port)]
    command += ["--l1-size-gb", "0.5", "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "auto"]

    def ready() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("localhost", port)) == 0

    ends.enter_context(companion(command, _LMCACHE.env, ready, log, 60.0))
    return port


class Ended:
    """SimpleCPUOffload's streams, events and copies, on a host without a GPU: all ends at once."""

    priority_range = staticmethod(lambda: (0, 0))
    init = record = query = staticmethod(lambda *_: True)

    def __init__(self, *_: object, **__: object) -> None:
        """Nothing is made."""

    def launch_copy(self, *_: object, event_idx: int, events_list: list[Any], **__: object) -> None:
        events_list.append((event_idx, self))


class SchedulingLoop:
    """vLLM's scheduler and the connector's worker half. A step's output comes back one step later
    where the scheduler is asynchronous."""

    def __init__(self, model: Path, arm: str, engine: str, place: dict[str, Any]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        is_async, tokens, groups = ENGINES[engine]
        transfer = TRANSFER if "kvtier" in arm else {"kv_connector": arm, "kv_role": "kv_both"}
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=LONGEST_TOKENS,
            max_num_seqs=1_024,
            max_num_batched_tokens=BATCH_TOKENS,
            block_size=tokens,
            enforce_eager=True,
            kv_transfer_config=None
            if (extra := ARMS[arm]) is None
            else transfer | {"kv_connector_extra_config": extra | place},
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.kv_cache_layout = "LBHNC"
        if "state" in groups:
            config.cache_config.mamba_cache_mode = "align"
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(tokens, sha256)
        cache, made = cache_of(groups, tokens), StructuredOutputManager(config)
        self.worker: Any = None
        self.has_nvme = arm == NVME
        with set_current_vllm_config(config):
            if arm != ALONE:
                make = KVConnectorFactory.create_connector
                self.worker = make(config, KVConnectorRole.WORKER, cache)
            kind = AsyncScheduler if is_async else Scheduler
            self.scheduler = kind(config, cache, made, block_size=tokens, log_stats=True)
        self._in_flight, self._depth = deque[tuple[Any, Any]](), 1 + is_async
        self.hooks: dict[str, list[int]] = defaultdict(list)
        self.calls: dict[str, list[int]] = defaultdict(list)
        self._own = list[int]()
        self._collections = Collections()
        self._message = (0.0, 0.0, 0.0)
        self.hit_tokens = 0
        self._names = iter(range(1 << 30))
        if arm != ALONE:
            self._join(cache)
        freeze_gc_heap()  # as an engine does when it has started

    def _join(self, cache: Any) -> None:
        """The halves learn of each other, and every hook of the scheduler's is timed."""
        import torch
        from vllm.distributed.kv_transfer import kv_transfer_state

        connector = self.scheduler.connector
        if type(connector).__name__ == "SimpleCPUOffloadConnector":
            from vllm.v1.simple_kv_offload import worker

            torch.cuda.Stream = torch.cuda.current_stream = torch.Event = Ended
            worker.DmaCopyBackend = Ended
        (tensor,) = cache.kv_cache_tensors
        memory = torch.zeros(tensor.size, dtype=torch.uint8).view(torch.float32)
        tokens = cache.kv_cache_groups[0].kv_cache_spec.block_size
        layer = memory.view(BLOCKS, 1, tokens, -1)
        self.worker.register_kv_caches(dict.fromkeys(tensor.layers, layer))
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        told = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))  # noqa: S301 - our own
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        if told is not None:
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        store: Any = getattr(getattr(connector, "_scheduler", None), "store", None)
        if hasattr(store, "touched"):
            store.touched.result()  # an engine's pages are there before its first request
        matched = connector.get_num_new_matched_tokens

        def noted(*told: Any) -> Any:
            found = matched(*told)
            self.hit_tokens = max(self.hit_tokens, found[0] or 0)
            return found

        connector.get_num_new_matched_tokens = noted
        for name in HOOKS:
            hook, spent = getattr(connector, name), self.hooks[name]
            setattr(connector, name, _timed(hook, spent, self._own, self._collections))

    def ask(self, tokens: list[int], answer: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        name, hasher = str(next(self._names)), self._hasher
        self.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=hasher))

    def step(self) -> Spent:
        waited, begun = waited_ns(), time.thread_time_ns()
        output = self.scheduler.schedule()
        took = time.thread_time_ns() - begun
        self._in_flight.append((output, self._worked(output)))
        if len(self._in_flight) == self._depth:
            output, result = self._in_flight.popleft()
            begun = time.thread_time_ns()
            self.scheduler.update_from_output(output, result)
            took += time.thread_time_ns() - begun
        waited = waited_ns() - waited
        before = sum(self.hooks["on_new_request"])  # outside of these two calls
        calls = [one for spent in self.hooks.values() for one in spent]
        for name, spent in self.hooks.items():
            if spent:
                self.calls[name] += spent
                spent.clear()
        longest = max(calls, default=0), max(self._own, default=0)
        times = took - sum(calls) + before, sum(calls), *longest, waited
        self._own.clear()
        return Spent._make((*(one / 1e9 for one in times), *self._message))

    def _worked(self, output: Any) -> Any:
        """The answer of a worker that computes nothing."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        told = None
        if self.worker is not None:
            clock, begun = time.thread_time_ns, time.thread_time_ns()
            sent = pickle.dumps(output.kv_connector_metadata, pickle.HIGHEST_PROTOCOL)
            pickled_s = (clock() - begun) / 1e9
            worker, message = self.worker, pickle.loads(sent)  # noqa: S301 - our own
            begun = clock()
            worker.bind_connector_metadata(message)
            worker.start_load_kv(None)
            worker.wait_for_save()
            sending, receiving = worker.get_finished(output.finished_req_ids)
            told = KVConnectorOutput(
                finished_sending=sending,
                finished_recving=receiving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
            self._message = len(sent), pickled_s, (clock() - begun) / 1e9
        names, there = list(output.num_scheduled_tokens), self.scheduler.requests
        sampled = [
            [7] if there[name].num_computed_tokens >= there[name].num_tokens - 1 else []
            for name in names
        ]
        places = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled, kv_connector_output=told)

    def settle(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def decode(self, running: int, draw: random.Random, steps: int = 0) -> list[Spent]:
        """Steps in which so many requests decode, none of which ends."""
        while len(self.scheduler.requests) < running:
            self.ask(prompt(draw, draw.randrange(20, 200)), LONG_TOKENS // 2)
        self.settle(12)
        return [self.step() for _ in range(steps)]

    def crowd_out(self) -> None:
        """Nothing is left in vLLM's own cache of blocks that no request has."""
        blocks = self.scheduler.kv_cache_manager.block_pool
        blocks.free_blocks(blocks.get_new_blocks(blocks.get_num_free_blocks()))


def cache_of(groups: Sequence[str], tokens: int) -> Any:
    """Groups of one layer each, which lie over one another, as vLLM plans them."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    shape = {"block_size": tokens, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
    full = kv.FullAttentionSpec(**shape)
    page = full.page_size_bytes
    specs = {
        "full": full,
        "window": kv.SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **shape),
        "state": kv.MambaSpec(tokens, ((page // 4,),), (torch.float32,), mamba_cache_mode="align"),
    }
    names = [f"model.layers.{number}.attn" for number in range(len(groups))]
    tensor = kv.KVCacheTensor(page * BLOCKS, names, page * BLOCKS, page)
    made = [
        kv.KVCacheGroupSpec([one], specs[group]) for one, group in zip(names, groups, strict=True)
    ]
    return kv.KVCacheConfig(BLOCKS, [tensor], made)


def waited_ns() -> int:
    """How long this thread has not run, other than because the kernel ran others. Two differ by
    that time."""
    delayed = Path("/proc/thread-self/schedstat").read_text("ascii").split()[1]
    return time.monotonic_ns() - time.thread_time_ns() - int(delayed)


class Collections:
    """CPU time of Python's collections on this thread: each goes over all modules' objects, and
    falls into whoever makes the next one."""

    def __init__(self) -> None:
        self.spent_ns, self._begun, self._thread = 0, 0, threading.get_ident()
        gc.callbacks.append(self._told)

    def _told(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread:
            now = time.thread_time_ns()
            self.spent_ns += now - self._begun if phase == "stop" else 0
            self._begun = now


def _timed(
    hook: Callable[..., Any], spent: list[int], own: list[int], collections: Collections
) -> Callable[..., Any]:
    def timed(*told: Any, **named: Any) -> Any:
        collected, begun = collections.spent_ns, time.thread_time_ns()
        try:
            return hook(*told, **named)
        finally:
            spent.append(time.thread_time_ns() - begun)
            own.append(spent[-1] - collections.spent_ns + collected)

    return timed


def prompt(draw: random.Random, tokens: int) -> list[int]:
    return draw.choices(range(1, 500), k=tokens)


def recorded(trace: str) -> Iterator[tuple[list[int], int]]:
    """Prompts of a trace in Mooncake's form, and the lengths of their answers."""
    for line in Path(trace).read_text("ascii").splitlines():
        one = json.loads(line)
        blocks = (prompt(random.Random(name), TRACE_BLOCK_TOKENS) for name in one["hash_ids"])
        most = min(one["input_length"], LONG_TOKENS)
        yield [*islice(chain.from_iterable(blocks), most)], one["output_length"]


def workloads(
    engine: SchedulingLoop, trace: str | None, steps: int = 80
) -> Iterator[tuple[str, list[Spent]]]:
    """Name and steps of each, one after the other on one engine."""
    from vllm.v1.request import RequestStatus

    draw = random.Random(1)
    for running in DECODING:
        yield f"decode of {running}", engine.decode(running, draw, steps)
    long = prompt(draw, LONG_TOKENS)
    for what in ("cold", "from RAM", *["from NVMe"] * engine.has_nvme):
        if what == "from NVMe":
            for _ in range(5):
                engine.ask(prompt(draw, LONG_TOKENS), 1)
                engine.settle(8)
            engine.crowd_out()
        engine.hit_tokens = 0
        engine.ask(long, 1)
        found = [engine.step() for _ in range(8)]
        engine.settle(20)
        engine.crowd_out()
        hit = engine.worker is not None and what != "cold"
        if hit and engine.hit_tokens < LONG_TOKENS // 2:
            raise SystemExit(f"{what}: only {engine.hit_tokens} tokens of the prompt were a hit")
        yield f"32k {what} beside {running}", [max(found, key=lambda one: one.added_s)]
    yield f"decode of {MOST_DECODING}", engine.decode(MOST_DECODING, draw, steps)
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.settle(4)
    prompts = [prompt(draw, PROMPT_TOKENS) for _ in range(steps // 2 * PROMPTS)]
    for what in ("cold", "known"):
        found = []
        for number, one in enumerate(prompts, 1):
            engine.ask(one, 1)
            if number % PROMPTS == 0:
                found.append(engine.step())
        engine.settle(20)
        engine.crowd_out()
        yield f"eight {what} prompts", found
    if trace is None:
        return
    engine.decode(MIXED_DECODING, draw)
    arrivals, found = recorded(trace), []
    for number in range(steps):
        if number % ARRIVES_EVERY == 0:
            engine.ask(*next(arrivals))
        found.append(engine.step())
    yield f"mixed, beside {MIXED_DECODING}", found


def measure(model: str, arm: str, kind: str, trace: str | None) -> None:
    """Write of each workload the means over its steps, but the longest call of all; of each hook
    the median of its calls, their 99th percentile and the longest. Ends the process, because its
    threads have nothing to finish."""
    told = {}
    with ExitStack() as ends:
        place = PLACES[arm](ends) if arm in PLACES else {}
        engine = SchedulingLoop(Path(model), arm, kind, place)
        for name, found in workloads(engine, trace):
            mean = Spent(*map(statistics.fmean, zip(*found, strict=True)))
            told[name] = mean._asdict() | {
                "longest_s": max(one.longest_s for one in found),
                "longest_own_s": max(one.longest_own_s for one in found),
                "p99_s": percentile([one.added_s for one in found], 99),
                "hooks_ns": {
                    hook: (statistics.median(spent), percentile(spent, 99), max(spent))
                    for hook, spent in engine.calls.items()
                },
            }
            engine.calls.clear()
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


def measured(model: str, arm: str, kind: str, trace: str | None) -> dict[str, Any]:
    """In a process. Raises BenchError where the arm of a peer cannot run."""
    peer = _LMCACHE if arm == LMCACHE else CONTENDERS["none"]
    if peer.obstacle:
        raise BenchError(peer.obstacle)
    code = f"from kvtier.bench.micro import step; step.measure{(model, arm, kind, trace)!r}"
    environment = os.environ | ENVIRONMENT | dict(peer.env)
    command = [peer.interpreter, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [one for one in done.stdout.splitlines() if one.startswith("{")]
    if not lines:
        raise BenchError(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


FACTS: dict[str, dict[str, Any]] = {"cannot_run": {}, "hooks_ns": {}}
"""Why an arm cannot run. In the last round the calls of kvtier's hooks, by workload."""


def rows_of(given: argparse.Namespace) -> list[Row]:
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder, "tiny"), "tiny"))
        for _, kind, arm in product(range(given.rounds), ENGINES, ARMS):
            if kind and arm not in (ALONE, "kvtier", OFFLOADING):
                continue
            try:
                told = measured(model, arm, kind, given.trace)
            except BenchError as error:
                if "kvtier" in arm or arm == ALONE:
                    raise
                FACTS["cannot_run"][f"{arm}{kind}"] = str(error)
                continue
            for name, one in told.items():
                found[f"{name}{kind}"][arm].append(one)
                FACTS["hooks_ns"] |= {f"{name}{kind}": one["hooks_ns"]} if arm == "kvtier" else {}
    rows = []
    for name, by_arm in found.items():
        alone = [1e3 * one["vllm_s"] for one in by_arm.get(ALONE, ())]
        rows += [median_row(f"{name}: vLLM", alone, "ms") for _ in alone[:1]]
        for arm, what in product([one for one in by_arm if one != ALONE], ROWS):
            unit, scale = ("bytes", 1) if what == "message_bytes" else ("ms", 1e3)
            values = [scale * one[what] for one in by_arm[arm]]
            limit = statistics.median(alone) if alone and what == "added_s" else None
            beside = (limit, statistics.median(values) / limit) if limit else ()
            rows.append(median_row(f"{name}: {arm}{ROWS[what]}", values, unit, *beside))
    return rows


if __name__ == "__main__":
    run_micro("step", __doc__, 3, rows_of, "--trace", facts=lambda: FACTS)
