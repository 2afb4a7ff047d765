"""What ``kvtier serve``, ``launch``, ``doctor`` and an engine try before they say that all is well:
memory, secrets, every tier, and the server that an engine would attach to.

A fault that waiting does not repair is a ConfigError: given, expected, what to do. A Redis, bucket
or server that cannot be reached now is reported as trouble, in words. RAM serves meanwhile, and the
tier comes back by itself. Nothing here depends on the size of chunks.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvtier.assemble import (
    REDIS_PREFIX,
    access,
    places,
    ram_bytes,
    secret_key,
    try_mooncake,
    try_objects,
)
from kvtier.autoconfig.facts import Disk
from kvtier.autoconfig.memory import require_ram
from kvtier.autoconfig.plan import NETWORK_FILESYSTEMS, RAM_FILESYSTEMS
from kvtier.autoconfig.probe.disks import probe_disk
from kvtier.client.connect import enter
from kvtier.config.keys import Config, default_nvme_bytes
from kvtier.core.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.finding import Finding
from kvtier.core.terminal import size_text
from kvtier.protocol import wire

_LEAST_BYTES = 10 << 20
"""Room with which a folder is of use. A self-test takes half of it."""


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
    held = f"{size_text(size)} ({config.source('nvme_bytes')}) of {size_text(room)} on {kind}"
    if size > room:
        yield Finding(
            "nvme",
            "fail",
            held,
            f"lower nvme_bytes below {size_text(room)}, or make room at {disk.path}",
        )
    elif room < _LEAST_BYTES:
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


def kept_sizes(config: Config, address: str) -> Sequence[int]:
    """Chunk sizes that a server keeps now, learnt by asking for one that none keeps.

    Raises TierError when it is not there, ConfigError when it does not let us in.
    """
    nobody = ChunkLayout(fingerprint({"doctor": os.getpid()}), 1, 1, (wire.NO_SIZE,))
    own = replace(config, namespace=None)
    try:
        welcomed = enter(access(own, address, nobody))
    except RefusedSize as refusal:
        return refusal.kept
    welcomed.socket.close()
    for descriptor in welcomed.descriptors:
        os.close(descriptor)
    return []


def try_server(config: Config) -> str:
    """Why the server cannot be used for now. Empty when it can, or there is none. Raises
    ConfigError when it does not let us in: waiting does not mend that."""
    if config.server is None:
        return ""
    try:
        kept_sizes(config, config.server)
    except TierError as error:
        return f"{error}; its chunks are misses until it can be reached"
    return ""


logger = logging.getLogger("kvtier")

_NAMESPACE = bytes(8)
"""For the names that the trial uses in Redis. Chunks have their engine's namespace."""


def try_everything(config: Config) -> dict[str, str]:
    """What cannot be reached now, in words, by subject. Raises ConfigError or TierError. It takes a
    few seconds at most."""
    secret_key(config)
    require_ram(ram_bytes(config), source=config.source("ram_bytes"), lent=True)
    require_whole_pages(config)
    _try_nvme(config)
    return {name: away for name, look in LOOKS.items() if (away := look(config))}


def try_engine(config: Config) -> dict[str, str]:
    """What an engine cannot reach now, as :func:`try_everything` says it. The tiers of a server on
    this host are the server's. Sizes that auto-config decides are not tried."""
    looks = {"server": try_server}
    if places(config):
        secret_key(config)
        if config.nvme_bytes is not None or not config.auto:
            _try_nvme(config)
        looks |= LOOKS
    return {name: away for name, look in looks.items() if (away := look(config))}


def require_whole_pages(config: Config) -> None:
    """Raises ConfigError for a size that no slot can have."""
    if config.slot_bytes is not None and config.slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"slot_bytes={config.slot_bytes:,}: expected a multiple of {PAGE_BYTES:,}; take the "
            "one that /v1/stats of a server with engines shows, or remove it"
        )


def _try_nvme(config: Config) -> None:
    if config.nvme_path is None:
        return
    for finding in disk_findings(config, probe_disk(config.nvme_path)):
        if finding.state == "fail":
            raise ConfigError(f"nvme_path={config.nvme_path}: {finding.seen}; {finding.do}")
        if finding.state == "warn":
            logger.warning("nvme_path=%s: %s; %s", config.nvme_path, finding.seen, finding.do)


def try_redis(config: Config) -> str:
    """Why Redis cannot be used for now. Empty when it can. Raises ConfigError or TierError for a
    fault that waiting does not repair."""
    if config.redis_url is None:
        return ""
    from kvtier.tiers.redis.errors import FAULTS
    from kvtier.tiers.redis.layout import Form
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.startup import greet, share_of

    servers = RedisServers(config.redis_url, connections=1)
    with closing(servers):
        try:
            facts = greet(servers, Form(REDIS_PREFIX, _NAMESPACE))
        except FAULTS as error:
            share_of(servers.label, config.redis_bytes, ())
            return (
                f"redis {servers.label} cannot be reached: {error}; its chunks are misses "
                "until it can"
            )
        share_of(servers.label, config.redis_bytes, facts)
    return ""


LOOKS = {"redis": try_redis, "object": try_objects, "mooncake": try_mooncake}
"""For each tier on the network: a function that says why it cannot be used for now."""
