"""Every configuration key: its section, its default, its unit and what it is for.

A file and :class:`Config` have sections (``nvme.path``). Environment variables, flags and messages
write a key flat (``nvme_path``, ``KVTIER_NVME_PATH``). A tier's section is its own (``SECTION`` in
its ``parts``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from kvtier.config.values import PARSERS, masked
from kvtier.core.errors import ConfigError
from kvtier.core.lookup import RAM, REMOTE
from kvtier.core.terminal import exact_size
from kvtier.tiers.nvme.parts import NvmeSection
from kvtier.tiers.registry import TIERS, configured, refuse
from kvtier.tiers.seam import About, ConfigSection, TierSection, key

logger = logging.getLogger(__name__)

GIB = 2**30
REMOTE_LATENCY_S = 0.005
"""Latency assumed of a server on another host: its place is behind stores in the same rack."""


@dataclass(frozen=True, kw_only=True)
class EngineSection(ConfigSection):
    name = "engine"
    prefix = ""

    chunk_tokens: int = key(
        "tokens",
        "unit of reuse, whole blocks of the engine; all engines of a model need the same to share",
        256,
    )
    save_decode: bool = key(
        "flag", "keep KV of answers too, for the next turn; off: they never come back", True
    )
    spans: bool = key(
        "flag", "serve documents from other prompts to requests that ask; approximate", False
    )
    load_timeout_ms: int = key(
        "ms", "longest a prompt waits for the next chunk of a lower tier", 2000
    )
    namespace: str | None = key(
        "name", "tenant whose chunks are kept apart from others'; none: the model's own"
    )
    auto: bool = key(
        "flag", "measure the machine at the start and fill in every key not set here", False
    )
    host_engines: int = key(
        "engines",
        "engines, or servers, like this one on this host; auto gives each an equal share",
        1,
    )
    encryption_key_file: str | None = key(
        "file", "encrypts all but RAM: 64 hex digits; none: not encrypted"
    )
    keep_percent: int = key(
        "percent", "most of RAM, and of each tier, that one tenant's hints may keep", 50
    )
    record: str | None = key(
        "folder",
        "writes which prompts and hints came, for kvtier simulate; no text; none: no record",
    )
    log_level: str = key("level", "DEBUG, INFO, WARNING or ERROR", "INFO")


@dataclass(frozen=True, kw_only=True)
class RamSection(ConfigSection):
    name = "ram"

    bytes_: int | None = key(
        "bytes", "RAM tier, all ranks; none: 25 % of available memory, at most 32 GiB"
    )
    policy: str = key(
        "policy",
        "what RAM and tiers drop first; auto: what would have hit most lately; lru: the oldest",
        "auto",
        flat="policy",
    )


@dataclass(frozen=True, kw_only=True)
class ServerSection(ConfigSection):
    name = "server"

    address: str | None = key(
        "address",
        "unix:///path or tcp://host:port of a shared cache, for several hosts one each; none: in "
        "the engine",
        flat="server",
    )
    timeout_ms: int = key(
        "ms", "longest a step of the engine waits for the server; then: a miss", 100
    )
    token_file: str | None = key(
        "file", "secret both ends know; beyond loopback tcp:// needs TLS too"
    )
    ca: str | None = key(
        "file", "TLS: who signed the other end's certificate; none: engines use no TLS"
    )
    cert: str | None = key("file", "TLS: our certificate; servers must have one, engines may")
    key_: str | None = key("file", "TLS: the key of server_cert")
    unencrypted: bool = key(
        "flag", "no TLS beyond loopback: the network can read and forge chunks", False
    )
    slot_bytes: int | None = key(
        "bytes",
        "a server's chunk size, ready at its start; none: as engines ask",
        flat="slot_bytes",
    )
    events: str | None = key(
        "stream",
        "a server's own KV events, with token ids: ipc:///path?replay=ipc:///path; none: no such",
    )
    namespace_percent: int | None = key(
        "percent",
        "most of a server's RAM and tiers for one of them; none: all",
        flat="namespace_percent",
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the servers: none, one, or one for each host of an engine, first its own."""
        return tuple(self.address.split(",")) if self.address else ()

    @property
    def here(self) -> str | None:
        """Address of this host's server, whose tiers the engine uses, or None if it has its own."""
        return next((one for one in self.addresses[:1] if one.startswith("unix:")), None)


