"""vLLM's own Scheduler with kvtier's connector in it, and no model: steps are answered as workers
would."""

import time
from collections import Counter
from typing import Any

import torch

from kvtier.connectors.vllm import LOAD_EVERY_HIT

BLOCK, CHUNK = 16, 32


class Core:
    """A scheduler of one rank. The model's every answer is the token 7, and computing takes
    ``token_s`` a token by the clock of kvtier's load policy."""

    def __init__(self, model, settings=None, token_s=0.0, **more):
        """``settings``: kvtier's. ``more``: arguments of the engine."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from kvtier.connectors.vllm.metadata import RankLayout

        settings = settings or {"chunk_tokens": CHUNK, "ram_bytes": "8MiB", LOAD_EVERY_HIT: True}
        transfer = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={**settings},
        )
        arguments = EngineArgs(
            model=str(model),
            block_size=BLOCK,
            max_model_len=736,
            kv_transfer_config=transfer,
            dtype="float32",
            enforce_eager=True,
            max_num_batched_tokens=1024,
            **more,
        )
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = 64
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler: Any = Scheduler(
            config, cache, StructuredOutputManager(config), BLOCK, log_stats=False
        )
        self.scheduler._try_schedule_encoder_inputs = (
            lambda request, start, tokens, budget, *_, **__: ([], tokens, budget, [], None)
        )
        self.connector: Any = self.scheduler.connector
        self.rank = RankLayout(
            (4096,), {"device": "cpu", "row_bytes": [4096]}, model={"attention": "", "rotary": ""}
        )
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.rank})
        self.replacements = 0
        self.computed = 0
        """Tokens so far."""
        if token_s:
            policy = self.connector._scheduler._load_policy
            policy.clock = lambda: time.monotonic() + self.computed * token_s

    def request(self, name, tokens, media=None, **more):
        """``media``: for each image its first token and its name. Each is 8 tokens long."""
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        features = [
            MultiModalFeatureSpec(
                None, "image", identifier, PlaceholderRange(offset=offset, length=8)
            )
            for offset, identifier in (media or {}).items()
        ]
        limits = SamplingParams(max_tokens=more.pop("max_tokens", 1), ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, sha256)
        return Request(
            name, tokens, limits, None, mm_features=features, block_hasher=hasher, **more
        )

    def add(self, request):
        self.scheduler.add_request(request)

    def step(self, *, replaced=False, failed=False):
        """One step of the engine: what was scheduled. Workers do every job, or their loads have
        ``failed``, or they have ``replaced`` weights and do no job."""
        self.begin()
        return self.end(replaced=replaced, failed=failed)

    def begin(self):
        """A step is planned."""
        self.output = self.scheduler.schedule()

    def end(self, *, replaced=False, failed=False):
        """What was planned is done, and the scheduler hears of it."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvtier.connectors.vllm.metadata import StepReport

        output, metadata = self.output, self.output.kv_connector_metadata
        self.computed += output.total_num_scheduled_tokens
        ends = [*metadata.ends, *(job.end for job in metadata.loads if job.end is not None)]
        left = {block for end in ends for block in end.blocks[end.kept :]}
        waited_for = [*metadata.loads, *metadata.spans, *metadata.passes]
        saved = [*metadata.saves, *metadata.ended_saves]
        per_slot = self.connector._chunk_tokens // BLOCK
        for move in (move for job in (*metadata.loads, *saved) for move in job.moves):
            blocks = move.first + len(move.blocks)
            assert len(move.slots) == -(-blocks // per_slot), "a worker fails such a job"
        loads, saves = (Counter({job.number: 1 for job in jobs}) for jobs in (waited_for, saved))
        self.replacements += replaced
        told = StepReport(
            step=metadata.number, replacements=Counter({0: self.replacements} if replaced else {})
        )
        for jobs, fails in ((loads, failed or replaced), (saves, replaced)):
            (told.failed if fails else told.done).update(jobs)
        told.done.update(Counter(end.number for end in ends))
        waiting = {job.request_id for job in waited_for if not getattr(job, "goes_on", False)}
        waiting = (waiting - {None}) | {end.request_id for end in ends}
        names = list(output.num_scheduled_tokens)
        sampled = [[7] if self._ends(name) else [] for name in names]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                kv_connector_worker_meta=told,
                finished_recving=waiting,
                failed_recving=waiting if failed or replaced else set(),
                invalid_block_ids=left,
            ),
        )
        self.scheduler.update_from_output(output, answer)
        return output

    def _ends(self, name):
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def run(self, name):
        """Step until this request waits for more, or is over."""
        for _ in range(100):
            request = self.scheduler.requests.get(name)
            if request is None or request.status.name == "WAITING_FOR_STREAMING_REQ":
                return
            self.step()
        raise AssertionError(f"{name} never ends")

    def hit(self, request):
        """Tokens that kvtier would load for it."""
        tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
        self.connector.request_finished(request, [])
        return int(tokens)
