"""Cost of a step of vLLM's scheduling thread: its real Scheduler, both halves of the connector, and
a model that computes nothing.

    python -m kvtier.bench.micro.step [--async]

Without a connector, with kvtier's over RAM, over RAM and NVMe, and with vLLM's OffloadingConnector
in turn, each in a process of its own. A row is CPU time of the scheduling thread in one step:
vLLM's own, and what all hooks of a connector add. *Message*: the step's metadata, as vLLM pickles
it for workers. *Worker*: a worker's hooks in the step.

- *decode of N*: N requests that each get one token a step, none of which ends.
- *eight cold prompts*: of 1,024 tokens each, in one step, of which nothing is known. In the same
  step eight others end.
- *32k cold*, *from RAM*, *from NVMe*: the dearest step of a prompt of 32,768 tokens beside 512 that
  decode.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.flags import described
from kvtier.bench.model import make_model
from kvtier.bench.report import Row, median_row, print_rows, write_results
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT

BLOCK_TOKENS, LONGEST_TOKENS, BATCH_TOKENS, BLOCKS = 16, 40_960, 8_192, 30_000
LAYER = "model.layers.0.attn"
ALONE = "vLLM"
DECODING, MOST_DECODING = (64, 256, 512), 1_024
LONG_TOKENS, PROMPT_TOKENS, PROMPTS = 32_768, 1_024, 8
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
NVME = "kvtier, RAM and NVMe"
_SMALL_RAM = {"ram_bytes": 4 << 20, "nvme_bytes": _BYTES}
"""RAM for four prompts of 32,768 tokens."""
_OFFLOADING = {
    "spec_name": "OffloadOnCPU",
    "spec_module_path": "kvtier.bench.compare.peers.offloading_cpu",
    "cpu_bytes_to_use": _BYTES,
    "block_size": 256,
}
ARMS: dict[str, dict[str, Any] | None] = {
    ALONE: None,
    "kvtier": TRANSFER | {"kv_connector_extra_config": _OURS},
    NVME: TRANSFER | {"kv_connector_extra_config": _OURS | _SMALL_RAM},
    "OffloadingConnector": {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": _OFFLOADING,
    },
}


class Spent(NamedTuple):
    """CPU seconds of a step: vLLM's own, all of the connector's calls, and its longest call. Of its
    message the bytes, and the time to pickle it. The worker's time."""

    vllm_s: float
    added_s: float
    longest_s: float
    message_bytes: float
    message_s: float
    worker_s: float


