"""An engine whose workers are on several hosts: what lies where, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvtier.config.keys import ServerSection
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.layout import UNSHARED, ContextRanks, narrowed, parts_of
from kvtier.connectors.vllm.metadata import Parts, RankLayout
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError, LayoutError


class HostsOf(NamedTuple):
    """The hosts of an engine. vLLM numbers ranks host by host, and each host has as many."""

    number: int
    ranks: int

    @classmethod
    def of(cls, parallel: Any) -> HostsOf:
        number = int(parallel.nnodes_within_dp)  # other ranks of data parallelism are other engines
        return cls(number, int(parallel.world_size) // number)

    def of_rank(self, rank: int) -> int:
        return rank // self.ranks


def refuse(parallel: Any, server: ServerSection, *, spans: bool) -> None:
    """Raises ConfigError without a server for each host, and for what one host alone can keep."""
    count, servers = HostsOf.of(parallel).number, server.addresses
    if count == 1:
        if len(servers) > 1:
            raise ConfigError(
                f"server_address names {len(servers)} servers ({server.address}), and this engine "
                "has one host: expected one address"
            )
        return
    where = f"nnodes={parallel.nnodes}: this engine's workers are on {count} hosts"
    if len(servers) != count or not servers[0].startswith("unix://"):
        raise ConfigError(
            f"{where}, expected a kvtier server on each of them. server_address names "
            f"{len(servers)} ({server.address or 'none'}): set it to {count} addresses in the "
            "order of --node-rank, first unix:///path/kvtier.sock, where each host's own server "
            "is, then tcp://host:port of the servers on the other hosts (deploy/multi-host)"
        )
    if local := [one for one in servers[1:] if one.startswith("unix://")]:
        raise ConfigError(
            f"server_address: {local[0]} is on this host, expected tcp://host:port of the server "
            "on another one. Only the first address is the socket on each worker's own host"
        )
    if ContextRanks.of(parallel) != UNSHARED:
        raise LayoutError(
            f"{where}, which kvtier does not keep with context parallelism. Set "
            "decode_context_parallel_size and prefill_context_parallel_size to 1"
        )
    if spans:
        raise ConfigError(f"{where}: spans=true is for engines on one host. Remove it")


def by_host(
    whole: ChunkLayout,
    geometry: Geometry,
    ranks: Mapping[tuple[int, int], RankLayout],
    hosts: HostsOf,
    *,
    replicated: bool,
) -> tuple[list[ChunkLayout], Parts]:
    """The layout of each host's chunks, with the parts of its own ranks alone, and where the parts
    of all ranks lie. ``whole``: the layout of one host that has all of them."""
    layouts, parts = list[ChunkLayout](), list[Any]()
    for host, own in enumerate(of_each(ranks, hosts)):
        sizes, owners = parts_of(geometry, own, replicated=replicated)
        named = narrowed(whole, {"host": host, "hosts": hosts.number})
        layouts.append(replace(named, rank_block_bytes=sizes))
        parts += owners
    return layouts, tuple(parts)


def of_each(
    ranks: Mapping[tuple[int, int], RankLayout], hosts: HostsOf
) -> Sequence[dict[tuple[int, int], RankLayout]]:
    found: list[dict[tuple[int, int], RankLayout]] = [{} for _ in range(hosts.number)]
    for number, (place, rank) in enumerate(sorted(ranks.items())):
        found[hosts.of_rank(number)][place] = rank
    return found
