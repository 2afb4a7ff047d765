"""Config + layout -> Store with its pool, tiers and lanes, or a server's Client. The only file that
names tiers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kvtier.api import KVStore
from kvtier.autoconfig.memory import require_ram
from kvtier.autoconfig.probe.disks import disk_threads, probe_disk
from kvtier.autoconfig.probe.memory import probe_memory
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, client_tls, hello, read_token
from kvtier.config.keys import DEFAULT_OBJECT_BYTES, Config, default_nvme_bytes, default_ram_bytes
from kvtier.config.load import ENCRYPTION_KEY, encryption_key
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.core.extras import how, require
from kvtier.core.lanes import Lane
from kvtier.core.places import RAM
from kvtier.core.pool import Pool
from kvtier.core.secret_files import read_secret
from kvtier.core.terminal import size_text
from kvtier.eviction.adaptive import ALL_LRU, Adaptive
from kvtier.store.lower.lower_tier import Place
from kvtier.store.lower.write_budget import WriteBudget
from kvtier.store.observer import Observer
from kvtier.store.observers.record.folder import (
    RecordFolder,
    RecordWriter,
    record_folder,
    write_on_lane,
)
from kvtier.store.observers.record.recorder import Recorder
from kvtier.store.store import Store
from kvtier.tiers.base import Tier

logger = logging.getLogger("kvtier")

_READS_QUEUED = 4096
"""Chunks that may wait for a lower tier at once: several of the longest prompts."""
_REMOTE_THREADS = 4
"""Connections to a server on another host in use at once. Hides the network's round trip."""
_REDIS_CONNECTIONS = 4
"""In use at once. Hides the network's round trip."""
_OBJECT_REQUESTS = 8
"""In flight. Hides the round trip."""
_MOONCAKE_CALLS = 4
"""At once. Each has memory for one chunk."""
REDIS_PREFIX = "kvtier"
"""First part of every Redis key, for access rules and clean-up."""
_NAMESPACE_BYTES = 8
_UNKNOWN_MEMORY = 4 << 30
"""Taken as available where neither the host nor the cgroup says."""


class Lent(NamedTuple):
    """For a Store of a server, which shares its budgets with others: see
    :mod:`kvtier.store.sharing`. Other engines map its pool, and parts of it go back to
    the host while it is in use: it does not lie in reserved huge pages."""

    lent: bool
    """The others have all of RAM and tiers at the start."""
    writes: WriteBudget | None
    """What all of them may write to NVMe."""
    observers: tuple[Observer, ...] = ()
    """Who watches all of them."""


def assemble(config: Config, layout: ChunkLayout, replica: int = 0) -> KVStore:
    """Make everything one engine needs. ``replica`` (data parallel index) keeps replicas' files
    apart.

    A Client where ``config.server`` is on this host: one cache for all replicas, which has the
    tiers. Raises ConfigError or TierError, naming the key to change. What was opened before is
    closed again.
    """
    if server := _server_here(config):
        return Client(access(config, server, layout), config.server_timeout_ms / 1000)
    return assemble_store(config, layout, replica)


def places(config: Config) -> list[str]:
    """Where an engine of this configuration keeps chunks itself, fastest first. Nowhere when a
    server does."""
    if _server_here(config):
        return []
    lower = {
        "nvme": config.nvme_path,
        "redis": config.redis_url,
        "mooncake": config.mooncake_url,
        "remote": config.server,
        "object": config.object_url,
    }
    return [RAM, *(name for name, given in lower.items() if given)]


def nvme_folder(config: Config, replica: int = 0) -> Path | None:
    """The folder of an engine's NVMe tier. None: it has no such tier itself."""
    if config.nvme_path is None or _server_here(config):
        return None
    return Path(config.nvme_path) / f"replica{replica}" if replica else Path(config.nvme_path)


