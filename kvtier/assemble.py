"""Started + layout -> Store with its pool, tiers and lanes, or a server's Client, or one for each
host of an engine. It opens the tiers that :mod:`kvtier.tiers.registry` has, and names none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NamedTuple

from kvtier.api import KVStore
from kvtier.client.client import Client
from kvtier.client.hosts import Hosts
from kvtier.config.keys import REMOTE_LATENCY_S, Config
from kvtier.config.values import masked
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane
from kvtier.core.lookup import REMOTE
from kvtier.core.pool import Pool
from kvtier.core.terminal import size_text
from kvtier.eviction.adaptive import ALL_LRU, Adaptive
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.load_policy.latency import Pace
from kvtier.started import Started, require_ram
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.lower.write_budget import WriteBudget
from kvtier.store.observer import Observer
from kvtier.store.observers.record import (
    Recorder,
    RecordFolder,
    RecordWriter,
    record_folder,
    write_on_lane,
)
from kvtier.store.store import Store
from kvtier.tiers.base import Tier
from kvtier.tiers.registry import TIERS, RegisteredTier
from kvtier.tiers.seam import Opened, Opening, TierSection

logger = logging.getLogger("kvtier")

_QUEUED_READS = 4096
"""Most reads that may wait for a lower tier at once: several of the longest prompts."""
_REMOTE_THREADS = 4
"""Connections in use at once to a server on another host, which hide the network's round trip."""
_NAMESPACE_BYTES = 8


class Lent(NamedTuple):
    """Budgets that a server's Store shares with its others (:mod:`kvtier.store.sharing`). Engines
    map its pool, parts of which go back to the host, so it has no reserved huge pages."""

    lent: bool
    """Whether the other Stores have all of RAM and tiers at the start."""
    writes: Mapping[str, WriteBudget]
    """Common budget of writes to each tier that has a write limit."""
    observers: tuple[Observer, ...] = ()


def assemble(
    started: Started, layout: ChunkLayout, replica: int = 0, compute: SavedCompute | None = None
) -> KVStore:
    """Make everything one engine needs: a Client if the server is on this host, else a Store. What
    was opened before a ConfigError or TierError is closed again.

    ``replica`` (data parallel index) keeps replicas' files apart. ``compute``: the compute that
    hits save with the engine's model; None for a typical one."""
    server = started.config.server
    if server.here:
        return Client(started.access(server.here, layout), server.timeout_ms / 1000)
    return assemble_store(started, layout, replica, compute=compute)


def assemble_hosts(
    started: Started, layouts: Sequence[ChunkLayout], told: Sequence[AbstractSet[bytes]]
) -> Hosts:
    """Make a KVStore for an engine over several hosts. ``layouts``: of each host's own chunks.
    ``told``: the names of servers that the workers of each host have found there.

    Raises ConfigError unless the addresses are those of the hosts' servers in order."""
    server = started.config.server
    with ExitStack() as undo:
        clients = list[Client]()
        for address, layout in zip(server.addresses, layouts, strict=True):
            way_in = started.access(address, layout, steers=bool(clients))
            one = Client(way_in, server.timeout_ms / 1000)
            undo.callback(one.close)
            clients.append(one)
        _refuse_other_hosts(server.addresses, [one.server for one in clients], told)
        undo.pop_all()
    return Hosts(clients, [layout.fingerprint for layout in layouts])


