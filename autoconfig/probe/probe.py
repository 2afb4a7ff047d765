"""The only file that looks at the machine. Every look can fail. A failure is an unknown
:class:`Fact` with the reason, and never an error.

``/proc`` and ``/sys`` are read under ``root``, so that tests can show a made-up machine. Paths
themselves (``statvfs``, the O_DIRECT trial) are always real.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import resource
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvtier.autoconfig.breakeven import gpu_kind
from kvtier.autoconfig.facts import (
    UNLIMITED,
    Disk,
    Fact,
    Gpus,
    Memory,
    Model,
    Redis,
    Serving,
    known,
    unknown,
)
from kvtier.autoconfig.model import describe
from kvtier.autoconfig.probe import hub
from kvtier.autoconfig.probe.cgroup import memory_limits
from kvtier.autoconfig.probe.proc import Mount, mounts, text_of
from kvtier.config.load import environment
from kvtier.core.errors import ConfigError
from kvtier.core.pool import Pool
from kvtier.core.region import HUGE_BYTES
from kvtier.tiers.nvme.folder import may_take

T = TypeVar("T")

ROOT = Path("/")
CANDIDATES = (
    "/var/lib/kvtier",
    "/opt/dlami/nvme",
    "/mnt/disks/ssd0",
    "/mnt/nvme",
    "/mnt/nvme0",
    "/local_disk0",
    "/scratch",
    "/mnt",
    "/data",
)
"""Where images and clouds mount local disks. A folder counts only if it is a real mount. The
temporary folders always count."""
_ALWAYS = ("/var/tmp", "/tmp")
_PAGE = 4096


def _try(look: Callable[[], T], what: str) -> Fact[T]:
    try:
        return known(look(), what)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return unknown(f"{what}: {error}")


# -- memory ----------------------------------------------------------------------------------------


def probe_memory(root: Path = ROOT) -> Memory:
    shm = root / "dev/shm"
    headroom, limit = memory_limits(root)
    return Memory(
        total=_try(lambda: _meminfo(root)["MemTotal"], "MemTotal in /proc/meminfo"),
        available=_try(lambda: _meminfo(root)["MemAvailable"], "MemAvailable in /proc/meminfo"),
        cgroup_headroom=headroom,
        cgroup_limit=limit,
        shm=_try(lambda: os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize, "size of /dev/shm"),
        reserved=_try(
            lambda: _reserved(root), "free pages in /sys/kernel/mm/hugepages/hugepages-2048kB"
        ),
        makes_huge=_try(_makes_huge, "one tried (MADV_COLLAPSE)"),
        memlock=_try(_memlock, "RLIMIT_MEMLOCK"),
        numa_nodes=_try(lambda: _numa_nodes(root), "/sys/devices/system/node"),
        cpus=_try(lambda: len(os.sched_getaffinity(0)), "CPUs of this process"),
        pools=_try(lambda: _pool_bytes(root), "kvtier pools in /proc"),
    )


def _meminfo(root: Path) -> dict[str, int]:
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in pairs}


def _memlock() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _reserved(root: Path) -> int:
    pages = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free, promised = (
        int((pages / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
    )
    return max(0, free - promised) * HUGE_BYTES


def _makes_huge() -> bool:
    with closing(Pool(1, HUGE_BYTES)) as pool:
        pool.populate(0, 1)
        return pool.huge_bytes > 0


def _numa_nodes(root: Path) -> int:
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    with_memory = [
        node for node in nodes if not re.search(r"MemTotal:\s+0 kB", text_of(node / "meminfo"))
    ]
    if not with_memory:
        raise ValueError("no node has memory")
    return len(with_memory)


def _pool_bytes(root: Path) -> int:
    """Pages of every pool that any process this user may inspect has open, each pool once."""
    found = {}
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.readlink(link).startswith("/memfd:kvtier-pool"):
                status = link.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


# -- GPUs ------------------------------------------------------------------------------------------


def probe_gpus(root: Path = ROOT) -> Gpus:
    """What NVIDIA's tool says, or else what the driver shows in /proc. AMD is recognised but not
    measured."""
    names, sizes = _nvidia_smi() if root == ROOT else ([], [])
    source = "nvidia-smi"
    if not names:
        source = "/proc/driver/nvidia"
        models = [
            text_of(path)
            for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        ]
        names = [match[1].strip() for text in models if (match := re.search(r"Model:(.*)", text))]
    if names:
        kind = gpu_kind(names[0])
        size = known(min(sizes), source) if sizes else unknown("nvidia-smi gave no sizes")
        if size.value is None and kind:
            size = known(kind.memory, f"usual for {names[0]}")
        free = "NVIDIA's driver pins pages itself, not charged to RLIMIT_MEMLOCK (its os-mlock.c)"
        return Gpus(known(len(names), source), known(names[0], source), size, known(False, free))
    if (root / "dev/kfd").exists():
        text = "an AMD GPU (/dev/kfd), not looked at"
        return Gpus(unknown(text), unknown(text), unknown(text), unknown(text))
    none = "no nvidia-smi, /proc/driver/nvidia or /dev/kfd"
    return Gpus(known(0, none), unknown(none), unknown(none), unknown(none))


def _nvidia_smi() -> tuple[list[str], list[int]]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        out = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        rows = [line.rsplit(",", 1) for line in out.splitlines() if "," in line]
        return [row[0].strip() for row in rows], [int(float(row[1])) << 20 for row in rows]
    return [], []


# -- disks -----------------------------------------------------------------------------------------


def _mount_of(path: str, root: Path) -> Mount | None:
    holding = [
        m for m in mounts(root) if path == m.point or path.startswith(m.point.rstrip("/") + "/")
    ]
    return (
        max(enumerate(holding), key=lambda pair: (len(pair[1].point), pair[0]))[1]
        if holding
        else None
    )


def probe_disk(path: str, root: Path = ROOT) -> Disk:
    """Look at the directory ``path``, or where it does not exist yet, at the nearest folder above
    it."""
    place = Path(path).resolve()
    while not place.is_dir():
        place = place.parent
    stat = _try(lambda: os.statvfs(place), f"statvfs {place}")
    mount = _mount_of(str(place), root)
    source = (
        f"mountinfo: {mount.source} on {mount.point}"
        if mount
        else "no line of mountinfo has this path"
    )
    writable, direct = _try_direct(place)
    return Disk(
        path=str(Path(path).absolute()),
        free=_of(stat, lambda s: s.f_bavail * s.f_frsize),
        total=_of(stat, lambda s: s.f_blocks * s.f_frsize),
        own=_try(lambda: _own_bytes(Path(path)), "files of an earlier run"),
        filesystem=known(mount.kind, source) if mount else unknown(source),
        writable=writable,
        o_direct=direct,
        device=_device(mount, root) if mount else unknown(source),
        read_speed=unknown("not measured"),
        write_speed=unknown("not measured"),
    )


def _of(stat: Fact[os.statvfs_result], size: Callable[[os.statvfs_result], int]) -> Fact[int]:
    return known(size(stat.value), stat.source) if stat.value else unknown(stat.source)


def _own_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*.kvtier") if file.is_file())


def _try_direct(place: Path) -> tuple[Fact[bool], Fact[bool]]:
    """(writable, O_DIRECT works), by writing one page into a file that has no name."""
    if not os.access(place, os.W_OK | os.X_OK):
        refused = f"no right to write in {place}"
        return known(False, refused), unknown(refused)
    try:
        with open_direct(place) as fd, mmap.mmap(-1, _PAGE) as page:
            os.pwrite(fd, page, 0)
        return known(True, "a page was written"), known(True, "a page was written")
    except OSError as error:
        read_only = isinstance(error, PermissionError) or "Read-only" in str(error)
        return known(not read_only, str(error)), known(False, str(error))


@contextlib.contextmanager
def open_direct(place: Path) -> Any:
    """A file descriptor with O_DIRECT, of a file that vanishes with it. Raises OSError."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        fd = os.open(place, flags | os.O_TMPFILE, 0o600)
    except (
        IsADirectoryError,
        FileNotFoundError,
        NotImplementedError,
        OSError,
    ):  # the file system has no O_TMPFILE
        name = place / f"kvtier-probe-{os.getpid()}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        name.unlink()
    try:
        yield fd
    finally:
        os.close(fd)


