"""A configuration on this host: what ``kvtier serve``, ``launch``, ``doctor`` and an engine share,
and what they try before they say that all is well.

A fault that waiting does not repair is a ConfigError. A store or server that cannot be reached now
is trouble, in words. Nothing of :class:`Started` depends on the size of chunks.

RAM is asked for before any of it is taken, because the kernel refuses by killing. More than a limit
ever allows is an error. More than is free now is a warning, because others may give RAM back.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kvtier.autoconfig.memory import probe_memory
from kvtier.client.connect import Address, ServerAccess, client_tls, enter, hello, read_token
from kvtier.config.keys import Config, default_ram_bytes, places
from kvtier.config.load import ENCRYPTION_KEY, encryption_key
from kvtier.core.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.extras import how
from kvtier.core.fact import ROOT, Fact, least, number, text_of
from kvtier.core.secret_files import read_secret
from kvtier.core.terminal import size_text
from kvtier.protocol import wire
from kvtier.store.observers.record import RecordFolder
from kvtier.tiers.registry import configured
from kvtier.tiers.seam import ConfigSection

_UNKNOWN_MEMORY_BYTES = 4 << 30
"""Memory taken as available if neither the host nor the cgroup tells it."""


class Started:
    """A configuration on this host. Secrets are read once, when first needed, and memory is probed
    once. Attributes and methods raise ConfigError, naming the key to change.

    >>> Started(Config().with_keys(ram_bytes=1 << 30)).ram_bytes
    1073741824
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tiers = configured(config.tiers)

    @cached_property
    def ram_bytes(self) -> int:
        """Size of the RAM tier: the key's, else the default on this machine now."""
        if self.config.ram.bytes_ is not None:
            return self.config.ram.bytes_
        memory = probe_memory()
        looks = (memory.available.value, memory.cgroup_headroom.value)
        return default_ram_bytes(
            min((value for value in looks if value is not None), default=_UNKNOWN_MEMORY_BYTES)
        )

    @cached_property
    def encryption_key(self) -> bytes | None:
        """Key of encryption at rest. ConfigError for another form, two keys, or no library."""
        given, source = encryption_key(), ENCRYPTION_KEY
        file = self.config.engine.encryption_key_file
        if file is not None:
            if given is not None:
                raise ConfigError(
                    f"two encryption keys, of encryption_key_file and {ENCRYPTION_KEY}: remove one"
                )
            source = f"encryption_key_file={file}"
            given = read_secret(file, "encryption_key_file").decode(errors="replace")
        if given is None:
            return None
        given = given.strip()
        if not re.fullmatch("[0-9a-fA-F]{64}", given):
            raise ConfigError(
                f"{source} has {len(given)} characters that are not a key, expected 64 hexadecimal "
                "digits, such as from: openssl rand -hex 32"
            )
        try:
            import_module("kvtier.tiers.sealed")
        except ImportError as error:
            raise ConfigError(
                f"{source}: {error}; {how('encryption')}, or remove the key"
            ) from error
        return bytes.fromhex(given)

    @cached_property
    def token(self) -> bytes | None:
        file = self.config.server.token_file
        return read_token(file) if file else None

    @cached_property
    def client_tls(self) -> ssl.SSLContext | None:
        server = self.config.server
        if server.key_ is not None:
            read_secret(server.key_, "server_key")
        return client_tls(server.ca, server.cert, server.key_) if server.ca else None

    def access(
        self, server: str, layout: ChunkLayout, *, steers: bool = False, in_namespace: bool = True
    ) -> ServerAccess:
        """Return what it takes to enter ``server``. ``steers``: for workers on its host."""
        address, keys = Address.parse(server), self.config.server
        name, stream = _process_name(layout), not (address.path or steers)
        own = hello(
            layout.fingerprint,
            layout.slot_bytes,
            stream=stream,
            namespace=(in_namespace and self.config.engine.namespace) or "",
            client=name,
            steers=steers,
        )
        tls = None if address.path else self.client_tls
        return ServerAccess(address, own, self.token, tls, keys.unencrypted)

    def for_slots(self, slot_bytes: int) -> Started:
        """Return this, for the Store of one chunk size of a server."""
        other = copy(self._sized)
        other.tiers = [(tier, own.for_slots(slot_bytes)) for tier, own in other.tiers]
        return other

    @cached_property
    def _sized(self) -> Started:
        """This configuration with all sizes set, before the first Store takes most of the room."""
        sections: dict[str, ConfigSection] = {
            "ram": replace(self.config.ram, bytes_=self.ram_bytes)
        }
        for tier, own in self.tiers:
            sizes = {name: size for name, size in own.decided().items() if not getattr(own, name)}
            sections[tier.name] = replace(own, **sizes)
        other = copy(self)  # with the secrets that were read
        other.config = self.config.with_sections(sections)
        other.tiers = configured(other.config.tiers)
        return other

    def nvme_folders(self, replica: int = 0) -> list[Path]:
        """Return the folders of an engine's NVMe tier, which another engine may still hold."""
        return self.config.nvme.folders(replica) if places(self.config) else []

    def require_record(self) -> None:
        """Raise ConfigError if the record's folder cannot be written, unless a server records."""
        if self.config.engine.record is not None and not self.config.server.here:
            RecordFolder(Path(self.config.engine.record)).close()

    def looks(self) -> dict[str, Callable[[], str]]:
        return {tier.name: partial(tier.away, own) for tier, own in self.tiers}

    def try_server_start(self) -> dict[str, str]:
        """Try the tiers, within seconds. Returns troubles by subject. Raises TierError too."""
        self.encryption_key  # noqa: B018 - it raises
        require_ram(self.ram_bytes, source=self.config.ram.source("bytes_"), lent=True)
        slot_bytes = self.config.server.slot_bytes
        if slot_bytes is not None and slot_bytes % PAGE_BYTES:
            raise ConfigError(
                f"slot_bytes={slot_bytes:,}: expected a multiple of {PAGE_BYTES:,}; take the "
                "one that /v1/stats of a server with engines shows, or remove it"
            )
        return _away(self.looks())

    def try_engine_start(self) -> dict[str, str]:
        """Try an engine's servers and tiers, but for tiers that auto-config has yet to size."""
        tried: dict[str, Callable[[], str]] = {"server": self._try_servers}
        if places(self.config):
            self.encryption_key  # noqa: B018 - it raises
            auto = self.config.engine.auto
            later = {tier.name for tier, own in self.tiers if auto and not own.sized}
            tried |= {name: look for name, look in self.looks().items() if name not in later}
        return _away(tried)

    def _try_servers(self) -> str:
        """Return why a server cannot be used now, or "". Raises ConfigError if one refuses us."""
        said = list[str]()
        for address in self.config.server.addresses:
            try:
                self.sizes_of(address)
            except TierError as error:
                said.append(f"{error}; its chunks are misses until it can be reached")
        return "; ".join(said)

    def sizes_of(self, server: str) -> Sequence[int]:
        """Return the chunk sizes that a server keeps now, by asking for one that none keeps. Raises
        TierError if it is not there, ConfigError if it does not let us in."""
        unused = ChunkLayout(fingerprint({"doctor": os.getpid()}), 1, 1, (wire.NO_SIZE,))
        try:
            welcomed = enter(self.access(server, unused, in_namespace=False))
        except RefusedSize as refusal:
            return refusal.kept
        welcomed.socket.close()
        for descriptor in welcomed.descriptors:
            os.close(descriptor)
        return []


