"""The checks of ``kvtier doctor``. Each gives findings, and each finding says what was seen and
what to do about it.

Nothing here makes a lasting change, and every check has a deadline of its own.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import kvtier
from kvtier import selftest
from kvtier.assemble import access, object_bytes, ram_bytes, secret_key, try_mooncake, try_objects
from kvtier.autoconfig.explain import PLANNED
from kvtier.autoconfig.facts import UNLIMITED, Disk, Facts, Model, Redis, Serving, known
from kvtier.autoconfig.memory import in_reserved_pages, ram_room
from kvtier.autoconfig.plan import NETWORK_FILESYSTEMS, RAM_FILESYSTEMS, make_plan
from kvtier.autoconfig.probe import probe
from kvtier.autoconfig.probe.bucket import probe_objects
from kvtier.cli.checks.installed import look, verdict
from kvtier.cli.vllm_command import recomputing, refuse_own_offloading, transfer, understood
from kvtier.client.client import Client
from kvtier.client.connect import Address, client_tls, enter, read_token
from kvtier.config import mooncake_url
from kvtier.config.keys import Config, default_nvme_bytes
from kvtier.config.load import encryption_key, environment, filled, replaces_lmcache
from kvtier.config.values import masked
from kvtier.connectors.vllm import CONNECTOR, LMCACHE
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.region import HUGE_BYTES
from kvtier.core.terminal import size_text
from kvtier.store.reports.zero_hits import ZeroHits, totals

State = Literal["ok", "warn", "fail"]

_FEW_HITS = 0.01
"""Part of the asked chunks. So few hits count as none and are left out, because the self-test's own
chunks are hits too."""

_LOAD_TIMEOUT_S = 120
_LOAD = f"""
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
known = KVConnectorFactory._registry
import kvtier.connectors.vllm as ours
ours.{CONNECTOR}
print(json.dumps(["{CONNECTOR}" in known, known.get("{LMCACHE}") is known.get("{CONNECTOR}")]))
"""
_SMALL_SHM = 256 << 20
_POPULATE_LINUX = (5, 14)
_NO_SIZE = 1 << 40
"""A chunk size that no server keeps: it says what it does keep, and opens nothing for us."""
_LONG_CONTEXT = 32_768


class Finding(NamedTuple):
    check: str
    state: State
    seen: str
    do: str = ""
    """Empty when there is nothing to do."""


# ---- the host and the engine ---------------------------------------------------------------------


def check_host(config: Config) -> Iterator[Finding]:
    """Versions, memory, and the limits that a container or a service manager sets."""
    yield Finding("kvtier", "ok", f"{kvtier.__version__}, Python {platform.python_version()}")
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    old = release < _POPULATE_LINUX
    slow = (
        "the first save into each slot is slow before Linux 5.14; newer kernels prepare slots "
        "in the background"
    )
    yield Finding("linux", "warn" if old else "ok", platform.release(), slow if old else "")
    yield _memory(config)
    yield _huge_pages(config)
    yield _memlock(config)
    yield _shm()


def _memory(config: Config) -> Finding:
    """Checks as the start does (:func:`~kvtier.autoconfig.memory.require_ram`)."""
    limit, free, _ = room = ram_room()
    if limit is None or free is None:
        source = probe.probe_memory().available.source
        return Finding("ram", "warn", f"free memory is unknown ({source})", "set ram_bytes by hand")
    size, source = ram_bytes(config), config.sources.get("ram_bytes", "default")
    given = f"ram_bytes {size_text(size)} ({source}) of"
    if config.server is None and in_reserved_pages(size):
        return Finding("ram", "ok", f"{given} reserved huge pages")
    if not room.ever(size):
        do = "lower ram_bytes, or raise the limit: no start takes more than there can ever be"
        return Finding(
            "ram", "fail", f"{given} {size_text(limit.value or 0)} in all ({limit.source})", do
        )
    seen = f"{given} {size_text(free.value or 0)} free ({free.source})"
    if not room.now(size):
        more = size_text(size - (free.value or 0))
        do = (
            f"lower ram_bytes, or make room for {more} more: the kernel may kill the process when "
            "the RAM tier fills"
        )
        return Finding("ram", "warn", seen, do)
    return Finding("ram", "ok", seen)


def _huge_pages(config: Config) -> Finding:
    """Everything works without huge pages, with a second copy between a slot and the disk."""
    memory, size = probe.probe_memory(), ram_bytes(config)
    free = memory.reserved.value or 0
    aside = f"; {size_text(free)} of reserved ones are free" if free else ""
    if config.server is None and in_reserved_pages(size):
        return Finding("huge pages", "ok", f"reserved: an engine's own pool takes them{aside}")
    if memory.makes_huge.value:
        return Finding("huge pages", "ok", f"the kernel makes them of ordinary memory{aside}")
    do = (
        f"a newer kernel (Linux 6.1), or sysctl vm.nr_hugepages={-(-size // HUGE_BYTES)} before "
        "the engine starts"
    )
    return Finding("huge pages", "warn", f"none; a disk needs a second copy{aside}", do)


def _memlock(config: Config) -> Finding:
    limit, gpus = probe.probe_memory().memlock, probe.probe_gpus()
    seen = (
        size_text(limit.value)
        if limit.value is not None and limit.value < UNLIMITED
        else "no limit"
    )
    if gpus.count.value == 0:
        return Finding("memlock", "ok", f"{seen}; not needed without a GPU")
    if gpus.pin_charged.value is False:
        return Finding("memlock", "ok", f"{seen}; not charged: {gpus.pin_charged.source}")
    if limit.value is None or limit.value >= ram_bytes(config):
        return Finding("memlock", "ok", seen)
    do = "docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity"
    return Finding(
        "memlock", "warn", f"{seen}, less than ram_bytes, to which pinning may be charged", do
    )


def _shm() -> Finding:
    shm = probe.probe_memory().shm
    seen = f"{size_text(shm.value)} in /dev/shm" if shm.value is not None else shm.source
    if (shm.value or 0) >= _SMALL_SHM:
        return Finding("shm", "ok", f"{seen}; kvtier needs none of it")
    do = "kvtier needs none, but vLLM with several ranks does: docker run --shm-size=2g"
    return Finding("shm", "warn", seen, do)


def check_engine() -> Iterator[Finding]:
    """vLLM in this Python, and whether the connector loads there as vLLM would load it."""
    env = environment()
    try:
        text = verdict(look(sys.executable, env), sys.executable)
    except ConfigError as error:
        yield Finding("vllm", "fail", str(error), "run doctor with the Python that runs vLLM")
        return
    tested = "not tested" not in text
    yield Finding(
        "vllm", "ok" if tested else "warn", text, "" if tested else "read the release notes of both"
    )
    yield _connector(env)


def check_command(words: Sequence[str]) -> Iterator[Finding]:
    """Whether the command that starts the engine keeps kvtier's connector: LMI's options, and
    vLLM's command."""
    env, vllm = environment(), list(words[1:] if words[:1] == ["--"] else words)
    try:
        refuse_own_offloading(env)
        said = (
            transfer(understood(vllm, env.get("PATH")).arguments, replaces_lmcache(env))
            if vllm
            else []
        )
    except ConfigError as error:
        yield Finding(
            "command",
            "fail",
            str(error),
            "start the engine with kvtier launch, which looks at it first",
        )
        return
    if vllm and recomputing(vllm) == vllm:
        yield Finding("command", "ok", "; ".join(said))
    elif vllm:
        yield Finding(
            "command",
            "warn",
            "; ".join(said),
            "start it with kvtier launch, or say so beside kv_connector",
        )


