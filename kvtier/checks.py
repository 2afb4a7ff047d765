"""What ``kvtier serve``, ``launch``, ``doctor`` and an engine try before they say that all is well:
memory, secrets, every tier, and the server that an engine would attach to.

A fault that waiting does not repair is a ConfigError: given, expected, what to do. A store or
server that cannot be reached now is reported as trouble, in words. RAM serves meanwhile, and the
tier comes back by itself. Nothing here depends on the size of chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvtier.assemble import access, ram_bytes, secret_key
from kvtier.autoconfig.memory import require_ram
from kvtier.client.connect import enter
from kvtier.config.keys import Config, places
from kvtier.core.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.protocol import wire
from kvtier.tiers.nvme.section import NvmeSection
from kvtier.tiers.registry import configured


def kept_sizes(config: Config, address: str) -> Sequence[int]:
    """Chunk sizes that a server keeps now, learnt by asking for one that none keeps.

    Raises TierError when it is not there, ConfigError when it does not let us in.
    """
    unused = ChunkLayout(fingerprint({"doctor": os.getpid()}), 1, 1, (wire.NO_SIZE,))
    own = replace(config, namespace=None)
    try:
        welcomed = enter(access(own, address, unused))
    except RefusedSize as refusal:
        return refusal.kept
    welcomed.socket.close()
    for descriptor in welcomed.descriptors:
        os.close(descriptor)
    return []


def try_server(config: Config) -> str:
    """Why the server, or one of those of several hosts, cannot be used for now. Empty when it can,
    or there is none. Raises ConfigError when it does not let us in: waiting does not mend that."""
    said = list[str]()
    for address in config.servers:
        try:
            kept_sizes(config, address)
        except TierError as error:
            said.append(f"{error}; its chunks are misses until it can be reached")
    return "; ".join(said)


def nvme_folder(config: Config, replica: int = 0) -> Path | None:
    """The folder of an engine's NVMe tier, for which it may have to wait. None: it has no such tier
    itself."""
    if config.nvme_path is None or not places(config):
        return None
    return NvmeSection(path=config.nvme_path).folder(replica)


def looks(config: Config) -> dict[str, Callable[[], str]]:
    """For each configured tier: what says why it cannot be used for now."""
    return {tier.name: partial(tier.away, own) for tier, own in configured(config)}


def try_everything(config: Config) -> dict[str, str]:
    """What cannot be reached now, in words, by subject. Raises ConfigError or TierError. It takes a
    few seconds at most."""
    secret_key(config)
    require_ram(ram_bytes(config), source=config.source("ram_bytes"), lent=True)
    require_whole_pages(config)
    return _away(looks(config))


def try_engine(config: Config) -> dict[str, str]:
    """What an engine cannot reach now, as :func:`try_everything` says it. The tiers of a server on
    this host are the server's. Sizes that auto-config decides are not tried."""
    tried: dict[str, Callable[[], str]] = {"server": partial(try_server, config)}
    if places(config):
        secret_key(config)
        later = {tier.name for tier, own in configured(config) if config.auto and not own.sized}
        tried |= {name: look for name, look in looks(config).items() if name not in later}
    return _away(tried)


def _away(tried: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    return {name: away for name, look in tried.items() if (away := look())}


def require_whole_pages(config: Config) -> None:
    """Raises ConfigError for a size that no slot can have."""
    if config.slot_bytes is not None and config.slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"slot_bytes={config.slot_bytes:,}: expected a multiple of {PAGE_BYTES:,}; take the "
            "one that /v1/stats of a server with engines shows, or remove it"
        )
