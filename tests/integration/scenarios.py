"""What the integration tests make a real vLLM do: run as ``python -m tests.integration.scenarios
NAME OUT MODEL``, or by a fork server.

A scenario runs the same prompts on one engine, with or without kvtier (the environment decides:
``WITH_KVTIER=1``), and writes every answer's tokens, logprobs and cached token count as JSON. The
tests compare the two files. Nothing leaks from one run to the next: each has processes of its own.
As in production these are vLLM's three (its front end, engine core and worker), or one that does
all, when ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.transfer import transfer

BLOCK = 32
CHUNK = 64
SMALL, PLENTY = 24, 1024
"""Blocks of an engine that cannot keep two documents of :func:`document` size, and of one that
keeps them all."""

ARGUMENTS = "TEST_ENGINE_ARGUMENTS"
"""A variable of the tests: what every engine gets beside the rest, as JSON, and in its place."""

_LONG_S = 120.0


def document(seed, tokens=16 * BLOCK + 1):
    """A prompt whose longest reusable prefix ends at a chunk: hits are as long as those of vLLM's
    own cache."""
    draw = random.Random(seed)
    return [draw.randrange(10, 400) for _ in range(tokens)]


class Engine:
    """A vLLM engine as the tests want it: float32, so that a different split of a prefill cannot
    change an answer."""

    def __init__(self, model, blocks=SMALL, **arguments):
        """``blocks`` of KV cache with kvtier; the plain engine gets enough to keep everything in
        its own cache."""
        from vllm import LLM

        if Path(model).name == "mla":  # vLLM's MLA kernel on CPU has blocks of half the size
            blocks *= 2
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 736,
            "enforce_eager": True,
            "block_size": BLOCK,
            "num_gpu_blocks_override": blocks,
            "seed": 0,
        }
        if os.environ.get("WITH_KVTIER") == "1":
            settings["kv_transfer_config"] = transfer()
        else:
            settings["num_gpu_blocks_override"] = PLENTY
        given = json.loads(os.environ.get(ARGUMENTS, "{}"))
        self.llm = LLM(model, **(settings | arguments | given))

    def forget(self):
        """Empty vLLM's own prefix cache. With async scheduling and a connector vLLM frees blocks
        one step after their request's last, so the steps that are under way end first."""
        core: Any = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        until = time.monotonic() + _LONG_S
        while core is not None and getattr(core, "batch_queue", None):
            core.step_fn()
        while (
            not self.llm.reset_prefix_cache()
        ):  # an engine in a process of its own steps by itself
            assert core is None and time.monotonic() < until, "blocks are held"

    def ask(self, prompts, salt=None, **more):
        """Answers in order: ``tokens``, ``logprobs`` of each, ``cached`` tokens,
        ``prompt_logprobs`` when asked."""
        from vllm import SamplingParams

        lora = more.pop("lora", None)
        settings: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
            "logprobs": 0,
        }
        inputs: list[Any] = [
            {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            for prompt in prompts
        ]
        outputs = self.llm.generate(
            inputs, SamplingParams(**(settings | more)), use_tqdm=False, lora_request=lora
        )
        return [answer(output) for output in outputs]

    def metric(self, name):
        """A counter of vLLM's own."""
        found = [metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}"]
        return int(sum(found))


def answer(output, one=None):
    """``one`` of several answers; else the first."""
    best = one or output.outputs[0]
    logprobs = [next(iter(step.values())).logprob for step in best.logprobs or ()]
    prompt = [
        None if step is None else next(iter(step.values())).logprob
        for step in output.prompt_logprobs or ()
    ]
    return {
        "tokens": list(best.token_ids),
        "text": best.text,
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "prompt_logprobs": prompt,
    }


def rounds(engine, documents=3, times=2, **more):
    """The documents one by one, all of them ``times`` times: from the second time on they can be
    hits."""
    return [
        answer
        for _ in range(times)
        for seed in range(documents)
        for answer in engine.ask([document(seed)], **more)
    ]


def plain(model):
    return rounds(Engine(model))


def features(model):
    """What one default engine must get right: salts, prompt logprobs, batches, multi-turn, chunked
    prefill."""
    engine = Engine(model, max_num_batched_tokens=256, blocks=64, disable_log_stats=False)
    engine.ask([document(seed) for seed in range(6)])
    result: dict[str, Any] = {"batch": engine.ask([document(seed) for seed in range(6)])}
    result["salt_a"] = engine.ask([document(0)], salt="a")
    result["salt_b"] = engine.ask([document(0)], salt="b")
    result["counts"] = counts(engine)
    apart: dict[str, Any] = {"extra_args": {"kv_transfer_params": {"kvtier.cache": False}}}
    result["apart"] = engine.ask([document(9)], **apart)
    filler(engine)
    result["apart"] += engine.ask([document(9)]) + engine.ask([document(0)], salt="a", **apart)
    filler(engine)
    result["salt_a_again"] = engine.ask([document(0)], salt="a")
    result["prompt_logprobs"] = engine.ask([document(1)], prompt_logprobs=0)
    turn = document(7)
    first = engine.ask([turn], max_tokens=2 * CHUNK + 8)[0]
    filler(engine)
    longer = turn + first["tokens"] + document(8, 40)
    result["turns"] = [first, engine.ask([longer])[0]]
    return result


def filler(engine):
    """Push everything out of the engine's own prefix cache, so that the next hit can only be
    kvtier's."""
    for seed in range(100, 106):
        engine.ask([document(seed)], max_tokens=1)


def several_connectors(model):
    """kvtier behind another connector, which answers the handshake, in vLLM's MultiConnector."""
    ours = transfer()
    other = {
        "kv_connector": "PrefilledElsewhere",
        "kv_connector_module_path": "tests.trust.engine.beside",
        "kv_role": "kv_both",
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [other, ours]},
    }
    return rounds(Engine(model, kv_transfer_config=both))