def assemble_store(
    config: Config, layout: ChunkLayout, replica: int = 0, shared: Lent | None = None
) -> Store:
    """:func:`assemble` for a process that has the chunks itself. ``config.server``, if there is
    one, is on another host."""
    slots = ram_bytes(config) // layout.slot_bytes
    if slots < 1:
        raise ConfigError(
            f"ram_bytes={ram_bytes(config):,} is less than one chunk of {layout.slot_bytes:,} "
            f"bytes ({layout.chunk_tokens} tokens); give at least that, or lower chunk_tokens"
        )
    lent = shared is not None and shared.lent
    if not lent:
        source = config.source("ram_bytes")
        require_ram(ram_bytes(config), layout.slot_bytes, source, lent=shared is not None)
    with ExitStack() as undo:
        pool = Pool(slots, layout.slot_bytes, reserved=shared is None)
        undo.callback(pool.close)
        tiers: list[Place] = []
        for tier, threads, budget, on_evict in _tiers(config, layout, replica, shared, pool):
            undo.callback(tier.close)
            lane = Lane(tier.name, threads, urgent_bound=_READS_QUEUED, bound=max(64, slots))
            undo.callback(lane.close, 0.0)
            tiers.append(Place(tier, lane, budget, on_evict))
        share = config.namespace_percent / 100 if config.namespace_percent else None
        spare = Lane("pool", 1, urgent_bound=1, bound=1)
        undo.callback(spare.close, 0.0)
        orders = Adaptive().orders() if config.policy == "auto" else ALL_LRU
        orders = orders._replace(keep=config.keep_percent / 100)
        store = Store(pool, tiers, orders, share, None if lent else spare)
        if lent:
            store.sharing.lend(spare)
        for observer in shared.observers if shared is not None else _observers(config, replica):
            store.observe(observer)
        undo.pop_all()
    _announce(store, layout, nvme_folder(config, replica))
    return store


def _observers(config: Config, replica: int) -> tuple[Observer, ...]:
    """What records an engine's prompts, on a lane. Raises ConfigError."""
    if config.record is None:
        return ()
    folder = RecordFolder(record_folder(config.record, replica))
    recorder = Recorder(folder.salt)
    lane = Lane("record", 1, urgent_bound=1, bound=1)
    write_on_lane(recorder, RecordWriter(recorder, folder), lane)
    return (recorder,)


def try_record(config: Config) -> None:
    """Raises ConfigError when the folder of recordings cannot be written. With a server on this
    host the server records."""
    if config.record is not None and not _server_here(config):
        RecordFolder(Path(config.record)).close()


def _server_here(config: Config) -> str | None:
    """The address of the server on this host whose tiers the engine uses. None: it has its own."""
    server = config.server
    return server if server is not None and Address.parse(server).path else None


class _Opened(NamedTuple):
    tier: Tier
    threads: int
    budget: WriteBudget | None = None
    on_evict: bool = False


def _tiers(
    config: Config, layout: ChunkLayout, replica: int, shared: Lent | None, pool: Pool
) -> Iterator[_Opened]:
    """Concrete lower tiers, fastest first. Each is opened when it is asked for."""
    rest = _at_rest(config, layout)
    if (path := nvme_folder(config, replica)) is not None:
        from kvtier.tiers.nvme.tier import NvmeTier

        room = nvme_bytes(config, path)
        lent, huge = shared is not None and shared.lent, pool.in_huge_pages
        nvme = rest.sealed(NvmeTier(path, room, rest.chunk_bytes, lent=lent, in_huge_pages=huge))
        writes = shared.writes if shared is not None else write_budget(config)
        threads = disk_threads(probe_disk(str(path)), probe_memory())
        yield _Opened(nvme, threads, writes, on_evict=config.nvme_write_limit is not None)
    if config.redis_url:
        from kvtier.tiers.redis.layout import Form
        from kvtier.tiers.redis.servers import RedisServers
        from kvtier.tiers.redis.tier import RedisTier

        servers = RedisServers(config.redis_url, connections=_REDIS_CONNECTIONS)
        form = Form(REDIS_PREFIX, layout.fingerprint[:_NAMESPACE_BYTES] + rest.key_name)
        redis = RedisTier(
            servers, form, config.redis_bytes, rest.chunk_bytes, ttl_s=config.redis_ttl_s
        )
        yield _Opened(rest.sealed(redis), _REDIS_CONNECTIONS)
    if config.mooncake_url:
        pool_of_hosts = mooncake_tier(config, config.mooncake_url, layout)
        yield _Opened(pool_of_hosts, _MOONCAKE_CALLS)
    if config.server is not None:
        from kvtier.client.remote_tier import RemoteTier

        yield _Opened(RemoteTier(access(config, config.server, layout)), _REMOTE_THREADS)
    if config.object_url:
        yield _Opened(object_tier(config, config.object_url, layout), _OBJECT_REQUESTS)


