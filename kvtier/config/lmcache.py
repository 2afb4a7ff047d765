"""LMCache's configuration keys in kvtier's words.

Pure. No key is dropped in silence. LMCache gives sizes in GiB *per worker*. kvtier's sizes are
totals, hence ``ranks``. The keys and defaults are those of LMCache 0.5.6.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from kvtier.config.keys import Remark
from kvtier.core.errors import ConfigError
from kvtier.tiers.registry import TIERS

_GIB = 2**30
_OFF = (None, False, "", "false", "False")
_SEED = "pythonhashseed"
_SENTINEL_SERVICE = "redis_service_name"
_BESIDE = (_SEED, _SENTINEL_SERVICE)
"""Variables without LMCache's prefix that are no keys of it and that it reads all the same."""

ENVIRONMENT_KEYS = (
    *("chunk_size", "local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size"),
    *("remote_url", "remote_serde", "extra_config"),
)
"""Keys that LMCache's users also set as ``LMCACHE_<KEY>``. The environment beats the file."""
_NO_KEYS = ("LMCACHE_CONFIG_FILE",)


class Note(NamedTuple):
    """Translation of a key. ``ours``: kvtier's key. ``lost``: kvtier does not do what is asked."""

    key: str
    given: object
    ours: str | None
    value: object
    reason: str
    lost: bool


class _Mapped(NamedTuple):
    ours: str | None
    value: object
    reason: str
    lost: bool = False


def _unused(reason: str) -> _Mapped:
    return _Mapped(None, None, reason)


def _lost(reason: str) -> _Mapped:
    return _Mapped(None, None, reason, lost=True)


def translate(raw: Mapping[str, object], ranks: int) -> list[Note]:
    """Translate every key of an LMCache configuration, and each part of ``extra_config``. Raises
    ConfigError for a value that cannot be read."""
    service = str(raw.get(_SENTINEL_SERVICE) or _USUAL_SERVICE)
    notes = [Note(key, value, *_explain(key, value, ranks)) for key, value in _flatten(raw)]
    notes = [_with_service(note, service) if note.ours == "redis_url" else note for note in notes]
    places = [note.key for note in notes if note.ours == "nvme_path"]
    for at, note in enumerate(notes):
        if len(places) > 1 and note.key == "remote_url":
            notes[at] = _unplaced(note, "the NVMe tier's folder, and there is one")
        if not places and note.ours == "nvme_bytes":
            notes[at] = _unplaced(note, "no place to put it")
    return notes


def remarked(notes: Sequence[Note], shown: Callable[[str, object], object]) -> list[Remark]:
    """Return a warning for each key that kvtier does not do, else INFO. ``shown`` masks a value."""
    return [
        Remark(logging.WARNING if note.lost else logging.INFO, _text(note, shown)) for note in notes
    ]


def _text(note: Note, shown: Callable[[str, object], object]) -> str:
    given = f"LMCache key {note.key}={shown(note.key, note.given)}"
    if note.ours is None:
        return f"{given}: {note.reason}"
    return f"{given} -> {note.ours}={shown(note.ours, note.value)} ({note.reason})"


def from_environment(env: Mapping[str, str], *, every: bool) -> dict[str, str]:
    """Read LMCache's keys in the environment: those that it shares with files, or ``every`` one,
    with the seed (LMI sets both) and the name of Redis Sentinel's service."""
    if not every:
        keys = (*ENVIRONMENT_KEYS, _SENTINEL_SERVICE)
        return {key: env[variable(key)] for key in keys if env.get(variable(key))}
    prefixed = {name for name in env if name.startswith("LMCACHE_") and name not in _NO_KEYS}
    names = sorted(prefixed | {key.upper() for key in _BESIDE} & env.keys())
    return {name.removeprefix("LMCACHE_").lower(): env[name] for name in names if env[name]}


def variable(key: str) -> str:
    return key.upper() if key in _BESIDE else f"LMCACHE_{key.upper()}"