def _device(mount: Mount, root: Path) -> Fact[str]:
    if mount.kind == "overlay":
        return unknown("overlay: the disk under it is not visible from in here")
    link = root / "sys/dev/block" / mount.device
    # btrfs and others show a made-up device number
    if not link.exists() and mount.source.startswith("/dev/"):
        link = root / "sys/class/block" / Path(mount.source).name
    if not link.exists():
        return unknown(f"{mount.kind} {mount.source} is not a block device here")
    kinds = sorted(_device_kinds(link.resolve()), key=_SLOWEST.index)
    source = f"/sys/dev/block/{mount.device}"
    return (
        known(kinds[0], source)
        if kinds
        else unknown(f"{source}: it is not NVMe, and does not say whether it is rotational")
    )


_SLOWEST = ["rotational", "ebs", "virtual", "ssd", "nvme"]


def _device_kinds(device: Path) -> set[str]:
    """The kinds of all disks under a partition, RAID or device-mapper volume."""
    if (device / "partition").exists():
        device = device.parent
    slaves = list((device / "slaves").glob("*"))
    if slaves:
        return set().union(*(_device_kinds(slave.resolve()) for slave in slaves))
    model, name = text_of(device / "device/model"), device.name
    if "Elastic Block Store" in model:
        return {"ebs"}
    if name.startswith(("vd", "xvd", "loop")) or model in (
        "PersistentDisk",
        "nvme_card-pd",
        "Virtual Disk",
    ):
        # a hypervisor's disk: what it says of itself, "rotational" included, means nothing
        return {"virtual"}
    if name.startswith("nvme"):
        return {"nvme"}
    rotational = text_of(device / "queue/rotational")
    return {"rotational" if rotational == "1" else "ssd"} if rotational else set()