def _connector(env: dict[str, str]) -> Finding:
    command = [sys.executable, "-c", _LOAD]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "connector",
            "fail",
            f"not loaded within {_LOAD_TIMEOUT_S} s",
            "import vllm by hand and see why",
        )
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:] or [""]
    loaded: list[bool] = []
    with suppress(ValueError):
        loaded = json.loads(last[0]) if done.returncode == 0 else []
    if not loaded:
        seen = f"{CONNECTOR} does not load: {last[0]}"
        return Finding(
            "connector",
            "fail",
            seen,
            "run doctor with the Python that runs vLLM; pip install 'kvtier[vllm]'",
        )
    known, instead = loaded
    if replaces_lmcache() and not instead:
        seen = (
            f"KVTIER_REPLACE_LMCACHE is on, but vLLM loads no plug-in of kvtier's: {LMCACHE} is "
            "LMCache's"
        )
        return Finding("connector", "fail", seen, "unset VLLM_PLUGINS, or add kvtier to it")
    if not known:
        do = 'unset VLLM_PLUGINS, or name "kv_connector_module_path":"kvtier.connectors.vllm"'
        return Finding(
            "connector", "warn", f"{CONNECTOR} loads, but vLLM does not know its bare name", do
        )
    return Finding(
        "connector", "ok", f"vLLM loads {CONNECTOR}" + (f", also for {LMCACHE}" if instead else "")
    )


