"""Every configuration key: its section, its default, its unit and what it is for.

A key has two spellings. A file writes it in its section (``nvme: {path: ...}``, here
``nvme.path``). Environment variables, flags and messages write it flat (``nvme_path``,
``KVTIER_NVME_PATH``). :class:`Config` has the flat names. Where a value comes from is told in
:mod:`kvtier.config.load`. The keys of a tier are its own (``section.py`` in its folder), and stand
in the one table :data:`KEYS`.

Some things are not keys, because the machine or a constant decides them: direct I/O (always, and
buffered only where the file system refuses it), slots (from ``ram_bytes`` and the model), threads
and connections, queue bounds, checksums (always), the hash (SHA-256), that a prompt's end leaves
first, how much of a hit is loaded (what is served sooner than computed), and the audit (one in
1,000 loaded chunks).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.config.remarks import Remark
from kvtier.config.values import PARSERS, masked
from kvtier.core.errors import ConfigError
from kvtier.core.places import RAM, REMOTE
from kvtier.core.terminal import exact_size
from kvtier.tiers.registry import TIERS, configured, refuse
from kvtier.tiers.seam import About, TierSection

GIB = 2**30
REMOTE_LATENCY_S = 0.005
"""Of a server on another host: its place among the tiers is behind stores in the same rack."""


def _key(section: str, unit: str, reason: str, default: Any = None, **more: Any) -> Any:
    return field(
        default=default, metadata={"section": section, "about": About(unit, reason, **more)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKeys:
    """The keys that are no tier's, by section. None: decided at the start from the machine, or off
    where the reason says so."""

    chunk_tokens: int = _key(
        "engine",
        "tokens",
        "unit of reuse, whole blocks of the engine; all engines of a model need the same to share",
        256,
    )
    save_decode: bool = _key(
        "engine",
        "flag",
        "keep KV of answers too, for the next turn; off: they never come back",
        True,
    )
    spans: bool = _key(
        "engine",
        "flag",
        "serve documents from other prompts to requests that ask; approximate",
        False,
    )
    load_timeout_ms: int = _key(
        "engine", "ms", "longest a prompt waits for the next chunk of a lower tier", 2000
    )
    namespace: str | None = _key(
        "engine", "name", "tenant whose chunks are kept apart from others'; none: the model's own"
    )
    auto: bool = _key(
        "engine",
        "flag",
        "measure the machine at the start and fill in every key not set here",
        False,
    )
    host_engines: int = _key(
        "engine",
        "engines",
        "engines, or servers, like this one on this host; auto gives each an equal share",
        1,
    )
    encryption_key_file: str | None = _key(
        "engine", "file", "encrypts all but RAM: 64 hex digits; none: not encrypted"
    )
    keep_percent: int = _key(
        "engine", "percent", "most of RAM, and of each tier, that one tenant's hints may keep", 50
    )
    record: str | None = _key(
        "engine",
        "folder",
        "writes which prompts and hints came, for kvtier simulate; no text; none: no record",
    )
    log_level: str = _key("engine", "level", "DEBUG, INFO, WARNING or ERROR", "INFO")
    ram_bytes: int | None = _key(
        "ram", "bytes", "RAM tier, all ranks; none: 25 % of available memory, at most 32 GiB"
    )
    policy: str = _key(
        "ram",
        "policy",
        "what RAM and tiers drop first; auto: what would have hit most lately; lru: the oldest",
        "auto",
    )
    server: str | None = _key(
        "server",
        "address",
        "unix:///path or tcp://host:port of a shared cache, for several hosts one each; none: in "
        "the engine",
    )
    server_timeout_ms: int = _key(
        "server", "ms", "longest a step of the engine waits for the server; then: a miss", 100
    )
    server_token_file: str | None = _key(
        "server", "file", "secret both ends know; beyond loopback tcp:// needs TLS too"
    )
    server_ca: str | None = _key(
        "server", "file", "TLS: who signed the other end's certificate; none: engines use no TLS"
    )
    server_cert: str | None = _key(
        "server", "file", "TLS: our certificate; servers must have one, engines may"
    )
    server_key: str | None = _key("server", "file", "TLS: the key of server_cert")
    server_unencrypted: bool = _key(
        "server", "flag", "no TLS beyond loopback: the network can read and forge chunks", False
    )
    slot_bytes: int | None = _key(
        "server", "bytes", "a server's chunk size, ready at its start; none: as engines ask"
    )
    server_events: str | None = _key(
        "server",
        "stream",
        "a server's own KV events, with token ids: ipc:///path?replay=ipc:///path; none: no such",
    )
    namespace_percent: int | None = _key(
        "server", "percent", "most of a server's RAM and tiers for one of them; none: all"
    )
    admin: str = _key(
        "admin",
        "http",
        "a server's health, metrics, lookup, clear; off: none",
        "http://127.0.0.1:9588",
    )
    admin_token_file: str | None = _key(
        "admin", "file", "secret for its lookup and clear, and for all beyond loopback"
    )
    admin_engines: str | None = _key(
        "admin",
        "streams",
        "KV events of engines, for its lookup: name=ipc:///path?replay=ipc:///path; none: no "
        "engine's",
        needs="token_file",
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value that is not a default came from, by key."""
    remarks: tuple[Remark, ...] = field(default=(), compare=False, repr=False)
    """What became of each key of LMCache's, of old names, and of what was not read. See
    :func:`kvtier.config.remarks.tell`."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of ``server``: none, one, or one for each host of an engine, first its
        own."""
        return tuple(self.server.split(",")) if self.server else ()

    @property
    def server_here(self) -> str | None:
        """The address of the server on this host whose tiers the engine uses. None: the engine has
        its own."""
        return next((one for one in self.servers[:1] if one.startswith("unix:")), None)

    def source(self, key: str) -> str:
        """Where the value of a key came from."""
        return self.sources.get(key, "default")

    def __post_init__(self) -> None:
        for key, needs in _NEEDS.items():
            if getattr(self, key) is not None and getattr(self, needs) is None:
                raise ConfigError(
                    f"{key}={getattr(self, key)!r} has no effect without {needs}: set {needs} or "
                    f"remove {key}"
                )


