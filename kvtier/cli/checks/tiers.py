"""Every configured place for chunks, with a trial between two processes.

Nothing here makes a lasting change, and every check has a deadline of its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvtier import selftest
from kvtier.assemble import object_bytes, try_mooncake, try_objects
from kvtier.autoconfig.facts import Disk, Redis
from kvtier.autoconfig.plan import NETWORK_FILESYSTEMS, RAM_FILESYSTEMS
from kvtier.autoconfig.probe.disks import probe_disk
from kvtier.autoconfig.probe.redis import probe_redis
from kvtier.cli.checks.configuration import no_key
from kvtier.cli.checks.finding import Finding
from kvtier.config import mooncake_url
from kvtier.config.keys import Config, default_nvme_bytes
from kvtier.config.values import masked
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text


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
    disk = probe_disk(config.nvme_path)
    findings = list(disk_findings(config, disk))
    yield from findings
    if any(finding.state == "fail" for finding in findings) or no_key(config):
        return
    do = f"look at the file system of {config.nvme_path} and the kernel's log (dmesg)"
    yield _tried("nvme", selftest.try_nvme(config), do)


def disk_findings(config: Config, disk: Disk) -> Iterator[Finding]:
    """Rights, room, file system and O_DIRECT. Pure, except that it looks at the folder's own kind
    and mode."""
    if os.path.lexists(disk.path) and not os.path.isdir(disk.path):
        yield Finding(
            "nvme", "fail", f"{disk.path} is not a folder", "name a folder of its own in nvme_path"
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
    findings = list(redis_findings(config, probe_redis(config.redis_url)))
    yield from findings
    if any(finding.state == "fail" for finding in findings) or no_key(config):
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
    if not no_key(config):
        yield _tried(
            "object",
            selftest.try_objects(config),
            "look at the bucket's policy and the engine's log",
        )


def check_mooncake(config: Config) -> Iterator[Finding]:
    if not config.mooncake_url:
        return
    try:
        away = try_mooncake(config)
    except ConfigError as error:
        yield Finding("mooncake", "fail", str(error), "no chunk is kept there before")
        return
    if away:
        yield Finding("mooncake", "fail", away, "look at the network and the master from here")
        return
    place = mooncake_url.parse(config.mooncake_url)
    seen = f"{place.label}: its master answers; {size_text(place.bytes_)} of its pool are ours"
    yield Finding("mooncake", "ok", seen)
    if not no_key(config):
        do = "look at the hosts that lend memory to the pool, and at the network between"
        yield _tried("mooncake", selftest.try_mooncake(config), do)