# ---- what is configured --------------------------------------------------------------------------


def planned(config: Config, model: Model) -> tuple[Config, Finding]:
    """What auto-config would set here. The engine knows its own parallelism, and decides at its
    start."""
    paths = [config.nvme_path] if config.nvme_path else []
    facts = Facts(
        probe.probe_memory(),
        probe.probe_gpus(),
        probe.probe_disks(paths),
        probe.probe_redis(config.redis_url) if config.redis_url else None,
        model,
        Serving(engines=known(config.host_engines, "host_engines")),
        objects=probe_objects(config.object_url, config.object_bytes)
        if config.object_url
        else None,
    )
    plan = make_plan(facts)
    values = {key: value for key, value in plan.values().items() if key != "chunk_tokens"}
    left = "; ".join(f"{tier} left out: {reason}" for tier, reason in plan.left_out)
    if "ram_bytes" not in values and config.ram_bytes is None:
        return config, Finding(
            "auto", "fail", left, "set ram_bytes by hand; 'kvtier plan' shows every number"
        )
    full = filled(config, values, PLANNED)
    sizes = ", ".join(
        f"{key} {size_text(int(value))}" for key, value in values.items() if key.endswith("_bytes")
    )
    return full, Finding(
        "auto", "ok", f"would set {sizes or 'nothing'} ({left or 'nothing left out'})"
    )


def check_model(config: Config, model: Model) -> Finding:
    """What the RAM tier holds of this model."""
    token = model.kv_bytes_per_token.value or 1
    tokens, longest = (
        ram_bytes(config) // token,
        min(model.max_tokens.value or _LONG_CONTEXT, _LONG_CONTEXT),
    )
    chunk = size_text(token * config.chunk_tokens)
    seen = (
        f"{size_text(token)} of KV a token, {chunk} a chunk; the RAM tier holds {tokens:,} tokens"
    )
    if tokens >= longest:
        return Finding("model", "ok", seen)
    return Finding(
        "model",
        "warn",
        seen,
        f"a context of {longest:,} tokens needs ram_bytes {size_text(longest * token)}",
    )


def check_secrets(config: Config) -> Iterator[Finding]:
    """Files with secrets: they must exist, be readable by this user and by nobody else. And what
    encryption needs."""
    if config.encryption_key_file is not None or encryption_key() is not None:
        wrong = _no_key(config)
        do = "repair this first: the tiers that would be encrypted are not tried" if wrong else ""
        yield Finding(
            "encryption", "fail" if wrong else "ok", wrong or "what lies below RAM is encrypted", do
        )
    if config.server_token_file:
        try:
            read_token(config.server_token_file)
            yield Finding("token", "ok", f"{config.server_token_file}: readable by nobody else")
        except ConfigError as error:
            yield Finding(
                "token",
                "fail",
                str(error),
                "make it anew: openssl rand -hex 32 > FILE; chmod 600 FILE",
            )
    if config.server_ca:
        try:
            client_tls(config.server_ca, config.server_cert, config.server_key)
            yield Finding("tls", "ok", f"{config.server_ca} can be used")
        except ConfigError as error:
            yield Finding(
                "tls", "fail", str(error), "correct server_ca, server_cert and server_key"
            )


def _no_key(config: Config) -> str:
    """Why chunks that must be encrypted cannot be. "" when they can, or need not be."""
    try:
        secret_key(config)
    except ConfigError as error:
        return str(error)
    return ""


def check_ram() -> Finding:
    """Reach the slots as a worker does."""
    wrong = selftest.try_ram()
    if not wrong:
        return Finding(
            "self-test ram", "ok", "slots filled here, mapped and compared by a second process"
        )
    do = (
        "workers map the pool through /proc/PID/fd: same user, /proc mounted without hidepid, "
        "memfd_create allowed"
    )
    return Finding("self-test ram", "fail", wrong, do)


def _tried(tier: str, wrong: str, do: str) -> Finding:
    """The finding of a tier's self-test. ``wrong`` is empty when all went well."""
    if wrong:
        return Finding(f"self-test {tier}", "fail", wrong, do)
    return Finding(
        f"self-test {tier}", "ok", "chunks written, closed, read and compared by a second process"
    )