def probe_disks(paths: Sequence[str] = (), root: Path = ROOT) -> tuple[Disk, ...]:
    """The given paths. Without any: a folder for kvtier in each of :data:`CANDIDATES` and the
    temporary folders, at most one for each device."""
    if paths:
        return tuple(probe_disk(path, root) for path in paths)
    seen: set[int] = set()
    found = []
    for path in (*filter(os.path.ismount, CANDIDATES), *filter(os.path.isdir, _ALWAYS)):
        if (
            os.access(path, os.W_OK)
            and os.stat(path).st_dev not in seen
            and may_take(Path(path, "kvtier"))
        ):
            seen.add(os.stat(path).st_dev)
            found.append(probe_disk(f"{path}/kvtier", root))
    return tuple(found)


# -- Redis, model, engine --------------------------------------------------------------------------


def probe_redis(url: str) -> Redis:
    """One INFO of every node, with at most a second to connect and one to answer. Memory is that of
    all primaries together. Raises ConfigError for text that is not a Redis URL, without showing
    it."""
    from kvtier.config.redis_url import parse
    from kvtier.tiers.redis.errors import FAULTS
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.startup import hopeless, limit_of, node_facts, wrong_kind

    servers = RedisServers(url, connections=1)
    local = parse(url).local
    try:
        facts = node_facts(servers)
    except FAULTS as error:
        return Redis(url, reachable=known(False, hopeless(error) or str(error)), local=local)
    finally:
        servers.close()
    if (wrong := wrong_kind(servers, facts)) is not None:
        return Redis(url, reachable=known(False, wrong), local=local)
    source = f"INFO of {servers.label}" + (f", {len(facts)} nodes" if len(facts) > 1 else "")
    used = [fact.used for fact in facts if fact.used is not None]
    limit = limit_of(facts)
    policies = {fact.policy for fact in facts if fact.policy is not None}
    untold = f"{source} does not tell it"
    return Redis(
        url,
        reachable=known(True, source),
        maxmemory=unknown(untold) if limit is None else known(limit, source),
        used=known(sum(used), source) if len(used) == len(facts) else unknown(untold),
        policy=known(" and ".join(sorted(policies)), source) if policies else unknown(untold),
        local=local,
    )


def probe_model(place: str, kv_dtype: str = "auto") -> Model:
    """A model folder, its ``config.json``, or a name that is in this host's hub cache. Raises
    ConfigError when it is none of them, or lacks what is needed."""
    path, source = Path(place), "given"
    if not path.exists():
        path = hub.model_folder(place, environment())
        source = f"hub cache, commit {path.name[:12]}"
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {place}: {error}; expected a local model folder or config.json"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file} contains a {type(config).__name__}, expected a model's config.json"
        )
    weights = probe_weights(path) if path.is_dir() else unknown("only a config.json was given")
    return replace(describe(config, place, kv_dtype, weights), name=known(place, source))


def probe_weights(folder: Path) -> Fact[int]:
    """Bytes of the weights: from the safetensors index, or else the files, or else the .bin
    files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return known(int(index["metadata"]["total_size"]), "model.safetensors.index.json")
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [file.stat().st_size for file in folder.glob(pattern)]:
            return known(sum(sizes), f"{len(sizes)} {pattern} files")
    return unknown(f"no .safetensors or .bin file in {folder}")


def probe_engine(vllm_config: Any, engines: int = 1) -> tuple[Serving, Model]:
    """The engine's own configuration object -> facts. It reads attributes and imports nothing of
    vLLM."""
    parallel, cache, model = (
        vllm_config.parallel_config,
        vllm_config.cache_config,
        vllm_config.model_config,
    )
    source = "the engine's configuration"

    def read(holder: Any, name: str) -> Fact[Any]:
        value = getattr(holder, name, None)
        return unknown(f"{source} has no {name}") if value is None else known(value, source)

    blocks = getattr(cache, "num_gpu_blocks", None)
    engine = Serving(
        tensor_parallel=read(parallel, "tensor_parallel_size"),
        pipeline_parallel=read(parallel, "pipeline_parallel_size"),
        data_parallel=read(parallel, "data_parallel_size_local"),
        expert_parallel=read(parallel, "enable_expert_parallel"),
        engines=known(engines, "given"),
        block_tokens=read(cache, "block_size"),
        max_model_len=read(model, "max_model_len"),
        kv_cache_tokens=known(blocks * cache.block_size, source)
        if blocks
        else unknown("the engine has no blocks yet"),
        started=known(bool(blocks), source),
    )
    name, kv_dtype = str(model.model), str(getattr(cache, "cache_dtype", "auto"))
    config = {**model.hf_config.to_dict(), "dtype": str(model.dtype)}
    folder = (
        Path(name)
        if Path(name).is_dir()
        else hub.snapshot(name, environment(), getattr(model, "revision", None))
    )
    weights = probe_weights(folder) if folder else unknown("the weights are not in a local folder")
    return engine, describe(config, name, kv_dtype, weights)