class SchedulingLoop:
    """vLLM's scheduler and the connector's worker half. A step's output comes back one step later
    where the scheduler is asynchronous."""

    def __init__(self, model: Path, arm: str, *, is_async: bool) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=LONGEST_TOKENS,
            max_num_seqs=1_024,
            max_num_batched_tokens=BATCH_TOKENS,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            kv_transfer_config=_arm(arm, model),
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = BLOCKS
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        cache, made = one_layer(), StructuredOutputManager(config)
        self.worker: Any = None
        self.has_nvme = arm == NVME
        with set_current_vllm_config(config):
            if arm != ALONE:
                make = KVConnectorFactory.create_connector
                self.worker = make(config, KVConnectorRole.WORKER, cache)
            kind = AsyncScheduler if is_async else Scheduler
            self.scheduler = kind(config, cache, made, block_size=BLOCK_TOKENS, log_stats=True)
        self._in_flight, self._depth = deque[tuple[Any, Any]](), 1 + is_async
        self.hooks: dict[str, list[int]] = defaultdict(list)
        self._message = (0.0, 0.0, 0.0)
        self.hit_tokens = 0
        self._names = iter(range(1 << 30))
        if arm != ALONE:
            self._join()

    def _join(self) -> None:
        """The halves learn of each other, and every hook of the scheduler's is timed."""
        import torch
        from vllm.distributed.kv_transfer import kv_transfer_state

        connector = self.scheduler.connector
        self.worker.register_kv_caches({LAYER: torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 1, 4)})
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        told = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))  # noqa: S301 - our own
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        if told is not None:
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        if (half := getattr(connector, "_scheduler", None)) is not None:
            half.store.touched.result()  # an engine's pages are there before its first request
        matched = connector.get_num_new_matched_tokens

        def noted(*told: Any) -> Any:
            found = matched(*told)
            self.hit_tokens = max(self.hit_tokens, found[0] or 0)
            return found

        connector.get_num_new_matched_tokens = noted
        for name in HOOKS:
            setattr(connector, name, _timed(getattr(connector, name), self.hooks[name]))

    def ask(self, tokens: list[int], answer: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        name = str(next(self._names))
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def step(self) -> Spent:
        begun = time.thread_time_ns()
        output = self.scheduler.schedule()
        took = time.thread_time_ns() - begun
        self._in_flight.append((output, self._worked(output)))
        if len(self._in_flight) == self._depth:
            output, result = self._in_flight.popleft()
            begun = time.thread_time_ns()
            self.scheduler.update_from_output(output, result)
            took += time.thread_time_ns() - begun
        before = sum(self.hooks["on_new_request"])  # outside of these two calls
        calls = [one for spent in self.hooks.values() for one in spent]
        own, longest = took - sum(calls) + before, max(calls, default=0)
        for spent in self.hooks.values():
            spent.clear()
        return Spent(own / 1e9, sum(calls) / 1e9, longest / 1e9, *self._message)

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

    def abort(self) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([*self.scheduler.requests], RequestStatus.FINISHED_ABORTED)


def _arm(arm: str, folder: Path) -> dict[str, Any] | None:
    """The arm's KV transfer, with a fresh place for NVMe."""
    told = ARMS[arm]
    if told is None or arm != NVME:
        return told
    place = tempfile.mkdtemp(dir=folder.parent)
    extra = told["kv_connector_extra_config"] | {"nvme_path": place}
    return told | {"kv_connector_extra_config": extra}


def one_layer() -> Any:
    """One group of full attention, as vLLM plans it."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    spec = kv.FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=4, dtype=torch.float32
    )
    page = spec.page_size_bytes
    tensor = kv.KVCacheTensor(page * BLOCKS, [LAYER], page * BLOCKS, page)
    return kv.KVCacheConfig(BLOCKS, [tensor], [kv.KVCacheGroupSpec([LAYER], spec)])


def _timed(hook: Callable[..., Any], spent: list[int]) -> Callable[..., Any]:
    def timed(*told: Any, **named: Any) -> Any:
        begun = time.thread_time_ns()
        try:
            return hook(*told, **named)
        finally:
            spent.append(time.thread_time_ns() - begun)

    return timed


def prompt(draw: random.Random, tokens: int) -> list[int]:
    return draw.choices(range(1, 500), k=tokens)


def workloads(engine: SchedulingLoop, steps: int) -> Iterator[tuple[str, list[Spent]]]:
    """Name and steps of each, one after the other on one engine."""
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
    engine.abort()
    engine.settle(4)
    found = []
    for _ in range(steps // 2):
        for _ in range(PROMPTS):
            engine.ask(prompt(draw, PROMPT_TOKENS), 1)
        found.append(engine.step())
    yield "eight cold prompts", found


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Of each workload the medians, but the longest call of all."""
    engine = SchedulingLoop(given.model, given.arm, is_async=given.is_async)
    told = {}
    for name, found in workloads(engine, given.steps):
        middle = Spent(*map(statistics.median, zip(*found, strict=True)))
        told[name] = middle._replace(longest_s=max(one.longest_s for one in found))
    return told


def _in_a_process(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvtier.bench.micro.step", *words]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [one for one in done.stdout.splitlines() if one.startswith("{")]
    if not lines:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows_of(found: dict[str, dict[str, list[Any]]]) -> Iterator[Row]:
    for name, by_arm in found.items():
        alone, middle = by_arm.pop(ALONE, None), None
        if alone is not None:
            own = [1e3 * one[0] for one in alone]
            middle = statistics.median(own)
            yield median_row(f"{name}: vLLM", own, "ms")
        for arm, told in by_arm.items():
            _, added, longest, sizes, pickled, worker = zip(*told, strict=True)
            milli = [1e3 * one for one in added]
            share = None if middle is None else statistics.median(milli) / middle
            yield median_row(f"{name}: {arm} adds", milli, "ms", middle, share)
            for what, seconds in (
                ("longest call", longest),
                ("message pickled", pickled),
                ("worker", worker),
            ):
                yield median_row(f"{name}: {arm}, {what}", [1e3 * one for one in seconds], "ms")
            yield Row(f"{name}: {arm}, message", statistics.median(sizes), "bytes")


def main() -> int:
    parser = described(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of all arms (default: 3)")
    add("--steps", type=int, default=100, help="of each workload (default: 100)")
    add("--async", dest="is_async", action="store_true", help="vLLM's AsyncScheduler")
    add("--out", type=Path, default=Path("build/step/step.json"))
    add("--arm", help=argparse.SUPPRESS)
    add("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        sys.stdout.write(json.dumps(measured(given)) + "\n")
        sys.stdout.flush()
        os._exit(0)  # its threads have nothing to finish
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model", str(make_model(Path(folder, "tiny"), "tiny"))]
        words += ["--steps", str(given.steps), *["--async"] * given.is_async]
        for _ in range(given.rounds):
            for arm in ARMS:
                for name, told in _in_a_process(["--arm", arm, *words]).items():
                    found[name][arm].append(told)
    rows = [*rows_of(found)]
    print_rows(rows)
    write_results(given.out, "step", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
