"""What ``kvtier serve`` tries before it lets engines in: memory, secrets, and every tier.

A fault that waiting does not repair is a ConfigError: given, expected, what to do. A Redis or
bucket that cannot be reached now is reported as trouble, in words. RAM serves meanwhile, and the
tier comes back by itself. Nothing here depends on the size of chunks.
"""

from __future__ import annotations

import logging
from contextlib import closing

from kvtier.assemble import REDIS_PREFIX, ram_bytes, secret_key, try_mooncake, try_objects
from kvtier.autoconfig.memory import require_ram
from kvtier.autoconfig.probe.disks import probe_disk
from kvtier.cli.checks.tiers import disk_findings
from kvtier.config.keys import Config
from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import ConfigError

logger = logging.getLogger("kvtier.server")

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
