"""Long Doc QA's arms: each is a vLLM server differing from ``none`` only in what its row of :data:`ARMS` says.

All arms have vLLM's own prefix caching on. All but ``vllm-prefix-cache`` have the same small GPU cache: enough blocks
for the requests in flight and half a document more, so that a document asked again has left it. That one keeps every
document in it, which no tier below can beat: it is the bound the other arms are held against.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.bench.long_doc_qa_work import Workload

NONE = "none"
GPU_HIT = "vllm-prefix-cache"
_CONNECTOR = json.dumps(
    {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    },
    separators=(",", ":"),
)
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve. ``kvtier``: environment of the connector, values as templates over :meth:`Sizes.names`; None:
    no connector. ``gpu_hit_limit``: what its TTFT may be, as a multiple of ``vllm-prefix-cache``'s."""

    name: str
    about: str
    kvtier: Mapping[str, str] | None = None
    keeps_all_on_gpu: bool = False
    restart_before_query: bool = False
    gpu_hit_limit: float | None = None


_RAM_ALL = {"KVTIER_RAM_BYTES": "{ram_all}", "KVTIER_CHUNK_TOKENS": "{chunk_tokens}"}
_NVME = {"KVTIER_NVME_PATH": "{nvme_path}", "KVTIER_NVME_BYTES": "{nvme_bytes}"}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(NONE, "vLLM alone; the documents do not fit its GPU cache"),
        Arm(GPU_HIT, "vLLM alone; its GPU cache holds every document", keeps_all_on_gpu=True),
        Arm("kvtier-ram", "RAM holds every document", kvtier=_RAM_ALL, gpu_hit_limit=1.15),
        Arm(
            "kvtier-nvme",
            "RAM holds the requests in flight only, NVMe every document",
            kvtier=_RAM_ALL | _NVME | {"KVTIER_RAM_BYTES": "{ram_few}"},
            gpu_hit_limit=1.5,
        ),
        Arm(
            "kvtier-nvme-restart",
            "as kvtier-ram with NVMe below; the server restarts before the query round",
            kvtier=_RAM_ALL | _NVME,
            restart_before_query=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the arms' caches must hold. Tokens and bytes; ``token_bytes`` is the KV of one token in all layers."""

    workload: Workload
    inflight: int
    block_tokens: int
    chunk_tokens: int
    token_bytes: int

    @property
    def documents(self) -> int:
        return self.workload.num_documents + sum(ask.is_miss for ask in self.workload.queries())

    @property
    def request_blocks(self) -> int:
        return math.ceil(self.workload.request_length / self.block_tokens)

    @property
    def max_model_len(self) -> int:
        return self.request_blocks * self.block_tokens

    def gpu_blocks(self, arm: Arm) -> int:
        """Blocks of the engine's cache; one more than asked for, because vLLM keeps block 0 for itself."""
        if arm.keeps_all_on_gpu:
            tail = math.ceil((self.workload.request_length - self.workload.document_length) / self.block_tokens) + 1
            asked = len(self.workload.queries()) * tail
            return (self.documents + self.inflight + 1) * self.request_blocks + asked + 1
        return self.inflight * self.request_blocks + self.request_blocks // 2 + 1

    def gpu_gib(self, arm: Arm) -> int:
        return math.ceil(self.gpu_blocks(arm) * self.block_tokens * self.token_bytes / 2**30)

    def names(self, nvme_path: Path) -> dict[str, str]:
        """What an arm's templates may name."""
        request = math.ceil(self.workload.request_length / self.chunk_tokens) * self.chunk_tokens * self.token_bytes
        everything = (self.documents + self.inflight + 2) * request
        return {
            "ram_all": _mib(everything),
            "ram_few": _mib((self.inflight + 0.5) * request),
            "nvme_path": str(nvme_path),
            "nvme_bytes": _mib(everything * 1.1),
            "chunk_tokens": str(self.chunk_tokens),
        }


def server_args(arm: Arm, sizes: Sizes) -> list[str]:
    """vLLM's arguments that make this arm; what all arms share is :mod:`kvtier.bench.long_doc_qa`'s."""
    args = ["--max-model-len", str(sizes.max_model_len), "--num-gpu-blocks-override", str(sizes.gpu_blocks(arm))]
    return args if arm.kvtier is None else [*args, "--kv-transfer-config", _CONNECTOR]


def server_env(arm: Arm, sizes: Sizes, nvme_path: Path) -> dict[str, str]:
    """Environment variables that make this arm."""
    names = sizes.names(nvme_path)
    return {name: template.format_map(names) for name, template in (arm.kvtier or {}).items()}


def _mib(size: float) -> str:
    return f"{math.ceil(size / _MIB)}MiB"
