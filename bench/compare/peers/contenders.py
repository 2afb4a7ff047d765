"""Arms of the comparison: vLLM alone, vLLM's own offloading, LMCache and kvtier. Each is a vLLM
server and what its row says.

All have one memory budget. An arm named for RAM may hold every document in RAM. An arm named for a
lower place may hold the requests in flight in RAM, and every document below. Peers have the
settings that were found to be best for them on a CPU. Where the copies between vLLM's cache and a
peer's memory are not the peer's own code, ``note`` says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa.arms import ARMS, GPU_HIT, NONE, Arm, Sizes
from kvtier.cli.launch import TRANSFER

LMCACHE = "lmcache-0.5.6"
_PEERS = Path(__file__).resolve().parents[3] / ".venv-peers"
_OUR_COPIES = "its copier for vLLM-CPU is ours, as it has none: its RAM speed is not its own"
_LMCACHE = {
    "kv_connector": "LMCacheOnCPU",
    "kv_connector_module_path": "kvtier.bench.compare.peers.lmcache_cpu",
}
_OFFLOADING = "kvtier.bench.compare.peers.offloading_cpu"
_IN_TREE = {"OffloadOnCPU": "CPUOffloadingSpec", "TieringOnCPU": "TieringOffloadingSpec"}
"""vLLM's own specs for GPUs, by those of that module."""
_LMCACHE_ENV = {
    "PYTHONHASHSEED": "0",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """One arm. Strings in ``connector``, ``env``, ``yaml`` and ``beside`` are templates over
    :func:`names`.

    Attributes:
        connector: vLLM's ``--kv-transfer-config`` without what all have; None: no connector.
        like: the kvtier arm with whose load cost this arm's is compared.
        yaml: LMCache's file.
        peer: the name of the environment in which it runs; None: kvtier's.
        beside, beside_env: a companion's process, which listens at ``{run}/sock``.
        outlives: what it caches outlives the engine's process, on a disk or in another process.
        shares: a second engine may have what it caches.
    """

    name: str
    about: str
    like: str | None = None
    connector: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    yaml: Mapping[str, Any] | None = None
    peer: str | None = None
    beside: tuple[str, ...] = ()
    beside_env: Mapping[str, str] = field(default_factory=dict)
    keeps_all_on_gpu: bool = False
    outlives: bool = False
    shares: bool = False
    note: str = ""

    @property
    def interpreter(self) -> str:
        return sys.executable if self.peer is None else str(_PEERS / self.peer / "bin" / "python")

    @property
    def obstacle(self) -> str:
        """Why it cannot run here. Empty when it can."""
        if self.peer is None or (_PEERS / self.peer / "ready").exists():
            return ""
        return f"{self.peer} is not installed: make peers"


def _ours(arm: Arm, **more: Any) -> Contender:
    return Contender(
        arm.name,
        arm.about.partition(";")[0],
        connector=None if arm.kvtier is None else TRANSFER,
        env=arm.kvtier or {},
        beside=arm.beside,
        beside_env=arm.beside_env,
        keeps_all_on_gpu=arm.keeps_all_on_gpu,
        **more,
    )


def _offloading(
    name: str, spec: str, like: str, extra: Mapping[str, Any], about: str, **more: Any
) -> Contender:
    extra = {"spec_name": spec, "spec_module_path": _OFFLOADING} | dict(extra)
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return Contender(name, about, like, connector, note=_OUR_COPIES, **more)


def _lmcache(name: str, like: str, yaml: Mapping[str, Any], about: str, **more: Any) -> Contender:
    own = {"chunk_size": "{chunk_tokens}", "save_decode_cache": False, **yaml}
    env = _LMCACHE_ENV | {"LMCACHE_CONFIG_FILE": "{place}/lmcache.yaml"}
    return Contender(name, about, like, _LMCACHE, env, own, LMCACHE, note=_OUR_COPIES, **more)


_FEW = {"local_cpu": False, "max_local_cpu_size": "{ram_few_gib}"}
_REDIS = (
    "redis-server --port {port} --bind 127.0.0.1 --unixsocket {run}/sock --save --maxmemory "
    "{redis_bytes}"
)
_DISK_TIER = {"type": "fs", "root_dir": "{nvme_path}"}
_LMCACHE_DISK = {
    "local_disk": "{nvme_path}/",
    "max_local_disk_size": "{nvme_gib}",
    "extra_config": {"use_odirect": True},
}

CONTENDERS: dict[str, Contender] = {
    one.name: one
    for one in (
        _ours(ARMS[NONE]),
        _ours(ARMS[GPU_HIT]),
        _offloading(
            "vllm-offloading-ram",
            "OffloadOnCPU",
            "kvtier-ram",
            {"cpu_bytes_to_use": "{ram_all_bytes}"},
            "vLLM's OffloadingConnector, RAM",
        ),
        _offloading(
            "vllm-offloading-disk",
            "TieringOnCPU",
            "kvtier-nvme",
            {"cpu_bytes_to_use": "{ram_few_bytes}", "secondary_tiers": [_DISK_TIER]},
            "vLLM's OffloadingConnector, RAM over files",
            outlives=True,
            shares=True,
        ),
        _lmcache(
            "lmcache-ram",
            "kvtier-ram",
            {"local_cpu": True, "max_local_cpu_size": "{ram_all_gib}"},
            "LMCache in the engine, RAM",
        ),
        _lmcache(
            "lmcache-disk",
            "kvtier-nvme",
            _FEW | _LMCACHE_DISK,
            "LMCache in the engine, disk with direct I/O",
            outlives=True,
            shares=True,
        ),
        _lmcache(
            "lmcache-redis",
            "kvtier-redis",
            _FEW | {"remote_url": "redis://127.0.0.1:{port}", "remote_serde": "naive"},
            "LMCache in the engine, Redis by redis-py",
            outlives=True,
            shares=True,
            beside=tuple(_REDIS.split()),
        ),
        _ours(ARMS["kvtier-ram"]),
        _ours(ARMS["kvtier-nvme"], outlives=True),  # its folder has one owner
        _ours(ARMS["kvtier-server"], outlives=True, shares=True),
        _ours(ARMS["kvtier-redis"], outlives=True, shares=True),
    )
}


def names(sizes: Sizes, place: Path, run: Path, port: int) -> dict[str, str]:
    """Names for templates. ``place``: the arm's folder. ``run``: the folder of its companion's
    socket."""
    own = sizes.names(place / "nvme", run)
    ram_all, ram_few, nvme = (
        int(own[name].removesuffix("MiB")) << 20 for name in ("ram_all", "ram_few", "nvme_bytes")
    )
    return own | {
        "place": str(place),
        "port": str(port),
        "ram_all_bytes": str(ram_all),
        "ram_few_bytes": str(ram_few),
        "ram_all_gib": _gib(ram_all),
        "ram_few_gib": _gib(ram_few),
        "nvme_gib": _gib(nvme),
    }


def in_tree(connector: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's own offloading with its own copies, which it has for GPUs."""
    extra = dict(connector["kv_connector_extra_config"])
    del extra["spec_module_path"]
    extra["spec_name"] = _IN_TREE[extra["spec_name"]]
    return dict(connector) | {"kv_connector_extra_config": extra}


def rendered(template: Any, values: Mapping[str, str]) -> Any:
    """``template`` with every string in it filled in. A string that is only a number becomes that
    number."""
    if isinstance(template, Mapping):
        return {key: rendered(value, values) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [rendered(value, values) for value in template]
    if not isinstance(template, str):
        return template
    text = template.format_map(values)
    if "{" in template and text.isdigit():
        return int(text)
    return float(text) if "{" in template and text.replace(".", "", 1).isdigit() else text


def _gib(size: int) -> str:
    return f"{math.ceil(size / 2**30 * 100) / 100:.2f}"