def bare_name(model):
    bare = transfer(kv_connector_module_path=None)
    more: dict[str, Any] = (
        {"kv_transfer_config": bare} if os.environ.get("WITH_KVTIER") == "1" else {}
    )
    return rounds(Engine(model, **more))


def lora(model):
    """Base model and two adapters on one prompt: three different answers, each a hit only of its
    own."""
    from vllm.lora.request import LoRARequest

    from tests.integration.tiny_models import make_lora

    folder = Path(os.environ["TEST_FOLDER"])
    adapters = [None]
    for index in (1, 2):
        make_lora(folder / f"lora{index}", Path(model), seed=index)
        adapters.append(LoRARequest(f"lora{index}", index, str(folder / f"lora{index}")))
    engine = Engine(model, enable_lora=True, max_loras=2, max_lora_rank=8, disable_log_stats=False)
    first = [engine.ask([document(0)], lora=adapter)[0] for adapter in adapters]
    filler(engine)
    second = [engine.ask([document(0)], lora=adapter)[0] for adapter in adapters]
    return {"first": first, "second": second, "counts": counts(engine)}


def abort(model):
    """Requests aborted while waiting, loading and decoding leave nothing behind."""
    from vllm import SamplingParams

    engine = Engine(model)
    first = rounds(engine, times=1)
    core = engine.llm.llm_engine
    for seed in range(3):
        core.add_request(
            f"aborted-{seed}", {"prompt_token_ids": document(seed)}, SamplingParams(max_tokens=64)
        )
    core.step()
    core.abort_request([f"aborted-{seed}" for seed in range(3)])
    while core.has_unfinished_requests():
        core.step()
    return first + rounds(engine, times=1)


def continued(model):
    """Each prompt is asked again with its answer's first token: what follows must be what followed
    before.

    The one way to check MLA on the CPU backend to the bit against an answer without a hit. There
    vLLM's decode kernel differs from its own prefill, so such an answer may only be compared with a
    decoded one. That is why vLLM turns prefix caching off there and kvtier declines. Here it is
    turned on again, as it is on GPUs.
    """
    allow_prefixes()
    engine = Engine(model)
    result = []
    for seed in range(2):
        prompt = document(seed)[:-1]
        result += engine.ask([prompt], max_tokens=9)
        filler(engine)
        result += engine.ask([prompt + result[-1]["tokens"][:1]])
    return result


def allow_prefixes():
    """The platform has no say about prefix caching."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(vllm_config):
        wanted = vllm_config.cache_config.enable_prefix_caching
        check(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = staticmethod(checked)


def load_failure(model):
    """A third of the loads scribble over their blocks and fail; answers must not change. And how
    many did."""
    answers = rounds(_with_patch("failing_loads", model), times=4)
    return {"answers": answers, "failures": _noted()}


def device(model):
    """KV moves as on a GPU, by streams and staging buffers, which here are threads. And how many
    chunks were loaded."""
    answers = rounds(_with_patch("threaded_streams", model), times=3)
    return {"answers": answers, "chunks": _noted()}


def in_parts(model):
    """A prompt of 32 blocks, twice, and the parts of loads that the worker was told of: ``.``, or
    ``!`` with the load's end. ``-`` is an end that it was told of by itself."""
    engine = _with_patch("counted_parts", model, blocks=100, max_model_len=1_100)
    prompt, answers = document(5, 32 * BLOCK + 1), []
    for _ in range(2):
        answers += engine.ask([prompt])
        engine.forget()
    return {"answers": answers, "parts": _notes().read_text() if _notes().exists() else ""}


