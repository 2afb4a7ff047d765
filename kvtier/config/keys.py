"""Every key an operator may set, on one screen, and where its value came from. No other file reads
the environment.

Sources, weakest first: defaults < file < environment (``KVTIER_<KEY>``) < flags. The file is the
    one that
``KVTIER_CONFIG_FILE`` names; else the LMCache file that ``LMCACHE_CONFIG_FILE`` or LMI's
``lmcache_config_file`` names, see :mod:`kvtier.config.lmcache` and :mod:`kvtier.config.lmi`. A key
nobody knows and a value that cannot be read are errors, never warnings.

Variables that are no keys: ``KVTIER_CONFIG_FILE``; ``KVTIER_PROPERTIES_FILE``, an LMI
    ``serving.properties``;
``KVTIER_REPLACE_LMCACHE``: serve vLLM's ``LMCacheConnectorV1``, and read every ``LMCACHE_<KEY>``
  variable;
``KVTIER_ENCRYPTION_KEY``: the key that ``encryption_key_file`` would hold. A secret is no value
  that may be shown.

Not keys, because the machine or a constant decides: direct I/O (always, buffered only where the
file system refuses), slots (from ``ram_bytes`` and the model), queue bounds, checksums (always),
the hash (SHA-256), that a prompt leaves end first, the smallest hit (one chunk; whether loading it
pays is forecast each time).
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from kvtier.config import lmcache, lmi, object_url, redis_url
from kvtier.config.remarks import Remark
from kvtier.core.errors import ConfigError

GIB = 2**30
_REPLACE = "KVTIER_REPLACE_LMCACHE"
ENCRYPTION_KEY = "KVTIER_ENCRYPTION_KEY"
NO_KEYS = ("KVTIER_CONFIG_FILE", lmi.PROPERTIES_VARIABLE, _REPLACE, ENCRYPTION_KEY)
"""Variables of ours that set no key."""


def _key(default: Any, unit: str, reason: str) -> Any:
    return field(default=default, metadata={"unit": unit, "reason": reason})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All keys: default, unit, reason. None: decided at the start from the machine, or off where
    the reason says so."""

    chunk_tokens: int = _key(
        256, "tokens", ("unit of reuse, a multiple of the engine's block; larger: fewer I/Os")
    )
    ram_bytes: int | None = _key(
        None, "bytes", ("RAM tier, all ranks; none: 25 % of available memory, at most 32 GiB")
    )
    nvme_path: str | None = _key(None, "folder", "place of the NVMe tier; none: no such tier")
    nvme_bytes: int | None = _key(
        None, "bytes", ("reserved at the start; none: half of what is free, at most 256 GiB")
    )
    nvme_threads: int = _key(
        2, "threads", ("I/Os in flight; two keep one SSD busy, arrays want more")
    )
    nvme_write_limit: int | None = _key(
        None, "bytes", ("most that is written there a day, against wear; none: no limit")
    )
    nvme_write: str | None = _key(
        None, "moment", ("save, or evict: when RAM drops it; none: save, with a limit evict")
    )
    redis_url: str | None = _key(
        None, "url", ("Redis, a cluster or Sentinel, shared by hosts; none: no such tier")
    )
    redis_bytes: int | None = _key(
        None, "bytes", ("our share of its memory; none: what its maxmemory allows")
    )
    redis_threads: int = _key(
        4, "threads", ("connections in use at once; hides the network's round trip")
    )
    redis_ttl_s: int | None = _key(
        None, "s", ("chunks leave Redis after this time; none: when its memory is full")
    )
    redis_prefix: str = _key(
        "kvtier", "name", ("first part of every Redis key, for access rules and clean-up")
    )
    object_url: str | None = _key(
        None, "url", ("bucket that hosts share: s3://, gs:// or az://; none: no such tier")
    )
    object_bytes: int | None = _key(None, "bytes", "our share of the bucket; none: 256 GiB")
    object_threads: int = _key(8, "threads", "requests in flight; hides the round trip")
    encryption_key_file: str | None = _key(
        None, "file", ("encrypts all but RAM: 64 hex digits; none: not encrypted")
    )
    load_timeout_ms: int = _key(
        2000, "ms", ("longest a prompt waits for lower tiers before it is recomputed")
    )
    take_hits: str = _key(
        "auto",
        "when",
        ("auto: as much of a hit as is served sooner than computed; always: all of it"),
    )
    policy: str = _key(
        "auto",
        "policy",
        ("what RAM drops first; auto: what would have hit most lately; lru: the oldest"),
    )
    save_decode: bool = _key(
        True, "flag", ("keep KV of answers too, for the next turn; off: they never come back")
    )
    spans: bool = _key(
        False, "flag", "serve documents from other prompts to requests that ask; approximate"
    )
    server: str | None = _key(
        None, "address", ("unix:///path or tcp://host:port of a shared cache; none: in the engine")
    )
    server_timeout_ms: int = _key(
        100, "ms", ("longest a step of the engine waits for the server; then: a miss")
    )
    server_token_file: str | None = _key(
        None, "file", ("secret both ends know; beyond loopback tcp:// needs TLS too")
    )
    server_ca: str | None = _key(
        None, "file", ("TLS: who signed the other end's certificate; none: engines use no TLS")
    )
    server_cert: str | None = _key(
        None, "file", ("TLS: our certificate; servers must have one, engines may")
    )
    server_key: str | None = _key(None, "file", "TLS: the key of server_cert")
    server_unencrypted: bool = _key(
        False, "flag", ("no TLS beyond loopback: the network can read and forge chunks")
    )
    slot_bytes: int | None = _key(
        None, "bytes", ("a server's chunk size, ready at its start; none: as engines ask")
    )
    admin: str = _key(
        "http://127.0.0.1:9588", "http", ("a server's health, metrics, lookup, clear; off: none")
    )
    admin_token_file: str | None = _key(
        None, "file", ("secret for its lookup and clear, and for all beyond loopback")
    )
    namespace: str | None = _key(
        None, "name", ("tenant whose chunks are kept apart from others'; none: the model's own")
    )
    namespace_percent: int | None = _key(
        None, "percent", ("most of a server's RAM and tiers for one of them; none: all")
    )
    auto: bool = _key(
        False, "flag", ("measure the machine at the start and fill in every key not set here")
    )
    host_engines: int = _key(
        1, "engines", ("engines like this one on this host; auto gives each an equal share")
    )
    self_test: bool = _key(
        False, "flag", ("at the start save in one process, compare in another; a failure ends it")
    )
    audit_one_in: int = _key(
        0, "chunks", ("one in so many loaded chunks is compared with its copy on NVMe; 0: none")
    )
    log_level: str = _key("INFO", "level", "DEBUG, INFO, WARNING or ERROR")
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value that is not a default came from, by key."""
    remarks: tuple[Remark, ...] = field(default=(), compare=False, repr=False)
    """What became of each key of LMCache's that was read, and of what was not read. See
    :func:`kvtier.config.remarks.tell`."""

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
}
"""What has no effect without another key."""


class Setting(NamedTuple):
    """One row of :func:`describe`; passwords in ``value`` are masked."""

    key: str
    value: object
    source: str
    unit: str
    reason: str


def load(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    ranks: int = 1,
) -> Config:
    """The effective configuration.

    Args:
        file: a kvtier YAML file; beats the files named in the environment.
        env: the environment; None is the process's own.
        flags: key -> value from a command line or the engine's connector settings; a value of None
            is "not given".
        ranks: worker ranks of the engine, because LMCache's files give sizes per worker.

    Raises ConfigError for an unknown key, an unreadable value or file, or keys that make no sense
    together.
    """
    environment = os.environ if env is None else env
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    remarks: list[Remark] = []
    above = [*_from_environment(environment), *_from_flags(flags or {}, environment, remarks)]
    beside = _auto_beside_a_file(above, file, environment, remarks)
    for key, given, source in [*_from_file(file, environment, ranks, remarks), *above]:
        if given is not None and not (
            beside and source.startswith(_SIZED_BY_HAND) and key in _SIZES
        ):
            values[key], sources[key] = _parse(key, given, source), source
    return Config(**values, sources=sources, remarks=tuple(remarks))


def typed(flags: Mapping[str, Any]) -> dict[str, Any]:
    """``flags`` as a person typed them at a shell: a relative path is below the current folder.
    Files and engines must give absolute paths, because nobody can see which folder they are
    relative to."""
    paths = {key for key, about in KEYS.items() if about["unit"] in ("file", "folder")}
    return {
        key: os.path.abspath(value) if key in paths and value else value
        for key, value in flags.items()
    }


def filled(config: Config, values: Mapping[str, Any], source: str) -> Config:
    """``config`` with ``values`` for the keys that nobody set: what auto-config found.

    LMI's own auto-config writes ``LMCACHE_MAX_LOCAL_*`` variables, and counts neither the cgroup
    nor what the disk already holds: those sizes are most, not least. A disk of which only the place
    was given, and that was left out, is not used.
    """
    new = {
        key: value
        for key, value in values.items()
        if key not in config.sources or _is_less(config, key, value)
    }
    if "nvme_path" not in values and (
        config.nvme_bytes is None or _set_by_lmi(config, "nvme_bytes")
    ):
        new |= {"nvme_path": None, "nvme_bytes": None}
    return replace(config, **new, sources={**config.sources, **dict.fromkeys(new, source)})


def _set_by_lmi(config: Config, key: str) -> bool:
    return config.sources.get(key, "").startswith("environment LMCACHE_MAX_LOCAL_")


def _is_less(config: Config, key: str, value: Any) -> bool:
    return _set_by_lmi(config, key) and value < getattr(config, key)


def replaces_lmcache(env: Mapping[str, str] | None = None) -> bool:
    """Whether the operator wants kvtier in the place of LMCache's connector. Raises ConfigError for
    no flag."""
    given = (os.environ if env is None else env).get(_REPLACE) or "false"
    try:
        return _flag(given)
    except ValueError:
        raise ConfigError(f"{_REPLACE}={given!r}: expected true or false") from None


def encryption_key(env: Mapping[str, str] | None = None) -> str | None:
    """The environment's own encryption key, as given; empty is given too, and no key: a cache must
    not go in plain because a secret was not there."""
    return (os.environ if env is None else env).get(ENCRYPTION_KEY)


def plain_http_allowed(env: Mapping[str, str] | None = None) -> bool:
    """Whether the operator wants an object store to be reached without TLS: said in the variables
    of the store's own library, like its endpoint and credentials."""
    given = os.environ if env is None else env
    return any(
        given.get(f"{name}_ALLOW_HTTP", "").lower() in ("true", "1")
        for name in ("AWS", "GOOGLE", "AZURE")
    )