def object_tier(config: Config, url: str, layout: ChunkLayout) -> Tier:
    """The tier in the bucket of ``url``. Raises ConfigError or TierError."""
    rest = _at_rest(config, layout)
    _require("object")
    from kvtier.tiers.objects.bucket import Bucket
    from kvtier.tiers.objects.layout import Form
    from kvtier.tiers.objects.tier import ObjectTier

    bucket = Bucket(url, rest.chunk_bytes)
    form = Form(bucket.url.prefix, layout.fingerprint[:_NAMESPACE_BYTES] + rest.key_name)
    return rest.sealed(ObjectTier(bucket, form, object_bytes(config), rest.chunk_bytes))


def _require(extra: str) -> None:
    """Raises ConfigError where a library that the tier of this name needs is missing."""
    try:
        require(extra)
    except ConfigError as error:
        raise ConfigError(f"{extra}_url: {error}, or remove {extra}_url") from None


def try_objects(config: Config) -> str:
    """Why the bucket cannot be used for now. Empty when it can. Raises ConfigError or TierError
    for what waiting does not mend."""
    if config.object_url is None:
        return ""
    _require("object")
    from kvtier.tiers.objects.bucket import tried

    away = tried(config.object_url)
    return f"{away}; its chunks are misses until it can" if away else ""


def mooncake_tier(config: Config, url: str, layout: ChunkLayout) -> Tier:
    """The tier in the pool of ``url``. Raises ConfigError or TierError."""
    rest = _at_rest(config, layout)
    _require("mooncake")
    from kvtier.tiers.mooncake.client import MooncakeStore
    from kvtier.tiers.mooncake.tier import MooncakeTier
    from kvtier.tiers.objects.layout import Form

    store = MooncakeStore(url, rest.chunk_bytes, _MOONCAKE_CALLS)
    form = Form("", layout.fingerprint[:_NAMESPACE_BYTES] + rest.key_name)
    return rest.sealed(MooncakeTier(store, form, rest.chunk_bytes))


def try_mooncake(config: Config) -> str:
    """Why the pool cannot be used for now. Empty when it can. Raises ConfigError or TierError
    for what waiting does not mend."""
    if config.mooncake_url is None:
        return ""
    _require("mooncake")
    from kvtier.tiers.mooncake.client import MooncakeError, MooncakeStore

    with closing(MooncakeStore(config.mooncake_url, 1, 1)) as store:
        try:
            store.greet()
        except MooncakeError as error:
            return f"{store.label}: {error}; its chunks are misses until it can be reached"
    return ""


class _AtRest(NamedTuple):
    """How chunks lie in tiers that outlive us: as they are, or sealed."""

    chunk_bytes: int
    key_name: bytes = b""
    """In the names in Redis and buckets: servers with different keys do not meet there."""
    sealed: Callable[[Tier], Tier] = lambda tier: tier


def _at_rest(config: Config, layout: ChunkLayout) -> _AtRest:
    key, size = secret_key(config), layout.slot_bytes
    if key is None:
        return _AtRest(size)
    from kvtier.tiers.sealed import SealedTier, key_name, sealed_bytes

    return _AtRest(sealed_bytes(size), key_name(key), lambda tier: SealedTier(tier, key, size))


