"""Config + layout -> Store with its pool, tiers and lanes, or a server's Client, or one for each
host of an engine. It opens the tiers that :mod:`kvtier.tiers.registry` has, and names none."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kvtier.api import KVStore
from kvtier.autoconfig.memory import require_ram
from kvtier.autoconfig.probe.memory import probe_memory
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, client_tls, hello, read_token
from kvtier.client.hosts import Hosts
from kvtier.config.keys import REMOTE_LATENCY_S, Config, default_ram_bytes
from kvtier.config.load import ENCRYPTION_KEY, encryption_key
from kvtier.config.values import masked
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.core.extras import how
from kvtier.core.lanes import Lane
from kvtier.core.places import REMOTE
from kvtier.core.pool import Pool
from kvtier.core.secret_files import read_secret
from kvtier.core.terminal import size_text
from kvtier.eviction.adaptive import ALL_LRU, Adaptive
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.load_policy.latency import Pace
from kvtier.protocol.wire import NAME_LETTERS
from kvtier.store.lower.lower_tier import TierSpec
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
from kvtier.tiers.registry import RegisteredTier, configured
from kvtier.tiers.seam import Opened, Opening, TierSection

logger = logging.getLogger("kvtier")

_READS_QUEUED = 4096
"""Chunks that may wait for a lower tier at once: several of the longest prompts."""
_REMOTE_THREADS = 4
"""Connections to a server on another host in use at once. Hides the network's round trip."""
_NAMESPACE_BYTES = 8
_UNKNOWN_MEMORY = 4 << 30
"""Taken as available where neither the host nor the cgroup says."""


class Lent(NamedTuple):
    """For a Store of a server, which shares its budgets with others: see
    :mod:`kvtier.store.sharing`. Other engines map its pool, and parts of it go back to
    the host while it is in use: it does not lie in reserved huge pages."""

    lent: bool
    """The others have all of RAM and tiers at the start."""
    writes: Mapping[str, WriteBudget]
    """What all of them together may write to each tier that has a limit."""
    observers: tuple[Observer, ...] = ()
    """Observers of all of them."""


def assemble(
    config: Config, layout: ChunkLayout, replica: int = 0, compute: SavedCompute | None = None
) -> KVStore:
    """Make everything one engine needs. ``replica`` (data parallel index) keeps replicas' files
    apart. ``compute``: what hits save of the engine's model. None: of a typical one.

    A Client where ``config.server`` is on this host: one cache for all replicas, which has the
    tiers. Raises ConfigError or TierError, naming the key to change. What was opened before is
    closed again.
    """
    if server := config.server_here:
        return Client(access(config, server, layout), config.server_timeout_ms / 1000)
    return assemble_store(config, layout, replica, compute=compute)


def assemble_hosts(
    config: Config, layouts: Sequence[ChunkLayout], told: Sequence[AbstractSet[bytes]]
) -> Hosts:
    """:func:`assemble` for an engine over several hosts. ``layouts``: of each host's own chunks.
    ``told``: the names of servers that the workers of each host have found there.

    Raises ConfigError where the addresses are not those of the hosts' servers in order.
    """
    with ExitStack() as undo:
        clients = list[Client]()
        for address, layout in zip(config.servers, layouts, strict=True):
            steers = bool(clients)
            one = Client(
                access(config, address, layout, steers=steers), config.server_timeout_ms / 1000
            )
            undo.callback(one.close)
            clients.append(one)
        _refuse_other_hosts(config.servers, [one.server for one in clients], told)
        undo.pop_all()
    return Hosts(clients, [layout.fingerprint for layout in layouts])


def _refuse_other_hosts(
    addresses: Sequence[str], names: Sequence[bytes], told: Sequence[AbstractSet[bytes]]
) -> None:
    """Raises ConfigError for addresses of one server, and where a host's workers found another one.
    ``names``: what the servers are called. Empty: they are not there yet."""
    for host, (address, name, found) in enumerate(zip(addresses, names, told, strict=True)):
        if name and name in names[:host]:
            raise ConfigError(
                f"server_address names {addresses[names.index(name)]} and {address}, which are one "
                "server, expected one on each host: start kvtier serve on every host, and name "
                "them in the order of --node-rank"
            )
        others = found - {name, b""}
        if name and others:
            raise ConfigError(
                f"server_address: {address} is not the server that the workers of node {host} "
                f"found at {addresses[0]} on their host. Name the servers in the order of "
                "--node-rank, and start the engine again if one was restarted just now"
            )