@dataclass(frozen=True, kw_only=True)
class AdminSection(ConfigSection):
    name = "admin"

    address: str = key(
        "http",
        "a server's health, metrics, lookup, clear; off: none",
        "http://127.0.0.1:9588",
        flat="admin",
    )
    token_file: str | None = key(
        "file", "secret for its lookup and clear, and for all beyond loopback"
    )
    engines: str | None = key(
        "streams",
        "KV events of engines, for its lookup: name=ipc:///path?replay=ipc:///path; none: no "
        "engine's",
        needs="token_file",
    )


_BEFORE_TIERS: tuple[type[ConfigSection], ...] = (EngineSection, RamSection)
_BEHIND_TIERS: tuple[type[ConfigSection], ...] = (ServerSection, AdminSection)


class Remark(NamedTuple):
    """Line about a configuration. ``level`` as in logging: a warning if a setting has no effect."""

    level: int
    text: str


def tell(remarks: Iterable[Remark]) -> None:
    """Log remarks. Only one of several processes with one configuration does."""
    for level, text in remarks:
        logger.log(level, "%s", text)


class Key(NamedTuple):
    flat: str
    section: str
    field: str
    about: About

    @property
    def unit(self) -> str:
        return self.about.unit

    @property
    def reason(self) -> str:
        return self.about.reason

    @property
    def name(self) -> str:
        return self.field.rstrip("_")

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        return f"KVTIER_{self.flat.upper()}"


def _fits(section: type[TierSection]) -> str:
    """Return why the keys of a tier cannot stand in the table, or ""."""
    for flat, (_, about) in section.keys().items():
        if any(flat in own.keys() for own in _BEFORE_TIERS + _BEHIND_TIERS):  # noqa: SIM118
            return f"its key {flat} is kvtier's own; expected another name"
        if about.unit not in PARSERS and (about.unit != "url" or about.url is None):
            return (
                f"its key {flat} has the unit {about.unit!r}; expected {', '.join(PARSERS)}, or "
                "url with what reads it"
            )
    return ""


for _tier in list(TIERS.values()):
    if _why := _fits(_tier.section):
        refuse(_tier, _why)

