"""The arms: who keeps what was computed, and in which order a prompt has its documents.

All arms but ``none`` have vLLM's own prefix cache on. Where vLLM is alone its cache holds every
prompt of the run, which no tier below can beat. Where kvtier is, vLLM's cache holds the requests in
flight and half a prompt more, so that nearly all reuse is kvtier's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.bench.processes.engine import Geometry, cache_args, mib, transfer
from kvtier.bench.spans.work import Retrieval
from kvtier.spans import Order

FULL = "none"
"""The arm that computes every prompt from its start: what answers are compared with."""


@dataclass(frozen=True, slots=True)
class Arm:
    """``cannot_run``: why there are no numbers of it. Empty when it runs."""

    name: str
    about: str
    order: Order = "given"
    kvtier: bool = False
    first: int | None = None
    """Documents are taken from their homes, which are warmed before, and so many tokens of each are
    computed in place. None: they are not."""
    cannot_run: str = ""


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(FULL, "vLLM without any cache of prefixes: full prefill"),
        Arm("vllm-prefix-cache", "vLLM's own cache, which holds every prompt"),
        Arm(
            "vllm-prefix-cache+stable",
            "the same, with the documents in the stable order",
            order="stable",
        ),
        Arm("kvtier", "kvtier's RAM holds every prompt; exact", kvtier=True),
        Arm(
            "kvtier+stable",
            "the same, with the documents in the stable order; exact",
            order="stable",
            kvtier=True,
        ),
        Arm(
            "spans-k0",
            "kvtier takes each document from its warm home; an approximation",
            kvtier=True,
            first=0,
        ),
        *(
            Arm(
                f"spans-k{first}",
                f"the same, with the first {first} tokens of each moved document computed in place",
                kvtier=True,
                first=first,
            )
            for first in (2, 16, 64)
        ),
        Arm(
            "lmcache-blend",
            "LMCache 0.5.6 blends documents wherever they stand",
            cannot_run=(
                "in the engine it needs an edited vLLM, because nothing registers the model with "
                "it (LMCache issues 4131 and 2306, open), and it refuses CPUs (2594); nothing in "
                "its package asks its blending server from vLLM (5101, open)"
            ),
        ),
    )
}
RUN = [arm for arm in ARMS.values() if not arm.cannot_run]
DEFAULT = [arm for arm in RUN if arm.first != 2]
"""Arms that run by default. So few tokens bring back nothing of random documents."""
ONE_SERVER = [ARMS[FULL], ARMS["kvtier"], *(arm for arm in RUN if arm.first is not None)]
"""Arms that one server has by itself."""


@dataclass(frozen=True, slots=True)
class Sizes:
    work: Retrieval
    geometry: Geometry

    @property
    def request_blocks(self) -> int:
        return self.geometry.blocks(self.work.longest)

    @property
    def max_model_len(self) -> int:
        return self.request_blocks * self.geometry.block_tokens

    @property
    def prompts(self) -> int:
        return self.work.rounds * self.work.requests + 2

    def gpu_blocks(self, arm: Arm) -> int:
        """Blocks of the engine's cache. One more, because vLLM keeps block 0 for itself."""
        inflight = self.work.max_inflight_requests
        if arm.kvtier or arm.name == FULL:
            return inflight * self.request_blocks + self.request_blocks // 2 + 1
        return (self.prompts + inflight) * self.request_blocks + 1

    def gpu_gib(self, arm: Arm) -> int:
        return self.geometry.gib(self.gpu_blocks(arm))

    def ram(self, arm: Arm) -> str:
        """kvtier's: every prompt, as if none shared anything, and every home."""
        prompts = self.prompts + 2 * self.work.max_inflight_requests
        size = self.geometry.bytes_of(self.work.longest, prompts)
        if arm.first is not None:
            homes = self.work.rounds * self.work.pool
            size += self.geometry.bytes_of(self.work.longest_home, homes)
        return mib(size)


def server_args(arm: Arm, sizes: Sizes, *, load_every_hit: bool = False) -> list[str]:
    """vLLM's arguments in which the arms differ."""
    connector = transfer(load_every_hit=load_every_hit) if arm.kvtier else None
    args = cache_args(sizes.max_model_len, sizes.gpu_blocks(arm), connector)
    return [*args, "--no-enable-prefix-caching"] if arm.name == FULL else args


def server_env(arm: Arm, sizes: Sizes) -> dict[str, str]:
    """kvtier's variables. None where it is not."""
    if not arm.kvtier:
        return {}
    spans = {} if arm.first is None else {"KVTIER_SPANS": "on"}
    ram, chunk = sizes.ram(arm), str(sizes.geometry.chunk_tokens)
    return {"KVTIER_RAM_BYTES": ram, "KVTIER_CHUNK_TOKENS": chunk} | spans