def check_nvme(config: Config) -> Iterator[Finding]:
    if not config.nvme_path:
        return
    disk = probe.probe_disk(config.nvme_path)
    findings = list(disk_findings(config, disk))
    yield from findings
    if any(finding.state == "fail" for finding in findings) or _no_key(config):
        return
    do = f"look at the file system of {config.nvme_path} and the kernel's log (dmesg)"
    yield _tried("nvme", selftest.try_nvme(config), do)


def disk_findings(config: Config, disk: Disk) -> Iterator[Finding]:
    """Rights, room, file system and O_DIRECT. Pure, except that it looks at the folder's own kind
    and mode."""
    if os.path.lexists(disk.path) and not os.path.isdir(disk.path):
        yield Finding(
            "nvme", "fail", f"{disk.path} is no folder", "name a folder of its own in nvme_path"
        )
        return
    kind = disk.filesystem.value or "unknown file system"
    if disk.writable.value is False:
        yield Finding(
            "nvme",
            "fail",
            disk.writable.source,
            f"give this user a folder of its own at {disk.path}",
        )
        return
    room = (disk.free.value or 0) + (disk.own.value or 0)
    size = config.nvme_bytes or default_nvme_bytes(room)
    held = (
        f"{size_text(size)} ({config.sources.get('nvme_bytes', 'default')}) of "
        f"{size_text(room)} on {kind}"
    )
    if size > room:
        yield Finding(
            "nvme",
            "fail",
            held,
            f"lower nvme_bytes below {size_text(room)}, or make room at {disk.path}",
        )
    elif room < 2 * selftest.NVME_BYTES:
        yield Finding("nvme", "fail", held, f"make room at {disk.path}, or remove nvme_path")
    else:
        direct = ", O_DIRECT" if disk.o_direct.value else ""
        yield Finding(
            "nvme",
            "ok",
            f"{disk.path}: {held}, {disk.device.value or 'device not visible'}{direct}",
        )
    if kind in RAM_FILESYSTEMS:
        yield Finding(
            "nvme", "warn", f"{kind} is RAM: its bytes are counted twice", "name a folder on a disk"
        )
    elif kind in NETWORK_FILESYSTEMS or kind == "overlay":
        yield Finding(
            "nvme",
            "warn",
            f"{kind}: slow, or gone with the container",
            "name a folder on a local disk's volume",
        )
    if disk.o_direct.value is False:
        do = "the page cache takes RAM a second time there; name a folder on ext4 or xfs"
        yield Finding("nvme", "warn", f"no O_DIRECT at {disk.path}: {disk.o_direct.source}", do)
    if _others_write(Path(disk.path)):
        yield Finding(
            "nvme", "warn", f"every user may write in {disk.path}", f"chmod 700 {disk.path}"
        )