def is_known(key: str) -> bool:
    """Whether it is a key of LMCache's, so that an error hints at the variable for its file."""
    return key in _MAPPED or key in _ALWAYS_ON or key in _ONLY or key in _NOT_NEEDED


def _flatten(raw: Mapping[str, object]) -> list[tuple[str, object]]:
    extra = raw.get("extra_config") or {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except RecursionError:
            raise ConfigError(
                "extra_config: JSON of too many levels; expected a JSON object such as {}"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"extra_config: {error}; expected a JSON object such as {{}}"
            ) from None
    if not isinstance(extra, Mapping):
        expected = "expected a mapping such as {use_odirect: true}"
        raise ConfigError(f"extra_config is a {type(extra).__name__}, {expected}")
    plain = [(key, value) for key, value in raw.items() if key != "extra_config"]
    return plain + [(f"extra_config.{key}", value) for key, value in extra.items()]


def _explain(key: str, value: object, ranks: int) -> _Mapped:
    if value is None:
        return _unused("null: kvtier's default holds")
    if key in _MAPPED:
        return _MAPPED[key](key, value, ranks)
    if key in _ALWAYS_ON:
        return _lost("kvtier has it always on") if value in _OFF else _unused("as in kvtier")
    if key in _ONLY:
        same = str(value).lower() == _ONLY[key]
        return _unused("as in kvtier") if same else _lost(f"kvtier has {_ONLY[key]!r} only")
    if key in _NOT_NEEDED:
        return _unused("not needed in kvtier")
    if meant := get_close_matches(key, _EVERY, 1, cutoff=0.87):
        return _lost(f"not a key of LMCache's, so it has no effect; {meant[0]} is one")
    return _unused("off, as in kvtier") if value in _OFF else _lost("has no effect in kvtier")


def _unplaced(note: Note, place: str) -> Note:
    reason = f"not used: local_disk names {place}"
    return note._replace(ours=None, value=None, reason=reason, lost=True)


def _number(key: str, value: object, what: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise ConfigError(
            f"{key}={value!r} in the LMCache configuration: expected {what}; correct or remove it"
        )
    return number


def _gib(ours: str, key: str, value: object, ranks: int) -> _Mapped:
    gib = _number(key, value, "a number of GiB per worker, such as 5.0")
    if gib == 0:
        return _unused(f"0 says nothing about a size: kvtier's default for {ours} holds")
    return _Mapped(ours, int(gib * _GIB) * ranks, f"{gib:g} GiB per worker x {ranks} worker(s)")


def _same(ours: str, key: str, value: object, ranks: int) -> _Mapped:
    return _Mapped(ours, value, "same meaning")


def _seconds(ours: str, key: str, value: object, ranks: int) -> _Mapped:
    seconds = _number(key, value, "a number of seconds, such as 10")
    reason = "seconds to milliseconds: the longest wait for a lower tier"
    return _Mapped(ours, max(1, round(seconds * 1000)), reason)


def _local_disk(key: str, value: object, ranks: int) -> _Mapped:
    if value in _OFF:
        return _unused("off, as in kvtier when nvme_path is not set")
    several = value if isinstance(value, list) else str(value).split(",")
    if isinstance(value, bool) or len(several) < 2:
        return _folder(key, value, "the NVMe tier's folder")
    each = [_folder(key, str(one).strip(), "").value for one in several]
    return _Mapped("nvme_path", ",".join(map(str, each)), "the NVMe tier's folders")


def _folder(key: str, value: object, reason: str) -> _Mapped:
    """Read a folder. ``file://`` with two slashes begins at the root too, as in LMI's examples."""
    text = str(value)
    path = "/" + text.removeprefix("file://").lstrip("/") if text.startswith("file://") else text
    if isinstance(value, bool) or "," in path or not path.startswith("/") or not path.strip("/"):
        raise ConfigError(
            f"{key}={value!r} in the LMCache configuration: expected an absolute folder such as "
            "file:///mnt/nvme/kv/"
        )
    return _Mapped("nvme_path", path.rstrip("/"), reason)


_REMOTE = {
    "redis": "redis",
    "rediss": "rediss",
    "resp": "redis",
    "valkey": "redis",
    "redis-cluster": "redis+cluster",
    "redis-sentinel": "redis+sentinel",
}
_BY_KEY = {
    scheme: words for tier in TIERS.values() for scheme, words in tier.section.lmcache.items()
}
"""LMCache's scheme -> key of a tier that LMCache's URL says too little for: a tier's own prefix, or
bytes that it may have."""
_USUAL_SERVICE = "redismaster"


def _remote_url(key: str, value: object, ranks: int) -> _Mapped:
    scheme, separator, rest = str(value).partition("://")
    if value in _OFF:
        return _unused("off, as in kvtier when redis_url is not set")
    if separator and scheme in ("file", "fs"):
        return _folder(key, str(value).replace("fs://", "file://", 1), "a folder: the NVMe tier's")
    if separator and scheme == "unix":
        return _Mapped("redis_url", str(value), "the Redis tier")
    if separator and scheme in _BY_KEY:
        return _lost(_BY_KEY[scheme])
    if not separator or scheme not in _REMOTE:
        return _lost("kvtier has no such remote tier; RAM and NVMe serve without it")
    ours, hosts = _REMOTE[scheme], rest.rpartition("@")[2]
    if "," in hosts and "+" not in ours:
        return _lost(
            f"{scheme}:// names one host; several are redis-cluster:// or redis-sentinel://"
        )
    return _Mapped(
        "redis_url",
        f"{ours}://{rest}",
        "the Redis tier (Valkey and RESP servers speak the same protocol)",
    )


def _with_service(note: Note, service: str) -> Note:
    """Add the service to Sentinel's URL, which has to name it."""
    url = str(note.value)
    if not url.startswith("redis+sentinel://") or "/" in url.partition("://")[2].rstrip("/"):
        return note
    return note._replace(
        value=f"{url.rstrip('/')}/{service}", reason=f"the Redis tier, Sentinel's service {service}"
    )


_MAPPED: dict[str, Callable[[str, object, int], _Mapped]] = {
    "chunk_size": partial(_same, "chunk_tokens"),
    "max_local_cpu_size": partial(_gib, "ram_bytes"),
    "local_disk": _local_disk,
    "max_local_disk_size": partial(_gib, "nvme_bytes"),
    "remote_url": _remote_url,
    "save_decode_cache": partial(_same, "save_decode"),
    "blocking_timeout_secs": partial(_seconds, "load_timeout_ms"),
}

_ALWAYS_ON = frozenset({"local_cpu", "extra_config.use_odirect"})

_ONLY = {"local_device": "cpu", "remote_serde": "naive", "cache_policy": "lru"}
"""Keys of LMCache's -> the only value that kvtier serves."""

_NOT_NEEDED = frozenset(
    {
        *(_SEED, _SENTINEL_SERVICE, "disable_banner", "enable_async_loading"),
        *("enable_lazy_memory_allocator", "extra_config.resp_num_threads"),
        *("extra_config.save_chunk_meta", "log_level", "lookup_timeout_ms", "min_retrieve_tokens"),
        *("numa_mode", "pin_check_interval_sec", "pin_timeout_sec", "pre_caching_hash_algorithm"),
        *("py_enable_gc", "save_unfull_chunk", "track_usage", "use_experimental"),
        *("use_gpu_connector_v3", "use_layerwise"),
    }
)
"""Keys that change no answer and no place. LMCache itself has given up ``use_experimental``, which
its tutorials still set."""

_EVERY = sorted({*_MAPPED, *_ALWAYS_ON, *_ONLY, *_NOT_NEEDED})
