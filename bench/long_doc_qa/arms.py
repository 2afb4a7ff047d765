"""Long Doc QA's arms. Each is a vLLM server that differs from ``none`` only in what its row of
:data:`ARMS` says.

All arms have vLLM's own prefix caching on. All but ``vllm-prefix-cache`` have the same small GPU
cache: enough blocks for the requests in flight and half a document more, so that a document that is
asked about again has left it. The GPU cache of ``vllm-prefix-cache`` keeps every document. No lower
tier can beat that, so the other arms are compared with it. A prompt is a document and a question
after it, so that the document is the prefix that several prompts share.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.bench.flags import Presets, flag, shape_of
from kvtier.bench.processes.engine import Geometry, cache_args, mib, transfer
from kvtier.bench.requests.client import Ask, Prompt, as_prompt, draw

REPEAT_MODES = ("tile", "interleave")
_PRE_WARM_UP_PROMPTS = 2
_PRE_WARM_UP_SHARE = 4


PRESETS: Presets = {
    # AWS publishes numbers of this shape for its LMI containers. Its runner has the other defaults.
    "lmi": {"num_documents": 46, "document_length": 10000, "max_inflight_requests": 4},
}


_SEED = "for documents and order; another number gives documents never seen before"


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in tokens, or in words of a text. ``words`` is what prompts are drawn from."""

    words: Sequence[int | str]
    num_documents: int = flag(8, "documents")
    document_length: int = flag(20000, "tokens of a document")
    question_length: int = flag(64, "tokens of the question behind it")
    output_len: int = flag(100, "tokens of an answer")
    repeat_count: int = flag(2, "times each document is asked about in the query round")
    repeat_mode: str = flag("tile", "order of repeats: abcabc or aabbcc", choices=REPEAT_MODES)
    max_inflight_requests: int = flag(2, "requests at once")
    shuffle_seed: int = flag(0, _SEED, type=int)

    @classmethod
    def of(cls, args: argparse.Namespace, words: Sequence[int | str]) -> Workload:
        return cls(words, **shape_of(args, cls))

    @property
    def request_length(self) -> int:
        return self.document_length + self.question_length + self.output_len

    def pre_warm_up(self) -> list[Ask]:
        """A few short prompts that nothing else shares. What only the first requests of a server
        cost is paid with them."""
        length = max(1, self.document_length // _PRE_WARM_UP_SHARE)
        asks = []
        for index in range(_PRE_WARM_UP_PROMPTS):
            prompt = as_prompt(self._draw(("pre-warm-up", index), length))
            asks.append(Ask(-1 - index, 0, prompt, min(2, self.output_len)))
        return asks

    def warm_up(self, output_len: int = 1) -> list[Ask]:
        """Every document once, with a question that is not asked again. One token of answer is
        enough where only the fill counts."""
        return [
            Ask(index, -1, self._prompt(index, ("warm-up", index)), output_len)
            for index in range(self.num_documents)
        ]

    def queries(self, first: int = 0) -> list[Ask]:
        """Every document ``repeat_count`` times, each time with another question, from question
        ``first`` on. The questions of a document are asked in order."""
        documents, times = range(self.num_documents), range(first, first + self.repeat_count)
        order = [(document, question) for question in times for document in documents]
        return [
            Ask(*asked, self._prompt(asked[0], ("question", *asked)), self.output_len)
            for asked in (sorted(order) if self.repeat_mode == "interleave" else order)
        ]

    def _prompt(self, document: int, question: object) -> Prompt:
        words = self._draw(("document", document), self.document_length)
        return as_prompt(words + self._draw(question, self.question_length))

    def _draw(self, what: object, length: int) -> list[int | str]:
        return draw(self.words, length, self.shuffle_seed, what)


NONE = "none"
COLD = "cold"
"""The first answers of a server that was not started here. It is not an arm."""
GPU_HIT = "vllm-prefix-cache"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve.

    Args:
        kvtier: the connector's environment, or None for no connector. Values are templates over
            :meth:`Sizes.names`.
        beside, beside_env: the command and the environment of a cache in a process of its own
            (:mod:`kvtier.bench.processes.companion`). They are templates too.
        second_engine: another vLLM server starts after the warm-up and answers the query round.
        gpu_hit_limit: what the TTFT may be, as a multiple of that of ``vllm-prefix-cache``.
    """

    name: str
    about: str
    kvtier: Mapping[str, str] | None = None
    keeps_all_on_gpu: bool = False
    restart_before_query: bool = False
    second_engine: bool = False
    beside: tuple[str, ...] = ()
    beside_env: Mapping[str, str] = field(default_factory=dict)
    gpu_hit_limit: float | None = None

    @property
    def caches(self) -> bool:
        return self.keeps_all_on_gpu or self.kvtier is not None


_RAM_ALL = {"KVTIER_RAM_BYTES": "{ram_all}", "KVTIER_CHUNK_TOKENS": "{chunk_tokens}"}
_RAM_FEW = _RAM_ALL | {"KVTIER_RAM_BYTES": "{ram_few}"}
_REDIS = "redis-server --port 0 --unixsocket {run}/sock --save --maxmemory {redis_bytes}"
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
            kvtier=_RAM_FEW | _NVME,
            gpu_hit_limit=1.5,
        ),
        Arm(
            "kvtier-nvme-restart",
            "as kvtier-ram with NVMe below; the server restarts before the query round",
            kvtier=_RAM_ALL | _NVME,
            restart_before_query=True,
        ),
        Arm(
            "kvtier-server",
            "one cache server; an engine fills it, another engine asks",
            kvtier={"KVTIER_SERVER": "unix://{run}/sock", "KVTIER_CHUNK_TOKENS": "{chunk_tokens}"},
            second_engine=True,
            beside=(sys.executable, "-m", "kvtier", "serve", "--listen", "unix://{run}/sock"),
            beside_env={"KVTIER_RAM_BYTES": "{ram_all}"},
            gpu_hit_limit=1.15,
        ),
        Arm(
            "kvtier-redis",
            "RAM holds the requests in flight only, a redis-server on this host every document",
            kvtier=_RAM_FEW | {"KVTIER_REDIS_URL": "unix://{run}/sock"},
            beside=tuple(_REDIS.split()),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Sizes:
    workload: Workload
    geometry: Geometry

    @property
    def request_blocks(self) -> int:
        return self.geometry.blocks(self.workload.request_length)

    @property
    def max_model_len(self) -> int:
        return self.request_blocks * self.geometry.block_tokens

    def gpu_blocks(self, arm: Arm) -> int:
        """Blocks of the engine's cache, and one more, because vLLM keeps block 0 for itself."""
        work, inflight = self.workload, self.workload.max_inflight_requests
        if arm.keeps_all_on_gpu:
            tail = self.geometry.blocks(work.request_length - work.document_length) + 1
            asked = len(work.queries()) * tail
            return (work.num_documents + inflight + 1) * self.request_blocks + asked + 1
        return inflight * self.request_blocks + self.request_blocks // 2 + 1

    def gpu_gib(self, arm: Arm) -> int:
        return self.geometry.gib(self.gpu_blocks(arm))

    def names(self, nvme_path: Path, run: Path) -> dict[str, str]:
        """Names for an arm's templates. ``run``: the folder of its companion's socket."""
        work, inflight = self.workload, self.workload.max_inflight_requests
        length, requests = work.request_length, work.num_documents + inflight + 2
        everything = self.geometry.bytes_of(length, requests)
        return {
            "ram_all": mib(everything),
            "ram_few": mib(self.geometry.bytes_of(length, inflight + 0.5)),
            "nvme_path": str(nvme_path),
            "nvme_bytes": mib(everything * 1.1),
            "redis_bytes": str(math.ceil(everything * 1.2)),
            "chunk_tokens": str(self.geometry.chunk_tokens),
            "run": str(run),
        }


def installed() -> list[Arm]:
    """The arms whose companion is installed on this machine."""
    return [arm for arm in ARMS.values() if not arm.beside or shutil.which(arm.beside[0])]


def server_args(arm: Arm, sizes: Sizes, *, load_every_hit: bool = False) -> list[str]:
    """vLLM's arguments in which the arms differ."""
    connector = None if arm.kvtier is None else transfer(load_every_hit=load_every_hit)
    return cache_args(sizes.max_model_len, sizes.gpu_blocks(arm), connector)


def filled(templates: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {variable: template.format_map(names) for variable, template in templates.items()}