_TIERS = tuple(tier.section for tier in TIERS.values())
SECTIONS = {section.name: section for section in _BEFORE_TIERS + _TIERS + _BEHIND_TIERS}
"""Sections of kvtier and of all tiers, in the order of tables and files."""
KEYS: dict[str, Key] = {
    flat: Key(flat, section.name, name, about)
    for section in SECTIONS.values()
    for flat, (name, about) in section.keys().items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Values for all keys. Raises ConfigError for one that has no effect without another.

    >>> Config().with_keys(ram_bytes=1 << 30, nvme_path="/mnt/nvme").nvme.path
    '/mnt/nvme'
    """

    engine: EngineSection = EngineSection()
    ram: RamSection = RamSection()
    tiers: Mapping[str, TierSection] = field(
        default_factory=lambda: {tier.name: tier.section() for tier in TIERS.values()}
    )
    server: ServerSection = ServerSection()
    admin: AdminSection = AdminSection()
    remarks: tuple[Remark, ...] = field(default=(), compare=False, repr=False)
    """Remarks on LMCache's keys, on old names, and on files that were not read."""

    @property
    def nvme(self) -> NvmeSection:
        return cast("NvmeSection", self.tiers[NvmeSection.name])

    @property
    def sections(self) -> Mapping[str, ConfigSection]:
        own = (self.engine, self.ram, *self.tiers.values(), self.server, self.admin)
        return {section.name: section for section in own}

    def value(self, flat: str) -> Any:
        key = KEYS[flat]
        return getattr(self.sections[key.section], key.field)

    @property
    def sources(self) -> dict[str, str]:
        return {
            flat: section.sources[name]
            for section in self.sections.values()
            for flat, (name, _) in section.keys().items()
            if name in section.sources
        }

    def source(self, flat: str) -> str:
        return self.sources.get(flat, "default")

    def with_keys(
        self, sources: Mapping[str, str] = MappingProxyType({}), /, **keys: Any
    ) -> Config:
        changed = dict(self.sections)
        for flat, value in keys.items():
            section, name = changed[KEYS[flat].section], KEYS[flat].field
            told = {name: sources[flat]} if flat in sources else {}
            new: dict[str, Any] = {name: value, "sources": {**section.sources, **told}}
            changed[section.name] = replace(section, **new)
        return self.with_sections(changed)

    def with_sections(self, sections: Mapping[str, ConfigSection]) -> Config:
        own: dict[str, Any] = {name: new for name, new in sections.items() if name not in TIERS}
        tiers = {
            name: cast("TierSection", sections.get(name, old)) for name, old in self.tiers.items()
        }
        return replace(self, tiers=tiers, **own)

    def __post_init__(self) -> None:
        for section in self.sections.values():
            values = {flat: getattr(section, name) for flat, (name, _) in section.keys().items()}
            for flat, (_, about) in section.keys().items():
                needs = f"{section.name}_{about.needs}"
                if about.needs and values[flat] is not None and values[needs] is None:
                    raise ConfigError(
                        f"{flat}={values[flat]!r} has no effect without {needs}: set {needs} or "
                        f"remove {flat}"
                    )


REMOVED = {
    "take_hits": "as much of a hit is loaded as is served sooner than computed",
    "self_test": "'kvtier doctor' saves in one process and loads in another",
    "audit_one_in": "one in 1,000 loaded chunks is compared, always",
} | {
    f"{tier.name}_{key}": now
    for tier in TIERS.values()
    for key, now in tier.section.removed.items()
}
"""Keys of earlier versions -> what does it now."""


CACHE_KEYS = (
    *("server_timeout_ms", "server_token_file", "server_ca", "server_cert", "server_key"),
    *("server_unencrypted", "load_timeout_ms", "namespace"),
)
"""Keys that an engine's own cache over a server has too."""
SIZES = ("bytes", "sizes")
"""Units of keys whose value is a number of bytes."""


class KeyRow(NamedTuple):
    key: str
    path: str
    value: object
    source: str
    unit: str
    reason: str


def describe(config: Config) -> list[KeyRow]:
    return [
        KeyRow(
            key.flat,
            key.path,
            masked(config.value(key.flat)),
            config.source(key.flat),
            key.unit,
            key.reason,
        )
        for key in KEYS.values()
    ]


def file_lines(rows: Iterable[tuple[str, object, str]]) -> list[str]:
    """Write a configuration file's lines by section. ``rows``: flat name, value and comment."""
    by_section: dict[str, list[str]] = {}
    for flat, value, comment in rows:
        key = KEYS[flat]
        text = " ".join(comment.splitlines())
        written = value
        if key.unit in SIZES and isinstance(value, int) and not exact_size(value).isdecimal():
            written = exact_size(value)  # a number of a MiB or more needs no unit
        lines = [f"  # {text}", f"  {key.name}: {json.dumps(written)}"]
        by_section.setdefault(key.section, [f"{key.section}:"]).extend(lines)
    return [line for lines in by_section.values() for line in lines]


def places(config: Config) -> list[str]:
    """List an engine's own places for chunks, fastest first. Empty if a server has them."""
    if config.server.here:
        return []
    lower = [(own.latency_s, tier.name) for tier, own in configured(config.tiers)]
    if config.server.address:
        lower.append((REMOTE_LATENCY_S, REMOTE))
    return [RAM, *(name for _, name in sorted(lower))]


def default_ram_bytes(available: int) -> int:
    """Return the RAM tier's default. ``available``: bytes that neither host nor cgroup need."""
    return min(available // 4, 32 * GIB)
