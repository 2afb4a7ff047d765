"""LMCache's configuration keys in kvtier's words. Pure: a mapping in, a note per key out; none is
dropped in silence.

LMCache gives sizes in GiB *per worker*; kvtier's are totals, hence ``ranks``. The keys and defaults
are those of LMCache 0.5.6 (``lmcache/v1/config.py``); most of them steer machinery that kvtier does
not have.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtier.config.remarks import Remark
from kvtier.core.errors import ConfigError

_GIB = 2**30
_OFF = (None, False, "", "false", "False")
_SEED = "pythonhashseed"
_SENTINEL_SERVICE = "redis_service_name"
_BESIDE = (_SEED, _SENTINEL_SERVICE)
"""Variables that are no keys of LMCache's and that it reads all the same: their names have no
prefix."""

ENVIRONMENT_KEYS = (
    "chunk_size",
    "local_cpu",
    "max_local_cpu_size",
    "local_disk",
    "max_local_disk_size",
    "remote_url",
    "remote_serde",
    "extra_config",
)
"""Keys that LMCache's users also set as ``LMCACHE_<KEY>``; the environment beats the file."""
_NO_KEYS = ("LMCACHE_CONFIG_FILE",)


class Note(NamedTuple):
    """What became of one LMCache key.

    ``ours`` is the kvtier key that now has ``value``, or None when there is none; ``lost``:
    something was asked for that kvtier does not do.
    """

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


def _not_ours(reason: str) -> _Mapped:
    return _Mapped(None, None, reason)


def _lost(reason: str) -> _Mapped:
    return _Mapped(None, None, reason, lost=True)


def translate(raw: Mapping[str, object], ranks: int) -> list[Note]:
    """One note for every key of an LMCache configuration, ``extra_config.<key>`` for each of its
    parts.

    A remote tier that kvtier does not have is lost, and nothing else: RAM and NVMe serve. Raises
    ConfigError for a value that cannot be read.
    """
    service = str(raw.get(_SENTINEL_SERVICE) or _USUAL_SERVICE)
    notes = [Note(key, value, *_explain(key, value, ranks)) for key, value in _flatten(raw)]
    notes = [_with_service(note, service) if note.ours == "redis_url" else note for note in notes]
    places = [note.key for note in notes if note.ours == "nvme_path"]
    if len(places) > 1:
        notes = [_second_place(note) if note.key == "remote_url" else note for note in notes]
    if not places:
        notes = [_without_disk(note) if note.ours == "nvme_bytes" else note for note in notes]
    return notes


def remarked(notes: Sequence[Note], shown: Callable[[str, object], object]) -> list[Remark]:
    """One remark for each key; one warning for all that ask for what kvtier does not do. ``shown``
    takes a key and its value, and masks what may be a secret."""
    remarks, lost = list[Remark](), list[str]()
    for note in notes:
        given = f"{note.key}={shown(note.key, note.given)}"
        if note.lost:
            lost.append(f"{given}: {note.reason}")
        elif note.ours is None:
            remarks.append(Remark(logging.INFO, f"LMCache key {given}: {note.reason}"))
        else:
            text = (
                f"LMCache key {given} -> {note.ours}={shown(note.ours, note.value)} ({note.reason})"
            )
            remarks.append(Remark(logging.INFO, text))
    if lost:
        remarks.append(
            Remark(logging.WARNING, f"LMCache keys that kvtier does not serve: {'; '.join(lost)}")
        )
    return remarks


def from_environment(env: Mapping[str, str], *, every: bool) -> dict[str, str]:
    """LMCache's keys in the environment: those it shares with files, or ``every`` one, and what
    goes with them: the seed (LMI sets both), and the name of Redis Sentinel's service."""
    if not every:
        keys = (*ENVIRONMENT_KEYS, _SENTINEL_SERVICE)
        return {key: env[variable(key)] for key in keys if env.get(variable(key))}
    prefixed = {name for name in env if name.startswith("LMCACHE_") and name not in _NO_KEYS}
    names = sorted(prefixed | {key.upper() for key in _BESIDE} & env.keys())
    return {name.removeprefix("LMCACHE_").lower(): env[name] for name in names if env[name]}


def variable(key: str) -> str:
    """The environment variable of one of LMCache's keys."""
    return key.upper() if key in _BESIDE else f"LMCACHE_{key.upper()}"


def is_known(key: str) -> bool:
    """Whether this is one of LMCache's own names (used to hint at the right variable for a file of
    LMCache's)."""
    return key in _MAPPED or key in _UNUSED


def _flatten(raw: Mapping[str, object]) -> list[tuple[str, object]]:
    extra = raw.get("extra_config") or {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError as error:
            raise ConfigError(
                f"extra_config: {error}; expected a JSON object such as {{}}"
            ) from None
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"extra_config is a {type(extra).__name__}, expected a mapping such as "
            f"{{use_odirect: true}}"
        )
    plain = [(key, value) for key, value in raw.items() if key != "extra_config"]
    return plain + [(f"extra_config.{key}", value) for key, value in extra.items()]