def _others_write(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def check_redis(config: Config) -> Iterator[Finding]:
    if not config.redis_url:
        return
    findings = list(redis_findings(config, probe.probe_redis(config.redis_url)))
    yield from findings
    if any(finding.state == "fail" for finding in findings) or _no_key(config):
        return
    yield _tried(
        "redis",
        selftest.try_redis(config),
        "look at Redis's memory (maxmemory), rights (ACL) and log",
    )


def redis_findings(config: Config, redis: Redis) -> Iterator[Finding]:
    """Whether Redis can be reached, and whether it evicts by itself. Pure."""
    where = masked(config.redis_url)
    if not redis.reachable.value:
        do = "start it, or correct redis_url"
        yield Finding("redis", "fail", f"{where}: {redis.reachable.source}", do)
        return
    limit, policy = redis.maxmemory.value, redis.policy.value or "unknown"
    seen = (
        f"{where}: maxmemory {size_text(limit) if limit else 'not set'}, maxmemory-policy {policy}"
    )
    if not limit and config.redis_bytes is None:
        yield Finding(
            "redis",
            "fail",
            seen,
            "set redis_bytes, or maxmemory in Redis: without both no size is safe",
        )
    elif policy != "noeviction":
        do = (
            "CONFIG SET maxmemory-policy noeviction: kvtier evicts the end of a prompt first, "
            "Redis cannot know it"
        )
        yield Finding("redis", "warn", seen, do)
    elif not limit:
        yield Finding(
            "redis", "warn", seen, "set maxmemory: Redis may otherwise outgrow its machine"
        )
    elif (config.redis_bytes or 0) > limit:
        yield Finding(
            "redis",
            "warn",
            f"{seen}; redis_bytes is more",
            f"lower redis_bytes below {size_text(limit)}",
        )
    else:
        yield Finding("redis", "ok", seen)


def check_objects(config: Config) -> Iterator[Finding]:
    if not config.object_url:
        return
    try:
        away = try_objects(config)
    except ConfigError as error:
        yield Finding("object", "fail", str(error), "correct it: no chunk is kept there before")
        return
    if away:
        yield Finding("object", "fail", away, "look at the network and the endpoint from here")
        return
    seen = (
        f"{masked(config.object_url)}: written, read, listed and deleted; "
        f"{size_text(object_bytes(config))} are ours"
    )
    yield Finding("object", "ok", seen)
    if not _no_key(config):
        yield _tried(
            "object",
            selftest.try_objects(config),
            "look at the bucket's policy and the engine's log",
        )


def check_mooncake(config: Config) -> Iterator[Finding]:
    if not config.mooncake_url:
        return
    try:
        try_mooncake(config)
    except ConfigError as error:
        yield Finding("mooncake", "fail", str(error), "no chunk is kept there before")
        return
    place = mooncake_url.parse(config.mooncake_url)
    seen = f"{place.label}: its master answers; {size_text(place.bytes_)} of its pool are ours"
    yield Finding("mooncake", "ok", seen)
    if not _no_key(config):
        do = "look at the hosts that lend memory to the pool, and at the network between"
        yield _tried("mooncake", selftest.try_mooncake(config), do)


def check_server(config: Config) -> Iterator[Finding]:
    """The server is there, lets us in, and gives back what it took, between two clients."""
    if not config.server:
        return
    address = config.server
    try:
        sizes = kept_sizes(config, address)
    except TierError as error:
        yield Finding(
            "server",
            "fail",
            str(error),
            f"start it there: kvtier serve --listen {address}; same user, same host",
        )
        return
    except ConfigError as error:
        yield Finding(
            "server", "fail", str(error), "give both ends the same kvtier, token and TLS files"
        )
        return
    yield Finding("server", "ok", f"{address} lets us in")
    if not sizes:
        seen = (
            "not tried: it has no chunks yet, and each chunk size that it is asked for takes "
            "its part of the room"
        )
        yield Finding(
            "self-test server", "warn", seen, "run doctor again when an engine is attached"
        )
        return
    if Address.parse(address).path:
        yield check_hits(config, address, min(sizes))
    wrong = selftest.try_server(config, address, min(sizes))
    seen = (
        wrong
        or f"chunks of {size_text(min(sizes))} from one client were loaded and compared by another"
    )
    do = (
        "look at the server's log; 'kvtier serve' and engines must be of one version"
        if wrong
        else ""
    )
    yield Finding("self-test server", "fail" if wrong else "ok", seen, do)


def check_hits(config: Config, address: str, slot_bytes: int) -> Finding:
    """Whether chunks that a server on this host keeps are ever asked for again, since its start."""
    nobody = ChunkLayout(fingerprint({"doctor": os.getpid()}), 1, 1, (slot_bytes,))
    with closing(Client(access(replace(config, namespace=None), address, nobody))) as client:
        stats = client.stats()
        zero = ZeroHits(
            f"RAM holds {client.pool.slots:,} chunks" if client.pool else "", seconds=0.0
        )
    asked, hits, saved, reasons = totals(stats)
    if hits < asked * _FEW_HITS and zero.counted(asked - hits, 0, saved, reasons):
        return Finding(
            "hits", "warn", zero.verdict, "'kvtier stats --watch' shows whether a change helps"
        )
    part = (
        f"{hits / asked:.1%} of {asked:,} chunks asked for were hits"
        if asked
        else "no chunk was asked for yet"
    )
    return Finding("hits", "ok", f"{part} since the server's start")


def kept_sizes(config: Config, address: str) -> Sequence[int]:
    """Chunk sizes that a server keeps now, learnt by asking for one that none keeps.

    Raises TierError when it is not there, ConfigError when it does not let us in.
    """
    nobody = ChunkLayout(fingerprint({"doctor": os.getpid()}), 1, 1, (_NO_SIZE,))
    own = replace(config, namespace=None)
    try:
        welcomed = enter(access(own, address, nobody))
    except RefusedSize as refusal:
        return refusal.kept
    welcomed.socket.close()
    for descriptor in welcomed.descriptors:
        os.close(descriptor)
    return []
