"""Every configuration key: its section, its default, its unit and what it is for.

A key has two spellings. A file writes it in its section (``nvme: {path: ...}``, here
``nvme.path``). Environment variables, flags and messages write it flat (``nvme_path``,
``KVTIER_NVME_PATH``). :class:`Config` has the flat names. Where a value comes from is told in
:mod:`kvtier.config.load`.

Some things are not keys, because the machine or a constant decides them: direct I/O (always, and
buffered only where the file system refuses it), slots (from ``ram_bytes`` and the model), threads
and connections, queue bounds, checksums (always), the hash (SHA-256), that a prompt's end leaves
first, how much of a hit is loaded (what is served sooner than computed), and the audit (one in
1,000 loaded chunks).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from kvtier.config.remarks import Remark
from kvtier.config.values import masked
from kvtier.core.errors import ConfigError

GIB = 2**30


def _key(section: str, unit: str, reason: str, default: Any = None) -> Any:
    return field(default=default, metadata={"section": section, "unit": unit, "reason": reason})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All keys, by section. None: decided at the start from the machine, or off where the reason
    says so."""

    chunk_tokens: int = _key(
        "engine",
        "tokens",
        "unit of reuse, a multiple of the engine's block; larger: fewer I/Os",
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
        "engine", "ms", "longest a prompt waits for lower tiers before it is recomputed", 2000
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
        "engine", "engines", "engines like this one on this host; auto gives each an equal share", 1
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
        "what RAM drops first; auto: what would have hit most lately; lru: the oldest",
        "auto",
    )
    nvme_path: str | None = _key("nvme", "folder", "place of the NVMe tier; none: no such tier")
    nvme_bytes: int | None = _key(
        "nvme", "bytes", "reserved at the start; none: half of what is free, at most 256 GiB"
    )
    nvme_write_limit: int | None = _key(
        "nvme",
        "bytes",
        "most that is written a day; chunks are written when RAM drops them then; none: no limit",
    )
    redis_url: str | None = _key(
        "redis", "url", "Redis, a cluster or Sentinel, shared by hosts; none: no such tier"
    )
    redis_bytes: int | None = _key(
        "redis", "bytes", "our share of its memory; none: what its maxmemory allows"
    )
    redis_ttl_s: int | None = _key(
        "redis", "s", "chunks leave Redis after this time; none: when its memory is full"
    )
    object_url: str | None = _key(
        "object", "url", "bucket that hosts share: s3://, gs:// or az://; none: no such tier"
    )
    object_bytes: int | None = _key("object", "bytes", "our share of the bucket; none: 256 GiB")
    mooncake_url: str | None = _key(
        "mooncake",
        "url",
        "Mooncake's store, shared by hosts: mooncake://master:port?bytes=64GiB; none: no such tier",
    )
    server: str | None = _key(
        "server",
        "address",
        "unix:///path or tcp://host:port of a shared cache; none: in the engine",
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
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value that is not a default came from, by key."""
    remarks: tuple[Remark, ...] = field(default=(), compare=False, repr=False)
    """What became of each key of LMCache's, of old names, and of what was not read. See
    :func:`kvtier.config.remarks.tell`."""

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


_NEEDS = {
    "nvme_bytes": "nvme_path",
    "redis_bytes": "redis_url",
    "redis_ttl_s": "redis_url",
    "object_bytes": "object_url",
    "admin_engines": "admin_token_file",
}
"""What has no effect without another key."""


class Key(NamedTuple):
    """A key as it is declared."""

    flat: str
    section: str
    unit: str
    reason: str

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


KEYS: dict[str, Key] = {
    item.name: Key(item.name, **item.metadata) for item in fields(Config) if item.metadata
}
"""Every key by its flat name, in the order of the table."""
PATHS: dict[str, Key] = {key.path: key for key in KEYS.values()}
SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS.values()))

REMOVED = {
    "take_hits": "as much of a hit is loaded as is served sooner than computed",
    "self_test": "'kvtier doctor' saves in one process and loads in another",
    "audit_one_in": "one in 1,000 loaded chunks is compared, always",
    "nvme_threads": "the kind of the disk and the CPUs decide it",
    "nvme_write": "with nvme_write_limit chunks are written when RAM drops them, else when saved",
    "redis_threads": "there are four connections",
    "redis_prefix": "every Redis key begins with 'kvtier'; namespace keeps tenants apart",
    "object_threads": "there are eight requests in flight",
}
"""Keys of earlier versions -> what does it now."""


class Setting(NamedTuple):
    """One row of :func:`describe`. Passwords in ``value`` are masked."""

    key: str
    path: str
    value: object
    source: str
    unit: str
    reason: str


def describe(config: Config) -> list[Setting]:
    """Every key with its value, source, unit and reason, in the order of the table."""
    return [
        Setting(
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
        lines = [f"  # {text}", f"  {key.name}: {json.dumps(value)}"]
        by_section.setdefault(key.section, [f"{key.section}:"]).extend(lines)
    return [line for lines in by_section.values() for line in lines]


DEFAULT_OBJECT_BYTES = 256 * GIB
"""Object tier when a URL but no size was given: a bucket has no size of its own."""


def default_ram_bytes(available: int) -> int:
    """RAM tier when nobody said a size. ``available``: bytes that neither the host nor the cgroup
    needs."""
    return min(available // 4, 32 * GIB)


def default_nvme_bytes(free: int) -> int:
    """NVMe tier when a folder but no size was given. ``free``: bytes free on that file system."""
    return min(free // 2, 256 * GIB)