def _explain(key: str, value: object, ranks: int) -> _Mapped:
    if value is None:
        return _not_ours("null: kvtier's default holds")
    if key in _MAPPED:
        return _MAPPED[key](key, value, ranks)
    if key in _UNUSED:
        return _not_ours(_UNUSED[key])
    for pattern, what in _UNSUPPORTED:
        if re.match(pattern, key.removeprefix("extra_config.")):
            return (
                _not_ours(f"{what}: off, as in kvtier")
                if value in _OFF
                else _lost(f"{what}: not supported")
            )
    return _lost("unknown to kvtier: it has no effect; remove it or check its spelling")


def _without_disk(note: Note) -> Note:
    return note._replace(
        ours=None, value=None, reason="not used: local_disk names no place to put it", lost=True
    )


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


def _gib(ours: str) -> Callable[[str, object, int], _Mapped]:
    def convert(key: str, value: object, ranks: int) -> _Mapped:
        gib = _number(key, value, "a number of GiB per worker, such as 5.0")
        if gib == 0:
            return _not_ours(f"0 says nothing about a size: kvtier's default for {ours} holds")
        return _Mapped(ours, int(gib * _GIB) * ranks, f"{gib:g} GiB per worker x {ranks} worker(s)")

    return convert


def _same(ours: str) -> Callable[[str, object, int], _Mapped]:
    return lambda key, value, ranks: _Mapped(ours, value, "same meaning")


def _seconds(ours: str) -> Callable[[str, object, int], _Mapped]:
    def convert(key: str, value: object, ranks: int) -> _Mapped:
        seconds = _number(key, value, "a number of seconds, such as 10")
        return _Mapped(
            ours,
            max(1, round(seconds * 1000)),
            "seconds to milliseconds: the longest wait for a lower tier",
        )

    return convert


def _local_cpu(key: str, value: object, ranks: int) -> _Mapped:
    if value in _OFF:
        return _lost(
            "not supported: every transfer passes through RAM slots, so the RAM tier stays on"
        )
    return _not_ours("the RAM tier is always on in kvtier")


def _local_disk(key: str, value: object, ranks: int) -> _Mapped:
    if value in _OFF:
        return _not_ours("off, as in kvtier when nvme_path is not set")
    return _folder(key, value, "the NVMe tier's folder")


def _folder(key: str, value: object, reason: str) -> _Mapped:
    """Of ``file://`` with two slashes the rest is a path of the root too: LMI's examples write it
    so."""
    text = str(value)
    path = "/" + text.removeprefix("file://").lstrip("/") if text.startswith("file://") else text
    if isinstance(value, bool) or "," in path or not path.startswith("/") or not path.strip("/"):
        raise ConfigError(
            f"{key}={value!r} in the LMCache configuration: expected one absolute folder such as "
            "file:///mnt/nvme/kv/; kvtier keeps one NVMe file (stripe several disks with RAID 0)"
        )
    return _Mapped("nvme_path", path.rstrip("/"), reason)


def _local_device(key: str, value: object, ranks: int) -> _Mapped:
    if str(value).lower() == "cpu":
        return _not_ours("as in kvtier: the tier above all others is the host's RAM")
    return _lost("not supported: kvtier keeps chunks in the host's RAM")


_REMOTE = {
    "redis": "redis",
    "rediss": "rediss",
    "resp": "redis",
    "valkey": "redis",
    "redis-cluster": "redis+cluster",
    "redis-sentinel": "redis+sentinel",
}
"""LMCache's scheme -> ours."""
_USUAL_SERVICE = "redismaster"
"""What Sentinel is asked for when nobody names a service."""


def _remote_url(key: str, value: object, ranks: int) -> _Mapped:
    scheme, separator, rest = str(value).partition("://")
    if value in _OFF:
        return _not_ours("off, as in kvtier when redis_url is not set")
    if separator and scheme in ("file", "fs"):
        return _folder(key, str(value).replace("fs://", "file://", 1), "a folder: the NVMe tier's")
    if separator and scheme == "unix":
        return _Mapped("redis_url", str(value), "the Redis tier")
    if not separator or scheme not in _REMOTE:
        own = (
            "LMCache's own cache server; kvtier has one, see the key 'server'"
            if scheme == "lm"
            else "kvtier's is Redis"
        )
        return _lost(f"no such remote tier ({own}); RAM and NVMe serve without it")
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
    """Sentinel's URL names the service that it is asked for."""
    url = str(note.value)
    if not url.startswith("redis+sentinel://") or "/" in url.partition("://")[2].rstrip("/"):
        return note
    return note._replace(
        value=f"{url.rstrip('/')}/{service}", reason=f"the Redis tier, Sentinel's service {service}"
    )


def _second_place(note: Note) -> Note:
    reason = "not used: local_disk names the NVMe tier's folder, and there is one"
    return note._replace(ours=None, value=None, reason=reason, lost=True)


