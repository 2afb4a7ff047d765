"""An arm's vLLM server: its arguments, and the geometry of its KV cache."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.flags import DTYPE_BYTES
from kvtier.bench.model import kv_token_bytes, read_config
from kvtier.bench.processes.servers import VllmServer
from kvtier.bench.report import machine_facts
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT
from kvtier.core.errors import ConfigError

_TOLD = re.compile(r"kvtier \S+, vLLM .+?, ((?:Model Runner V\d, )?\w+ scheduling)$", re.MULTILINE)


def require_model(args: argparse.Namespace, target: str) -> None:
    """Raises ConfigError when there is neither a model nor a running ``target``."""
    if not (args.base_url or args.model):
        what = "a directory or a name that vLLM can serve"
        raise ConfigError(f"--model is missing: {what} (or --base-url of a {target})")


@dataclass(frozen=True, slots=True)
class Geometry:
    """vLLM's block and kvtier's chunk, in tokens, and the bytes of a token's KV in all layers."""

    block_tokens: int
    chunk_tokens: int
    token_bytes: int

    def blocks(self, tokens: float) -> int:
        return math.ceil(tokens / self.block_tokens)

    def gib(self, blocks: int) -> int:
        """Of vLLM's own cache, rounded up."""
        return math.ceil(blocks * self.block_tokens * self.token_bytes / 2**30)

    def bytes_of(self, tokens: int, prompts: float) -> float:
        """Of so many prompts of this length, in whole chunks."""
        chunks = math.ceil(tokens / self.chunk_tokens)
        return prompts * chunks * self.chunk_tokens * self.token_bytes


def mib(size: float) -> str:
    """Bytes as a setting of kvtier, rounded up."""
    return f"{math.ceil(size / 2**20)}MiB"


def geometry(args: argparse.Namespace) -> Geometry:
    config = read_config(args.model)
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = own if args.dtype == "auto" else args.dtype
    block_tokens = args.block_size or (128 if on_cpu() else 16)
    token_bytes = kv_token_bytes(config, DTYPE_BYTES.get(dtype, 2))
    return Geometry(block_tokens, args.chunk_tokens, token_bytes)


def engine(
    args: argparse.Namespace,
    block_tokens: int,
    cache: Sequence[str],
    env: Mapping[str, str],
    log: Path,
) -> VllmServer:
    """An arm's server, not started. ``args``: the flags of
    :func:`kvtier.bench.flags.add_engine_flags`. ``cache``: the arguments of its cache."""
    command = shared_args(served_name(args.model), args.dtype, block_tokens)
    eager = ["--enforce-eager"] if on_cpu() else []
    command += [*cache, *eager, *shlex.split(args.server_args)]
    return VllmServer(args.model, command, env, log, args.server_timeout)


def cpu_env(cache_gib: int) -> dict[str, str]:
    """The room of vLLM's own cache on the CPU backend, which is told in the environment. With a
    connector vLLM reserves other CPU cores than without one, and all arms must compute on the same
    cores."""
    if not on_cpu():
        return {}
    return {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib), "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}


def shared_args(name: str, dtype: str, block_tokens: int) -> list[str]:
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    named = ["--served-model-name", name, "--dtype", dtype]
    return [*named, "--block-size", str(block_tokens), *flags]


def cache_args(
    max_model_len: int, gpu_blocks: int, transfer: Mapping[str, Any] | None = None
) -> list[str]:
    """How long a prompt may be, and what vLLM's own cache holds. ``transfer``: the connector."""
    args = ["--max-model-len", str(max_model_len), "--num-gpu-blocks-override", str(gpu_blocks)]
    return args if transfer is None else [*args, *connector_args(transfer)]


def connector_args(transfer: Mapping[str, Any]) -> list[str]:
    return ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]


def transfer(*, load_every_hit: bool = False) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for kvtier. ``load_every_hit``: also where computing would be
    sooner."""
    every = {"kv_connector_extra_config": {LOAD_EVERY_HIT: True}} if load_every_hit else {}
    return TRANSFER | every


def on_cpu() -> bool:
    return "gpu" not in machine_facts()


def served_name(model: str) -> str:
    return Path(model).name


def engine_facts() -> list[str]:
    """For a picture: vLLM's version, and the GPU or the CPU."""
    facts = machine_facts()
    device = facts.get("gpu", f"{facts['cpu']}, {facts['cores']} cores")
    return [f"vLLM {facts.get('vllm', 'elsewhere')}", str(device)]


def mode_told(log: Path) -> str | None:
    """How an engine runs, by kvtier's first line in its log: ``Model Runner V2, async scheduling``.
    None where kvtier is not in it: vLLM itself does not say it."""
    found = _TOLD.search(log.read_text(errors="replace")) if log.exists() else None
    return None if found is None else found[1]


def modes_told(modes: Iterable[str | None]) -> str | None:
    """Modes of all engines, each once. None where no engine told."""
    return "; ".join(sorted({mode for mode in modes if mode})) or None
