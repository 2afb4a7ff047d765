"""What is compared: vLLM alone, vLLM's own offloading, LMCache and kvtier. Each is a vLLM server
and what its row says.

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

from kvtier.bench.compare.limits import DISK_READ, MEMCPY, REDIS_TCP, REDIS_UNIX
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
"""What vLLM has in place of that module's, for GPUs."""
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
        beside, beside_env, health: a companion's process. It is ready when it listens at
            ``{run}/sock``, or when ``health`` (a URL) answers.
        limit: with what its loads are compared, of :mod:`kvtier.bench.compare.limits`. It is empty
            where nothing is loaded.
        ram: which of :func:`names` are its budget of RAM.
        alone: why a second engine cannot have what the first one cached, where that is by design.
        cannot: why it is not run at all.
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
    health: str | None = None
    keeps_all_on_gpu: bool = False
    limit: str = ""
    ram: tuple[str, ...] = ()
    note: str = ""
    alone: str = ""
    cannot: str = ""

    @property
    def interpreter(self) -> str:
        return sys.executable if self.peer is None else str(_PEERS / self.peer / "bin" / "python")

    @property
    def outlives(self) -> bool:
        """Whether what it caches may outlive the engine's process, on a disk or in another
        process."""
        return bool(self.beside) or self.limit == DISK_READ

    @property
    def shares(self) -> bool:
        """Whether a second engine may have what it caches."""
        return self.outlives and not self.alone

    @property
    def obstacle(self) -> str:
        """Why it cannot run here. Empty when it can."""
        if (
            not self.cannot
            and self.peer is not None
            and not (_PEERS / self.peer / "ready").exists()
        ):
            return f"{self.peer} is not installed: make peers"
        return self.cannot