def _remote_serde(key: str, value: object, ranks: int) -> _Mapped:
    if value == "naive":
        return _not_ours("as in kvtier: bytes are stored as they are")
    return _lost("not supported: kvtier stores exact bytes, it does not compress with loss")


def _cache_policy(key: str, value: object, ranks: int) -> _Mapped:
    if str(value).upper() == "LRU":
        return _not_ours("as in kvtier: LRU, until another order would hit more (policy)")
    return _lost("not supported: kvtier has the policies auto and lru")


def _use_odirect(key: str, value: object, ranks: int) -> _Mapped:
    if value in _OFF:
        return _lost(
            "not supported: direct I/O is kvtier's rule, buffered only where it is refused"
        )
    return _not_ours("direct I/O is kvtier's rule")


_MAPPED: dict[str, Callable[[str, object, int], _Mapped]] = {
    "chunk_size": _same("chunk_tokens"),
    "local_cpu": _local_cpu,
    "max_local_cpu_size": _gib("ram_bytes"),
    "local_device": _local_device,
    "local_disk": _local_disk,
    "max_local_disk_size": _gib("nvme_bytes"),
    "remote_url": _remote_url,
    "remote_serde": _remote_serde,
    "extra_config.use_odirect": _use_odirect,
    "extra_config.resp_num_threads": _same("redis_threads"),
    "save_decode_cache": _same("save_decode"),
    "blocking_timeout_secs": _seconds("load_timeout_ms"),
    "cache_policy": _cache_policy,
}

_UNUSED = {
    "extra_config.save_chunk_meta": (
        "not needed: what a chunk is made of is part of the model's fingerprint"
    ),
    "save_unfull_chunk": (
        "not needed: kvtier keeps whole chunks; a prompt's short end is recomputed"
    ),
    "min_retrieve_tokens": "not needed: a hit is at least one chunk",
    "lookup_timeout_ms": "not needed: a look-up reads memory only and never waits",
    "numa_mode": "not needed: pages lie where they are first written",
    "enable_lazy_memory_allocator": (
        "not needed: RAM is taken from the system when a slot is first written"
    ),
    "pre_caching_hash_algorithm": "not needed: keys are SHA-256, equal in every process",
    _SEED: "not needed: keys are SHA-256, equal in every process",
    _SENTINEL_SERVICE: "the service in redis_url, where that asks Sentinel",
    "track_usage": "not needed: kvtier sends nothing to anybody",
    "disable_banner": "not needed: kvtier has no banner",
    "log_level": "not read: set KVTIER_LOG_LEVEL",
    "pin_timeout_sec": "not needed: pins belong to leases, which end with their owner",
    "pin_check_interval_sec": "not needed: pins belong to leases, which end with their owner",
    "enable_async_loading": "not needed: loads from lower tiers never block the engine",
    "use_layerwise": "not needed: a chunk is moved as a whole",
    "py_enable_gc": "not needed: kvtier leaves Python's garbage collector alone",
    "use_gpu_connector_v3": "not needed: kvtier has one GPU copier",
}

_UNSUPPORTED = (
    (r"s3_|aws_", "S3"),
    (
        r"mooncake|local_hostname|metadata_server|protocol|device_name|master_server_addr|storage_root_dir",
        "Mooncake",
    ),
    (r"transfer_timeout|global_segment_size|local_buffer_size", "Mooncake"),
    (
        r"azure_|bigtable_|infinistore_|eic_|hf3fs_|fs_connector_",
        "a remote tier that kvtier does not have",
    ),
    (
        r"(valkey_|resp_)?(username|password)$",
        "credentials beside remote_url (write redis://user:password@host:port)",
    ),
    (r"enable_p2p|p2p_|transfer_channel", "peer-to-peer sharing"),
    (r"enable_pd|pd_|enable_xpyd", "prefill/decode split"),
    (r"(enable_)?nixl_", "NIXL"),
    (r"(use_)?gds|cufile", "GPU direct storage"),
    (
        r"enable_controller|controller_|lmcache_(worker|instance)|lookup_server",
        "LMCache's controller",
    ),
    (r"enable_blending|blend_", "blending (reuse that is not a prefix)"),
    (r"internal_api_server|mp_host|mp_port", "LMCache's own servers"),
    (
        r"runtime_plugin|plugin_|storage_plugins|remote_storage_plugins|external_|script_",
        "plug-ins",
    ),
    (r"enable_chunk_statistics|chunk_statistics", "chunk statistics"),
    (r"enable_hidden_state|hidden_state|max_hidden_state", "hidden state caching"),
    (r"enable_kv_events", "LMCache's KV events"),
    (r"remote_config_url|app_id", "remote configuration"),
    (
        r"lazy_memory_|local_cpu_use_hugepages|reserve_local_cpu_size|maru_|cost_aware",
        "LMCache's allocator settings",
    ),
    (
        r"retrieve_locations|store_location|local_disk_path_sharding|priority_limit|hit_miss_ratio",
        "placement rules",
    ),
)