def assemble_store(
    config: Config,
    layout: ChunkLayout,
    replica: int = 0,
    shared: Lent | None = None,
    compute: SavedCompute | None = None,
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
        tiers: list[TierSpec] = []
        rest = _at_rest(config, layout)
        around = _around(rest, layout)._replace(
            replica=replica, lent=lent, in_huge_pages=pool.in_huge_pages
        )
        budgets = shared.writes if shared is not None else write_budgets(config)
        said = list[str]()
        for lower in _lower(config, layout, around):
            opened = lower.open()
            tier = opened.tier if lower.name == REMOTE else rest.sealed(opened.tier)
            undo.callback(tier.close)
            lane = Lane(tier.name, opened.threads, urgent_bound=_READS_QUEUED, bound=max(64, slots))
            undo.callback(lane.close, 0.0)
            by_limit = lower.write_limit is not None
            tiers.append(TierSpec(tier, lane, budgets.get(lower.name), by_limit))
            said += filter(None, [opened.said])
        share = config.namespace_percent / 100 if config.namespace_percent else None
        spare = Lane("pool", 1, urgent_bound=1, bound=1)
        undo.callback(spare.close, 0.0)
        orders = ALL_LRU
        if config.policy == "auto":
            # A server's layout counts slots: how many tokens a slot holds is known to its engines.
            known = SavedCompute(layout.chunk_tokens) if layout.chunk_tokens > 1 else SavedCompute()
            orders = Adaptive(compute or known).orders()
        orders = orders._replace(keep=config.keep_percent / 100)
        store = Store(pool, tiers, orders, share, None if lent else spare)
        if lent:
            store.sharing.lend(spare)
        for observer in shared.observers if shared is not None else _observers(config, replica):
            store.observe(observer)
        undo.pop_all()
    for lower_tier in store.lower:
        lower_tier.measure()
    _announce(store, layout, said)
    return store


def paces(store: KVStore, config: Config) -> dict[str, Pace]:
    """The pace of each tier that this process has itself, by its place and the size of chunks."""
    at = {tier.name: masked(getattr(config, tier.place)) for tier, _ in configured(config)}
    at[REMOTE] = config.server
    size = store.pool.slot_bytes if store.pool is not None else 0
    return {f"{name} {size} {at[name]}": pace for name, pace in store.paces.items()}


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
    if config.record is not None and not config.server_here:
        RecordFolder(Path(config.record)).close()


class _Lower(NamedTuple):
    """A tier that can be opened, and what the Store has to know of it."""

    name: str
    latency_s: float
    open: Callable[[], Opened]
    write_limit: int | None = None


def _lower(config: Config, layout: ChunkLayout, around: Opening) -> list[_Lower]:
    """The configured tiers, fastest first. A server on another host is one of them."""
    found = [
        _Lower(tier.name, own.latency_s, partial(tier.open, own, around), own.daily_writes())
        for tier, own in configured(config)
    ]
    if config.server is not None:
        open_remote = partial(_remote, config, config.server, layout)
        found.append(_Lower(REMOTE, REMOTE_LATENCY_S, open_remote))
    return sorted(found, key=lambda each: each.latency_s)


def _remote(config: Config, server: str, layout: ChunkLayout) -> Opened:
    from kvtier.client.remote_tier import RemoteTier

    return Opened(RemoteTier(access(config, server, layout)), _REMOTE_THREADS)


def open_tier(tier: RegisteredTier, own: TierSection, config: Config, layout: ChunkLayout) -> Tier:
    """One tier alone, which seals what it has if the configuration says so."""
    rest = _at_rest(config, layout)
    return rest.sealed(tier.open(own, _around(rest, layout)).tier)


class _AtRest(NamedTuple):
    """How chunks lie in tiers that outlive us: as they are, or sealed."""

    chunk_bytes: int
    key_name: bytes = b""
    """In the names of chunks where several share a store: other keys, other names."""
    sealed: Callable[[Tier], Tier] = lambda tier: tier


def _at_rest(config: Config, layout: ChunkLayout) -> _AtRest:
    key, size = secret_key(config), layout.slot_bytes
    if key is None:
        return _AtRest(size)
    from kvtier.tiers.sealed import SealedTier, key_name, sealed_bytes

    return _AtRest(sealed_bytes(size), key_name(key), lambda tier: SealedTier(tier, key, size))


def _around(rest: _AtRest, layout: ChunkLayout) -> Opening:
    return Opening(rest.chunk_bytes, layout.fingerprint[:_NAMESPACE_BYTES] + rest.key_name)


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


def access(
    config: Config, server: str, layout: ChunkLayout, *, steers: bool = False
) -> ServerAccess:
    """How to get into ``server``. ``steers``: as the scheduler of workers on its host. Raises
    ConfigError."""
    address = Address.parse(server)
    name, stream = _called(layout), not (address.path or steers)
    own = hello(
        layout.fingerprint,
        layout.slot_bytes,
        stream=stream,
        namespace=config.namespace or "",
        client=name,
        steers=steers,
    )
    token = read_token(config.server_token_file) if config.server_token_file else None
    if config.server_key is not None:
        read_secret(config.server_key, "server_key")
    tls = (
        client_tls(config.server_ca, config.server_cert, config.server_key)
        if config.server_ca and not address.path
        else None
    )
    return ServerAccess(address, own, token, tls, config.server_unencrypted)


def _called(layout: ChunkLayout) -> str:
    """What this process calls itself at a server, for people: its model, and which process it is.
    Of a long name the end."""
    name = f"process {os.getpid()}"
    return f"{layout.model[2 + len(name) - NAME_LETTERS :]}, {name}" if layout.model else name


def ram_bytes(config: Config) -> int:
    """Bytes of the RAM tier: the key, else its default on this machine now."""
    if config.ram_bytes is not None:
        return config.ram_bytes
    memory = probe_memory()
    looks = (memory.available.value, memory.cgroup_headroom.value)
    return default_ram_bytes(
        min((value for value in looks if value is not None), default=_UNKNOWN_MEMORY)
    )


def write_budgets(
    config: Config, lock: AbstractContextManager[object] | None = None
) -> dict[str, WriteBudget]:
    """What may be written to each tier that has a limit. With a ``lock`` it may be several
    Stores'."""
    return {
        tier.name: WriteBudget(limit, 0, lock)
        for tier, own in configured(config)
        if (limit := own.daily_writes())
    }


def _announce(store: Store, layout: ChunkLayout, said: Sequence[str]) -> None:
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
        store.most_held,
        size_text(store.most_held * store.pool.slot_bytes),
        lower or "no lower tier",
    )
    if (adaptive := store.follower.adaptive) is not None:
        chunk_tokens, s0, source = adaptive.compute
        logger.info(
            "ram.policy auto: what a hit saves is counted in chunks of %d tokens, of a model whose "
            "attention costs as much as all else at token %.0f (%s)",
            chunk_tokens,
            s0,
            source,
        )
    for line in said:
        logger.info("%s", line)