def _ours(arm: Arm, limit: str = "", alone: str = "") -> Contender:
    connector = TRANSFER if arm.kvtier is not None else None
    sizes = [
        env["KVTIER_RAM_BYTES"]
        for env in (arm.kvtier or {}, arm.beside_env)
        if "KVTIER_RAM_BYTES" in env
    ]
    return Contender(
        arm.name,
        arm.about.partition(";")[0],
        connector=connector,
        env=arm.kvtier or {},
        beside=arm.beside,
        beside_env=arm.beside_env,
        keeps_all_on_gpu=arm.keeps_all_on_gpu,
        limit=limit,
        ram=tuple(f"{size.strip('{}')}_bytes" for size in sizes),
        alone=alone,
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


_ALL_RAM, _FEW_RAM = ("ram_all_bytes",), ("ram_few_bytes",)
_FEW = {"local_cpu": False, "max_local_cpu_size": "{ram_few_gib}"}
_REDIS = (
    "redis-server --port {port} --bind 127.0.0.1 --unixsocket {run}/sock --save --maxmemory "
    "{redis_bytes}"
)
_LMCACHE_SERVER = (
    "{peer_python} -m lmcache.cli.main server --host 127.0.0.1 --port {port} --http-port "
    "{http_port} --prometheus-port {metrics_port} --l1-size-gb {ram_all_gib} --eviction-policy LRU "
    "--supported-transfer-mode auto --shm-name kvt{port}"
)
_LMCACHE_MP = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "kv_connector_extra_config": {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": "{port}",
    },
}
_PLUGIN = "remote_storage_plugin.kvtier."

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
            limit=MEMCPY,
            ram=_ALL_RAM,
        ),
        _offloading(
            "vllm-offloading-disk",
            "TieringOnCPU",
            "kvtier-nvme",
            {
                "cpu_bytes_to_use": "{ram_few_bytes}",
                "secondary_tiers": [{"type": "fs", "root_dir": "{nvme_path}"}],
            },
            "vLLM's OffloadingConnector, RAM over files",
            limit=DISK_READ,
            ram=_FEW_RAM,
        ),
        _lmcache(
            "lmcache-ram",
            "kvtier-ram",
            {"local_cpu": True, "max_local_cpu_size": "{ram_all_gib}"},
            "LMCache in the engine, RAM",
            limit=MEMCPY,
            ram=_ALL_RAM,
        ),
        _lmcache(
            "lmcache-disk",
            "kvtier-nvme",
            _FEW
            | {
                "local_disk": "{nvme_path}/",
                "max_local_disk_size": "{nvme_gib}",
                "extra_config": {"use_odirect": True},
            },
            "LMCache in the engine, disk with direct I/O",
            limit=DISK_READ,
            ram=_FEW_RAM,
        ),
        _lmcache(
            "lmcache-redis",
            "kvtier-redis",
            _FEW | {"remote_url": "redis://127.0.0.1:{port}", "remote_serde": "naive"},
            "LMCache in the engine, Redis by redis-py",
            limit=REDIS_TCP,
            ram=_FEW_RAM,
            beside=tuple(_REDIS.split()),
        ),
        Contender(
            "lmcache-redis-native",
            "LMCache in the engine, Redis by its native client",
            "kvtier-redis",
            peer=LMCACHE,
            cannot=(
                "resp:// in the engine hung in its look-up, five runs of five: a completion is lost"
            ),
        ),
        Contender(
            "lmcache-server-ram",
            "LMCache's own server, RAM, shared memory",
            "kvtier-server",
            _LMCACHE_MP,
            _LMCACHE_ENV,
            peer=LMCACHE,
            beside=tuple(_LMCACHE_SERVER.split()),
            beside_env=_LMCACHE_ENV,
            health="http://127.0.0.1:{http_port}/healthcheck",
            limit=MEMCPY,
            ram=_ALL_RAM,
        ),
        _lmcache(
            "lmcache-on-kvtier",
            "kvtier-server",
            _FEW
            | {
                "remote_storage_plugins": ["kvtier"],
                "extra_config": {
                    _PLUGIN + "module_path": "kvtier.connectors.lmcache.plugin",
                    _PLUGIN + "class_name": "KVTier",
                    _PLUGIN + "server": "unix://{run}/sock",
                },
            },
            "LMCache in the engine, a kvtier server as its remote storage",
            limit=MEMCPY,
            ram=(*_FEW_RAM, *_ALL_RAM),
            beside=ARMS["kvtier-server"].beside,
            beside_env=ARMS["kvtier-server"].beside_env,
        ),
        _ours(ARMS["kvtier-ram"], MEMCPY),
        _ours(
            ARMS["kvtier-nvme"],
            DISK_READ,
            "an engine with kvtier in it owns its folder; they share by kvtier serve",
        ),
        _ours(ARMS["kvtier-server"], MEMCPY),
        _ours(ARMS["kvtier-redis"], REDIS_UNIX),
    )
}


def names(sizes: Sizes, place: Path, run: Path, ports: tuple[int, int, int]) -> dict[str, str]:
    """What templates may name. ``place``: the arm's folder. ``run``: the folder of its companion's
    socket."""
    own = sizes.names(place / "nvme", run)
    byte_counts = {
        name: int(own[name].removesuffix("MiB")) << 20
        for name in ("ram_all", "ram_few", "nvme_bytes")
    }
    return own | {
        "place": str(place),
        "peer_python": str(_PEERS / LMCACHE / "bin" / "python"),
        "port": str(ports[0]),
        "http_port": str(ports[1]),
        "metrics_port": str(ports[2]),
        "ram_all_bytes": str(byte_counts["ram_all"]),
        "ram_few_bytes": str(byte_counts["ram_few"]),
        "ram_all_gib": _gib(byte_counts["ram_all"]),
        "ram_few_gib": _gib(byte_counts["ram_few"]),
        "nvme_gib": _gib(byte_counts["nvme_bytes"]),
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
    """Rounded up to hundredths."""
    return f"{math.ceil(size / 2**30 * 100) / 100:.2f}"
