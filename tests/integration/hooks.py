"""kvtier's connector in vLLM's own scheduler and worker lifecycle, with a stand-in for the model
only.

``python -m tests.integration.hooks MODEL`` prints as JSON what the vLLM on the path makes of it. It
needs no compiled code of vLLM's, so it also runs for a version that has no build for CPUs. The
stand-in writes into each position's KV a digest of all tokens up to there, and before it computes
it compares what a request has as computed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections import Counter
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.integration.transfer import transfer

BLOCK, BLOCKS, LAYERS, WIDTH = 32, 64, 2, 8
PROMPT = 4 * BLOCK + 1
MOST_STEPS = 50


class Rig:
    def __init__(self, model: str) -> None:
        arguments = EngineArgs(
            model,
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_batched_tokens=512,
            load_format="dummy",
            enable_prefix_caching=False,
            kv_transfer_config=transfer(
                kv_connector_module_path=None, kv_load_failure_policy="recompute"
            ),
        )
        self.config = arguments.create_engine_config()
        self.config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=WIDTH // 2, dtype=torch.float32
        )
        names = [f"layer.{index}" for index in range(LAYERS)]
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)])
        self.kv = {name: torch.zeros(BLOCKS, BLOCK, WIDTH) for name in names}
        with set_current_vllm_config(self.config):
            self.scheduler = Scheduler(
                self.config, caches, StructuredOutputManager(self.config), BLOCK, log_stats=True
            )
            kv_transfer_state._KV_CONNECTOR_AGENT = KVConnectorFactory.create_connector(
                self.config, _worker_role(), caches
            )
        self.worker = kv_transfer_state.get_kv_transfer_group()
        self.worker.register_kv_caches(self.kv)
        told = {(0, 0): self.worker.get_handshake_metadata()}
        self.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(told)
        self.found: dict[str, int] = {}
        """For each request, how many of its positions there were when it was first computed for."""
        self.checked = 0
        """Positions that a step found computed, with the right KV."""
        self.counts: Counter[str] = Counter()
        """What kvtier's connector has told vLLM's metrics."""

    def ask(self, name: str, prompt: list[int]) -> int:
        """Run one request to its end. Tokens of its prompt that it did not have to compute."""
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        request = Request(name, prompt, sampling, None)
        self.scheduler.add_request(request)
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_requests():
                return self.found[name]
            self.step({name: request})
        raise AssertionError(f"{name} did not come to its end in {MOST_STEPS} steps")

    def step(self, requests: dict[str, Request]) -> None:
        output = self.scheduler.schedule()
        mixin = KVConnectorModelRunnerMixin
        if not output.total_num_scheduled_tokens:
            result = mixin.kv_connector_no_forward(output, self.config)
        else:
            with (
                set_forward_context(None, self.config),
                mixin.maybe_get_kv_connector_output(output) as told,
            ):
                for name, tokens in output.num_scheduled_tokens.items():
                    self.compute(requests[name], tokens)
            names = list(output.num_scheduled_tokens)
            places = {name: index for index, name in enumerate(names)}
            sampled = [[7] if self.reaches_end(requests[name]) else [] for name in names]
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index=places,
                sampled_token_ids=sampled,
                kv_connector_output=told,
            )
        for told in self.scheduler.update_from_output(output, result).values():
            if told.scheduler_stats is not None:
                self.counts.update(told.scheduler_stats.kv_connector_stats or {})

    def reaches_end(self, request: Request) -> bool:
        return bool(request.num_computed_tokens >= request.num_tokens)

    def compute(self, request: Request, tokens: int) -> None:
        """The forward pass: ``schedule`` has counted its tokens as computed already."""
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        end = request.num_computed_tokens
        self.found.setdefault(request.request_id, end - tokens)
        for position in range(end):
            for index, cache in enumerate(self.kv.values()):
                row = cache[blocks[position // BLOCK], position % BLOCK]
                expected = digest(request.all_token_ids[: position + 1], index)
                if position >= end - tokens:
                    row[:] = expected
                elif not torch.equal(row, expected):
                    raise AssertionError(
                        f"position {position} of {request.request_id} has other KV"
                    )
        self.checked += end - tokens


def digest(tokens: Any, layer: int) -> torch.Tensor:
    text = hashlib.sha256(f"{layer}:{list(tokens)}".encode()).digest()
    return torch.tensor(list(text[:WIDTH]), dtype=torch.float32)


def _worker_role() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KVConnectorRole.WORKER


def differences(ours: type) -> list[str]:
    """Hooks of vLLM's that ours would not answer as vLLM calls them: other parameters, or abstract
    and missing."""
    found = [f"{name}: abstract" for name in sorted(getattr(ours, "__abstractmethods__", ()))]
    for name, hook in vars(KVConnectorBase_V1).items():
        own = inspect.getattr_static(ours, name)
        if name.startswith("_") or own is hook:
            continue
        if isinstance(hook, property) is not isinstance(own, property):
            found.append(f"{name}: property or not")
        elif callable(getattr(KVConnectorBase_V1, name)):
            found += _signatures(name, getattr(KVConnectorBase_V1, name), getattr(ours, name))
    return found


def _signatures(name: str, hook: Any, own: Any) -> list[str]:
    theirs, mine = inspect.signature(hook), inspect.signature(own)
    if any(one.kind is one.VAR_POSITIONAL for one in mine.parameters.values()):
        return []
    names, given = list(theirs.parameters), list(mine.parameters)
    return [] if names == given else [f"{name}{mine}: vLLM has {theirs}"]


def main() -> None:
    load_general_plugins()
    ours = KVConnectorFactory.get_connector_class_by_name("KVTierConnector")
    rig = Rig(sys.argv[1])
    prompt = [token % 250 + 10 for token in range(PROMPT)]
    cached = [rig.ask(name, prompt) for name in ("first", "second")]
    cached.append(rig.ask("other", [token + 1 for token in prompt]))
    said = {
        "vllm": vllm.__version__,
        "differences": differences(ours),
        "cached": cached,
        "checked": rig.checked,
        "counts": rig.counts,
    }
    print(json.dumps(said))  # noqa: T201 - read by the test
    rig.worker.shutdown()
    rig.scheduler.shutdown()


if __name__ == "__main__":
    main()