def _refuse_other_hosts(
    addresses: Sequence[str], names: Sequence[bytes], told: Sequence[AbstractSet[bytes]]
) -> None:
    """Raise ConfigError if two addresses are one server's, or a host's workers found another one.
    ``names``: of the servers, empty if not there yet."""
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
    started: Started,
    layout: ChunkLayout,
    replica: int = 0,
    shared: Lent | None = None,
    compute: SavedCompute | None = None,
) -> Store:
    """Make a Store in this process. A configured server is its tier on another host."""
    config = started.config
    slots = started.ram_bytes // layout.slot_bytes
    if slots < 1:
        raise ConfigError(
            f"ram_bytes={started.ram_bytes:,} is less than one chunk of {layout.slot_bytes:,} "
            f"bytes ({layout.chunk_tokens} tokens); give at least that, or lower chunk_tokens"
        )
    lent = shared is not None and shared.lent
    if not lent:
        source = config.ram.source("bytes_")
        require_ram(started.ram_bytes, layout.slot_bytes, source, lent=shared is not None)
    with ExitStack() as undo:
        pool = Pool(slots, layout.slot_bytes, reserved=shared is None)
        undo.callback(pool.close)
        tiers: list[TierSpec] = []
        rest = _at_rest(started, layout)
        around = _around(rest, layout)._replace(
            replica=replica, lent=lent, in_huge_pages=pool.in_huge_pages
        )
        budgets = shared.writes if shared is not None else write_budgets(started.tiers)
        said = list[str]()
        for lower in _lower(started, layout, around, remote=shared is None):
            opened = lower.open()
            tier = opened.tier if lower.name == REMOTE else rest.sealed(opened.tier)
            undo.callback(tier.close)
            lane = Lane(tier.name, opened.threads, urgent_bound=_QUEUED_READS, bound=max(64, slots))
            undo.callback(lane.close, 0.0)
            by_limit = lower.write_limit is not None
            tiers.append(TierSpec(tier, lane, budgets.get(lower.name), by_limit))
            said += filter(None, [opened.said])
        share = (config.server.namespace_percent or 0) / 100 or None
        spare = Lane("pool", 1, urgent_bound=1, bound=1)
        undo.callback(spare.close, 0.0)
        orders = ALL_LRU
        if config.ram.policy == "auto":
            # A server's layout counts slots: how many tokens a slot holds is known to its engines.
            known = SavedCompute(layout.chunk_tokens) if layout.chunk_tokens > 1 else SavedCompute()
            orders = Adaptive(compute or known).orders()
        orders = orders._replace(keep=config.engine.keep_percent / 100)
        store = Store(pool, tiers, orders, share, None if lent else spare)
        if lent:
            store.sharing.lend(spare)
        for observer in shared.observers if shared else _observers(config.engine.record, replica):
            store.observe(observer)
        undo.pop_all()
    for lower_tier in store.lower:
        lower_tier.measure()
    _announce(store, layout, said)
    return store


def paces(store: KVStore, config: Config) -> dict[str, Pace]:
    """Return the paces of this process's own tiers, by tier, chunk size and place."""
    at = {name: masked(config.value(tier.place)) for name, tier in TIERS.items()}
    at[REMOTE] = config.server.address
    size = store.pool.slot_bytes if store.pool is not None else 0
    return {f"{name} {size} {at[name]}": pace for name, pace in store.paces.items()}


def _observers(record: str | None, replica: int) -> tuple[Observer, ...]:
    if record is None:
        return ()
    folder = RecordFolder(record_folder(record, replica))
    recorder = Recorder(folder.salt)
    lane = Lane("record", 1, urgent_bound=1, bound=1)
    write_on_lane(recorder, RecordWriter(recorder, folder), lane)
    return (recorder,)


class _Lower(NamedTuple):
    name: str
    latency_s: float
    open: Callable[[], Opened]
    write_limit: int | None = None


def _lower(started: Started, layout: ChunkLayout, around: Opening, *, remote: bool) -> list[_Lower]:
    found = [
        _Lower(tier.name, own.latency_s, partial(tier.open, own, around), own.daily_writes())
        for tier, own in started.tiers
    ]
    if remote and (server := started.config.server.address):
        found.append(_Lower(REMOTE, REMOTE_LATENCY_S, partial(_remote, started, server, layout)))
    return sorted(found, key=lambda each: each.latency_s)


def _remote(started: Started, server: str, layout: ChunkLayout) -> Opened:
    from kvtier.client.remote_tier import RemoteTier

    return Opened(RemoteTier(started.access(server, layout)), _REMOTE_THREADS)


def open_tier(
    started: Started, tier: RegisteredTier, own: TierSection, layout: ChunkLayout
) -> Tier:
    rest = _at_rest(started, layout)
    return rest.sealed(tier.open(own, _around(rest, layout)).tier)


class _AtRest(NamedTuple):
    """Form of chunks in tiers that outlive this process: plain, or sealed."""

    chunk_bytes: int
    key_name: bytes = b""
    """Part of chunk names in a shared store: chunks sealed with different keys never collide."""
    sealed: Callable[[Tier], Tier] = lambda tier: tier


def _at_rest(started: Started, layout: ChunkLayout) -> _AtRest:
    key, size = started.encryption_key, layout.slot_bytes
    if key is None:
        return _AtRest(size)
    from kvtier.tiers.sealed import SealedTier, key_name, sealed_bytes

    return _AtRest(sealed_bytes(size), key_name(key), lambda tier: SealedTier(tier, key, size))


def _around(rest: _AtRest, layout: ChunkLayout) -> Opening:
    return Opening(rest.chunk_bytes, layout.fingerprint[:_NAMESPACE_BYTES] + rest.key_name)


def write_budgets(
    tiers: Sequence[tuple[RegisteredTier, TierSection]],
    lock: AbstractContextManager[object] | None = None,
) -> dict[str, WriteBudget]:
    """Make the write budgets of tiers that have a limit. Stores share them with a ``lock``."""
    return {
        tier.name: WriteBudget(limit, 0, lock)
        for tier, own in tiers
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