def _away(tried: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    return {name: away for name, look in tried.items() if (away := look())}


def _process_name(layout: ChunkLayout) -> str:
    """Name this process for people at a server: its number, and the end of the model's name."""
    name = f"process {os.getpid()}"
    most = wire.NAME_LETTERS
    return f"{layout.model[2 + len(name) - most :]}, {name}" if layout.model else name


logger = logging.getLogger("kvtier")

INDEX_BYTES = 400
"""Memory of the index for one chunk (``python -m kvtier.bench.micro.index``)."""


class RamBudget(NamedTuple):
    """The RAM of this process. A fact is None where neither the machine nor the cgroup tells it."""

    limit: Fact[int] | None
    free: Fact[int] | None
    own: int
    """Bytes that the process has already, and keeps to its end."""

    def ever(self, size: int) -> bool:
        return self.limit is None or size + self.own <= number(self.limit)

    def now(self, size: int) -> bool:
        return self.free is None or size <= number(self.free)


def ram_room(root: Path = ROOT) -> RamBudget:
    memory = probe_memory(root)
    limit = least(memory.cgroup_limit, memory.total)
    free = least(memory.available, memory.cgroup_headroom)
    return RamBudget(limit, free, _own_bytes(root))


def in_reserved_pages(ram_bytes: int, root: Path = ROOT) -> bool:
    """Whether ``ram_bytes`` fit into free reserved huge pages. Only an engine's pool takes them."""
    return ram_bytes <= (probe_memory(root).reserved.value or 0)


def require_ram(
    ram_bytes: int,
    slot_bytes: int | None = None,
    source: str = "default",
    *,
    lent: bool = False,
    root: Path = ROOT,
) -> None:
    """Raise ConfigError when this process can never have ``ram_bytes``, and log a warning when it
    cannot now. Nothing is checked when reserved huge pages can hold all of it, but a server's RAM
    (``lent``) never lies there. ``slot_bytes``: for the index. ``source``: who chose the size."""
    if not lent and in_reserved_pages(ram_bytes, root):
        return
    limit, free, own = room = ram_room(root)
    needed = ram_bytes + (ram_bytes // slot_bytes * INDEX_BYTES if slot_bytes else 0)
    given = f"ram_bytes={size_text(ram_bytes)} ({source})"
    if limit is not None and not room.ever(needed):
        most = max(0, number(limit) - own - (needed - ram_bytes))
        raise ConfigError(
            f"{given} is more RAM than this process can ever have: {size_text(number(limit))} "
            f"({limit.source}), of which it needs {size_text(own + needed - ram_bytes)} itself. "
            f"The kernel would kill it. Lower ram_bytes below {size_text(most)}, or raise the limit"
        )
    if free is not None and not room.now(needed):
        logger.warning(
            "%s is more than the %s that are free now (%s): the kernel may kill this process when "
            "the RAM tier fills. Lower ram_bytes, or make room",
            given,
            size_text(number(free)),
            free.source,
        )


def _own_bytes(root: Path) -> int:
    """Return this process's memory that only its end gives back; 0 if the kernel does not tell."""
    lines = text_of(root / "proc/self/status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