class Key(NamedTuple):
    """A key as it is declared."""

    flat: str
    section: str
    about: About

    @property
    def unit(self) -> str:
        return self.about.unit

    @property
    def reason(self) -> str:
        return self.about.reason

    @property
    def name(self) -> str:
        """Within its section. What a section is about is its ``address``."""
        own = self.flat.removeprefix(f"{self.section}_")
        return "address" if own == self.section else own

    @property
    def path(self) -> str:
        """As a file has it, with a dot behind the section."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        return f"KVTIER_{self.flat.upper()}"


def _fits(section: type[TierSection]) -> str:
    """Why the keys of a tier cannot stand in the table. "" when they can."""
    own = {each.name for each in fields(OwnKeys)}
    for flat, (_, about) in section.keys().items():
        if flat in own:
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


def _table() -> Iterator[Key]:
    """kvtier's keys, with those of all tiers behind the last section that is about this host's
    memory."""
    own = [Key(each.name, **each.metadata) for each in fields(OwnKeys) if each.metadata]
    yield from (key for key in own if key.section in _ABOVE_TIERS)
    for tier in TIERS.values():
        yield from (Key(flat, tier.name, about) for flat, (_, about) in tier.section.keys().items())
    yield from (key for key in own if key.section not in _ABOVE_TIERS)


_ABOVE_TIERS = ("engine", "ram")
KEYS: dict[str, Key] = {key.flat: key for key in _table()}
"""Every key by its flat name, in the order of the table."""
PATHS: dict[str, Key] = {key.path: key for key in KEYS.values()}
SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS.values()))
_NEEDS = {key.flat: f"{key.section}_{key.about.needs}" for key in KEYS.values() if key.about.needs}
"""What has no effect without another key."""

if TYPE_CHECKING:

    class Config(OwnKeys):
        """All keys: kvtier's own, and those of every tier's section by their flat names."""

        def __init__(self, **keys: Any) -> None: ...

        def __getattr__(self, key: str) -> Any: ...

else:
    Config = make_dataclass(
        "Config",
        [
            (flat, Any, field(default=section.__dataclass_fields__[name].default))
            for section in (tier.section for tier in TIERS.values())
            for flat, (name, _) in section.keys().items()
        ],
        bases=(OwnKeys,),
        namespace={"__module__": __name__},
        frozen=True,
        slots=True,
        kw_only=True,
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


class KeyRow(NamedTuple):
    """One row of :func:`describe`. Passwords in ``value`` are masked."""

    key: str
    path: str
    value: object
    source: str
    unit: str
    reason: str


def describe(config: Config) -> list[KeyRow]:
    """Every key with its value, source, unit and reason, in the order of the table."""
    return [
        KeyRow(
            key.flat,
            key.path,
            masked(getattr(config, key.flat)),
            config.source(key.flat),
            key.unit,
            key.reason,
        )
        for key in KEYS.values()
    ]


def file_lines(rows: Iterable[tuple[str, object, str]]) -> list[str]:
    """Lines of a configuration file, of flat name, value and comment: each key in its section."""
    by_section: dict[str, list[str]] = {}
    for flat, value, comment in rows:
        key = KEYS[flat]
        text = " ".join(comment.splitlines())
        written = value
        if key.unit == "bytes" and isinstance(value, int) and not exact_size(value).isdecimal():
            written = exact_size(value)  # a number of a MiB or more needs no unit
        lines = [f"  # {text}", f"  {key.name}: {json.dumps(written)}"]
        by_section.setdefault(key.section, [f"{key.section}:"]).extend(lines)
    return [line for lines in by_section.values() for line in lines]


def places(config: Config) -> list[str]:
    """Where an engine of this configuration keeps chunks itself, fastest first. Nowhere when a
    server does."""
    if config.server_here:
        return []
    lower = [(own.latency_s, tier.name) for tier, own in configured(config)]
    if config.server:
        lower.append((REMOTE_LATENCY_S, REMOTE))
    return [RAM, *(name for _, name in sorted(lower))]


def default_ram_bytes(available: int) -> int:
    """RAM tier when no size was given. ``available``: bytes that neither the host nor the cgroup
    needs."""
    return min(available // 4, 32 * GIB)