def environment(**more: str | None) -> dict[str, str]:
    """This process's environment and ``more`` (None: as it is), for a program that is started from
    here."""
    return {**os.environ, **{name: value for name, value in more.items() if value is not None}}


DEFAULT_OBJECT_BYTES = 256 * GIB
"""Object tier when a URL but no size was given: a bucket has no size of its own."""


def describe(config: Config) -> list[Setting]:
    """Every key with its value, source, unit and reason, in the order of the table."""
    return [
        Setting(
            key,
            masked(getattr(config, key)),
            config.sources.get(key, "default"),
            about["unit"],
            about["reason"],
        )
        for key, about in KEYS.items()
    ]


def default_ram_bytes(available: int) -> int:
    """RAM tier when nobody said a size. ``available``: bytes that neither the host nor the cgroup
    needs."""
    return min(available // 4, 32 * GIB)


def default_nvme_bytes(free: int) -> int:
    """NVMe tier when a folder but no size was given. ``free``: bytes free on that file system."""
    return min(free // 2, 256 * GIB)


def masked(value: object) -> object:
    """``value``, without what may be a password: of a URL that holds one, what was understood of
    it, or its scheme."""
    return redis_url.masked_where_needed(value) if isinstance(value, str) else value


_SECRET_NAME = re.compile(
    r"passw|secret|token(?!s)|credential|auth|(api|access|private|encryption)_?key", re.IGNORECASE
)
_LONGEST_SHOWN, _SHORTEST_SECRET = 200, 16


def shown(key: str, value: object) -> object:
    """``value`` as it may stand in a log line or an error: masked, without what looks like a secret
    that was given in the place of a file or under a name of somebody else's, and cut where it is
    long."""
    if isinstance(value, Mapping | list | tuple | set):
        return f"({type(value).__name__})"
    text, unit = masked(value), KEYS[key]["unit"] if key in KEYS else ""
    plain = str(text)
    if unit == "file":
        hidden = len(plain) >= _SHORTEST_SECRET and not plain.startswith(("/", "./", "../", "~"))
    elif unit == "url":
        hidden = "://" not in plain and "@" in plain
    else:
        hidden = not unit and _SECRET_NAME.search(key) is not None
    if hidden:
        return "***"
    return text if len(plain) <= _LONGEST_SHOWN else f"{plain[:_LONGEST_SHOWN]}..."


_SIZES = ("ram_bytes", "nvme_bytes")
_SIZED_BY_HAND = "LMCache file "


def _auto_beside_a_file(
    above: Sequence[_Given], file: object, env: Mapping[str, str], remarks: list[Remark]
) -> bool:
    """Whether auto-config's sizes take the place of those in an LMCache file. Raises ConfigError
    where the two may not
    meet. ``auto: true`` in a file of ours is that file's own wish."""
    asked = [given for given in above if given.key == "auto" and given.value is not None]
    if not asked or not _parse(*asked[-1]):
        return False
    warnings = lmi.beside_auto(asked[-1].source, file or env.get("KVTIER_CONFIG_FILE"), env)
    remarks += warnings
    return bool(warnings)


class _Given(NamedTuple):
    key: str
    value: object
    source: str


def _lmcache_files(env: Mapping[str, str]) -> list[lmi.Option]:
    """LMCache files that are named, the one that counts first."""
    own = env.get("LMCACHE_CONFIG_FILE")
    found = [lmi.Option(own, "environment LMCACHE_CONFIG_FILE")] if own else []
    return found + [option for option in [lmi.config_file(env)] if option is not None]


def _from_file(
    file: str | os.PathLike[str] | None, env: Mapping[str, str], ranks: int, remarks: list[Remark]
) -> Iterator[_Given]:
    named = _lmcache_files(env)
    ours = file or env.get("KVTIER_CONFIG_FILE")
    if ours:
        for other in named:
            text = (
                f"{other.source}={other.value} is not read: {os.fspath(ours)} is kvtier's own "
                "file and comes first"
            )
            remarks.append(Remark(logging.INFO, text))
        for key, value in _yaml(ours).items():
            yield _Given(_known(key, f"file {ours}"), value, f"file {ours}")
    elif named or replaces_lmcache(env):
        yield from _from_lmcache(named[0].value if named else None, env, ranks, remarks)


def _from_lmcache(
    path: str | None, env: Mapping[str, str], ranks: int, remarks: list[Remark]
) -> Iterator[_Given]:
    raw = _yaml(path) if path else {}
    overrides = lmcache.from_environment(env, every=replaces_lmcache(env))
    notes = lmcache.translate({**raw, **overrides}, ranks)
    remarks += lmcache.remarked(notes, shown)
    for note in notes:
        top = note.key.partition(".")[0]
        source = (
            f"environment {lmcache.variable(top)}"
            if top in overrides
            else f"{_SIZED_BY_HAND}{path}: {note.key}"
        )
        if note.ours is not None:
            yield _Given(note.ours, note.value, source)


def _yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    from kvtier.config.yaml_file import read_yaml  # 15 ms that only a start with a file pays

    return read_yaml(path)


_SERVICE_LINK = re.compile(
    r"KVTIER_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""What Kubernetes puts into every pod for a service called kvtier or kvtier-...: not ours to
read."""


def _from_environment(env: Mapping[str, str]) -> Iterator[_Given]:
    if auto := lmi.option("lmcache_auto_config", env):
        yield _Given("auto", auto.value, auto.source)
    for name, value in env.items():
        if not name.startswith("KVTIER_") or name in NO_KEYS or _SERVICE_LINK.fullmatch(name):
            continue
        source = f"environment {name}"
        yield _Given(_known(name.removeprefix("KVTIER_").lower(), source), value or None, source)


def _from_flags(
    flags: Mapping[str, object], env: Mapping[str, str], remarks: list[Remark]
) -> Iterator[_Given]:
    for key, value in flags.items():
        if key not in KEYS and replaces_lmcache(env):
            text = f"connector setting {key}={shown(key, value)} is not kvtier's and has no effect"
            remarks.append(Remark(logging.WARNING, text))
        else:
            yield _Given(_known(key, "flag"), value, "flag")


def _known(key: str, source: str) -> str:
    if key in KEYS:
        return key
    near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)[0]
    hint = ""
    if lmcache.is_known(key):
        hint = (
            "; it is LMCache's: name an LMCache file in LMCACHE_CONFIG_FILE, not in "
            "KVTIER_CONFIG_FILE"
        )
    raise ConfigError(f"unknown key {key!r} ({source}); the nearest is {near!r}{hint}")


def _parse(key: str, given: object, source: str) -> Any:
    if KEYS[key]["unit"] == "url":
        return _url(key, given, source)
    parse, expected = _PARSERS[KEYS[key]["unit"]]
    try:
        return parse(given)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{key}={shown(key, given)!r} ({source}): expected {expected}; correct it or remove it"
        ) from None


def _url(key: str, given: object, source: str) -> str:
    """The text of a URL that the module named like its key understands."""
    text, rules = (
        given if isinstance(given, str) else "",
        object_url if key == "object_url" else redis_url,
    )
    try:
        rules.parse(text)
    except ConfigError as error:
        shown = rules.masked(text)
        raise ConfigError(f"{key}={shown!r} ({source}): {error}; correct it or remove it") from None
    return text


def parse_size(given: object) -> int:
    """Bytes of ``4GiB``, ``4Gi``, ``512MB``, ``1.5 GB``, ``1073741824``. Raises ValueError for
    anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", str(given).lower())
    if found is None:
        raise ValueError(given)
    number, prefix, binary = found.groups(default="")
    size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
    if size < 1:
        raise ValueError(given)
    return size


def _count(given: object) -> int:
    if isinstance(given, bool) or not re.fullmatch(r"[0-9]+", str(given)) or int(str(given)) < 1:
        raise ValueError(given)
    return int(str(given))


def _percent(given: object) -> int:
    if _count(given) > 100:
        raise ValueError(given)
    return _count(given)


def _flag(given: object) -> bool:
    text = str(given).lower()
    if text not in _FLAG_WORDS:
        raise ValueError(given)
    return _FLAG_WORDS[text]


_FLAG_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _text(pattern: str) -> Callable[[object], str]:
    def parse(given: object) -> str:
        if not isinstance(given, str | os.PathLike) or not re.fullmatch(pattern, os.fspath(given)):
            raise ValueError(given)
        return os.fspath(given)

    return parse


def _http(given: object) -> str:
    """``off`` is a boolean in YAML."""
    return (
        "off"
        if given is False
        else _text(r"off|https?://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}/?")(given)
    )


_PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "tokens": (_count, "a whole number of tokens, at least 1"),
    "threads": (_count, "a whole number of threads, at least 1"),
    "ms": (_count, "a whole number of milliseconds, at least 1"),
    "s": (_count, "a whole number of seconds, at least 1"),
    "bytes": (parse_size, "a size such as 4GiB, 512MB or 1073741824 (bytes)"),
    "chunks": (
        lambda given: 0 if given in (0, "0") else _count(given),
        "a whole number of chunks, 0 for none",
    ),
    "engines": (_count, "a whole number of engines, at least 1"),
    "percent": (_percent, "a whole number from 1 to 100"),
    "flag": (_flag, "true or false"),
    "folder": (_text(r"/[^\0\n]*"), "an absolute path such as /mnt/nvme/kvtier"),
    "file": (_text(r"/[^\0\n]*"), "an absolute path such as /etc/kvtier/token"),
    "http": (_http, "http://host:port, https://host:port or off"),
    "address": (
        _text(r"(unix:///\S+|tcp://\S+:\d+)"),
        "unix:///path/kvtier.sock or tcp://host:port",
    ),
    "name": (_text(r"[A-Za-z0-9._-]+"), "letters, digits, '.', '_' or '-'"),
    "when": (_text(r"auto|always"), "auto or always"),
    "policy": (_text(r"auto|lru"), "auto or lru"),
    "moment": (_text(r"save|evict"), "save or evict"),
    "level": (_text(r"DEBUG|INFO|WARNING|ERROR"), "DEBUG, INFO, WARNING or ERROR"),
}

KEYS: dict[str, Mapping[str, str]] = {
    item.name: item.metadata for item in fields(Config) if item.metadata
}
"""Unit and reason of every key, in the order of the table."""