def secret_key(config: Config) -> bytes | None:
    """The key of encryption at rest. None: nothing is encrypted. Raises ConfigError for a key of
    another form, for two keys, and where the library is missing."""
    given, source = encryption_key(), ENCRYPTION_KEY
    if config.encryption_key_file is not None:
        if given is not None:
            raise ConfigError(
                f"two encryption keys, of encryption_key_file and {ENCRYPTION_KEY}: remove one"
            )
        source = f"encryption_key_file={config.encryption_key_file}"
        given = read_secret(config.encryption_key_file, "encryption_key_file").decode(
            errors="replace"
        )
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
        raise ConfigError(f"{source}: {error}; {how('encryption')}, or remove the key") from error
    return bytes.fromhex(given)


def access(config: Config, server: str, layout: ChunkLayout) -> ServerAccess:
    """How to get into ``server``. Raises ConfigError."""
    address = Address.parse(server)
    name, stream = f"process {os.getpid()}", not address.path
    own = hello(
        layout.fingerprint,
        layout.slot_bytes,
        stream=stream,
        namespace=config.namespace or "",
        client=name,
    )
    token = read_token(config.server_token_file) if config.server_token_file else None
    if config.server_key is not None:
        read_secret(config.server_key, "server_key")
    tls = (
        client_tls(config.server_ca, config.server_cert, config.server_key)
        if config.server_ca and stream
        else None
    )
    return ServerAccess(address, own, token, tls, config.server_unencrypted)


def ram_bytes(config: Config) -> int:
    """Bytes of the RAM tier: the key, else its default on this machine now."""
    if config.ram_bytes is not None:
        return config.ram_bytes
    memory = probe_memory()
    looks = (memory.available.value, memory.cgroup_headroom.value)
    return default_ram_bytes(
        min((value for value in looks if value is not None), default=_UNKNOWN_MEMORY)
    )


def nvme_bytes(config: Config, path: Path | None = None) -> int:
    """Bytes of the NVMe tier: the key, else its default for what is free now at ``path`` (None:
    ``nvme_path``)."""
    if config.nvme_bytes is not None:
        return config.nvme_bytes
    disk = probe_disk(str(path or config.nvme_path))
    return default_nvme_bytes((disk.free.value or 0) + (disk.own.value or 0))


def object_bytes(config: Config) -> int:
    """Bytes of the object tier: the key, else its default."""
    return config.object_bytes or DEFAULT_OBJECT_BYTES


def write_budget(
    config: Config, lock: AbstractContextManager[object] | None = None
) -> WriteBudget | None:
    """What may be written to NVMe. None: all. With a ``lock`` it may be several Stores'."""
    return WriteBudget(config.nvme_write_limit, 0, lock) if config.nvme_write_limit else None


def _announce(store: Store, layout: ChunkLayout, folder: Path | None) -> None:
    held = store.stats()
    room = zip(store.tiers, store.capacities, strict=True)
    lower = ", ".join(
        f"{tier.name} {chunks} chunks ({held[f'{tier.name}_held']} warm)" for tier, chunks in room
    )
    size = size_text(layout.chunk_bytes)
    logger.info(
        "chunks of %s; RAM %d chunks (%s); %s",
        # A server's layout counts slots: how many tokens a slot holds is known to its engines.
        f"{layout.chunk_tokens} tokens, {size}" if layout.chunk_tokens > 1 else size,
        store.slots,
        size_text(store.slots * store.pool.slot_bytes),
        lower or "no lower tier",
    )
    if folder is not None:
        logger.info(
            "NVMe: %s reserved in %s, and kept after the end for a warm start; 'kvtier clear "
            "--folder %s' gives it back",
            size_text(probe_disk(str(folder)).own.value or 0),
            folder,
            folder,
        )