def _with_patch(patch, model, **arguments):
    """vLLM spawns the engine's processes on CPUs: they are patched when they import this file
    (:data:`PATCHES`)."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        PATCHES[patch]()
    os.environ["TEST_PATCH"] = patch
    return Engine(model, **arguments)


def _note(what="."):
    with _notes().open("a") as file:
        file.write(what)


def _noted():
    return len(_notes().read_text()) if _notes().exists() else 0


def _notes():
    return Path(os.environ["TEST_FOLDER"]) / "notes"


def failing_loads():
    """The worker copies a chunk a call, and a document has eight: of three loads one fails, half
    way."""
    from kvtier.gpu import PagedBlocks

    calls, load = [0], PagedBlocks.load

    def failing(self, jobs):
        calls[0] += 1
        if calls[0] % 20 == 10:
            _note()
            for region in self._regions:
                for _, _, ids in jobs:
                    region.rows[ids] = 0x7F
            raise OSError("injected: the slot could not be read")
        return load(self, jobs)

    PagedBlocks.load = failing  # type: ignore[method-assign]


def threaded_streams():
    from kvtier.gpu import PagedBlocks
    from kvtier.gpu.staged import StagedCopier
    from tests.threaded_streams import ThreadedStreams

    make, load = PagedBlocks.__init__, StagedCopier.load

    def on_threads(self, regions, per_chunk, **_):
        make(self, regions, per_chunk, locked=lambda _: (), streams=ThreadedStreams())

    def noted(self, jobs, ids):
        for _ in jobs:
            _note()
        return load(self, jobs, ids)

    PagedBlocks.__init__ = on_threads  # type: ignore[assignment, method-assign]
    StagedCopier.load = noted  # type: ignore[method-assign]


def counted_parts():
    from kvtier.connectors.vllm.worker_side.worker import WorkerHalf

    begin_load = WorkerHalf.load

    def counted(self, metadata):
        for job in metadata.loads:
            if job.part_of is not None:
                _note("." if job.end is None else "!")
        _note("-" * len(metadata.ends))
        begin_load(self, metadata)

    WorkerHalf.load = counted  # type: ignore[method-assign]


def pipeline_buffers():
    """vLLM's CPU worker skips the dummy run that makes the buffers in which a later stage receives.
    It dies without."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def repaired(self, *arguments, **more):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *arguments, **more)

    GPUModelRunner.sync_and_gather_intermediate_tensors = repaired


PATCHES = {
    function.__name__: function
    for function in (failing_loads, threaded_streams, counted_parts, pipeline_buffers)
}


def stalled(model):
    """A Redis that stops answering and then goes on: answers, and the connector's counts, before,
    meanwhile, after."""
    redis, engine = int(os.environ["TEST_REDIS_PID"]), Engine(model, disable_log_stats=False)

    def phase(answers):
        return {"answers": answers, "counts": counts(engine)}

    result = {"before": phase(rounds(engine, times=3))}
    os.kill(redis, signal.SIGSTOP)
    try:
        result["stalled"] = phase(rounds(engine, times=3))
    finally:
        os.kill(redis, signal.SIGCONT)
    loaded, until, answers = (
        counts(engine)["loaded_redis"],
        time.monotonic() + 120,
        list[dict[str, Any]](),
    )
    while counts(engine)["loaded_redis"] == loaded and time.monotonic() < until:
        answers += rounds(engine, times=1)
    return result | {"after": phase(answers)}


def counts(engine):
    """The connector's counts as vLLM's own metrics show them, but for what has not happened."""
    found = {}
    for metric in engine.llm.get_metrics():
        kind, _, rest = metric.name.removeprefix("vllm:kvtier_").partition("_")
        if rest == "chunks" and metric.value:
            found[f"{kind}_{metric.labels.get('reason') or metric.labels.get('place')}"] = int(
                metric.value
            )
    return found


def refused(model):
    """A recurrent model where vLLM caches no prefixes, so that kvtier cannot keep it: the engine
    must not start."""
    Engine(model, enable_prefix_caching=False)
    return "started"


def answered(scenarios):
    """The program of a module of scenarios: runs the one that its words name."""
    name, out, model = sys.argv[1:4]
    Path(out).write_text(json.dumps(scenarios[name](model)))


main = partial(answered, globals())
if __name__ == "__mp_main__" and "TEST_PATCH" in os.environ:
    PATCHES[os.environ["TEST_PATCH"]]()
if __name__ == "__main__":
    main()
