"""The keys of the Redis tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtier.tiers.redis import url as rules
from kvtier.tiers.seam import TierSection, key


@dataclass(frozen=True, kw_only=True)
class RedisSection(TierSection):
    name = "redis"
    title = "Redis"
    latency_s = 0.002
    medium = "P2P"
    removed: ClassVar[Mapping[str, str]] = {
        "threads": "there are four connections",
        "prefix": "every Redis key begins with 'kvtier'; namespace keeps tenants apart",
    }

    url: str | None = key(
        "url",
        "Redis, a cluster or Sentinel, shared by hosts; none: no such tier",
        url=rules,
        planned="given",
        flag="Redis for the shared tier",
    )
    credential_provider: str | None = key(
        "object",
        "dotted path of what gives user and password at each login, as redis-py's; none: redis.url",
        needs="url",
    )
    bytes_: int | None = key(
        "bytes",
        "our share of its memory; none: what its maxmemory allows",
        needs="url",
        planned="measured",
    )
    ttl_s: int | None = key(
        "s", "chunks leave Redis after this time; none: when kvtier needs the room", needs="url"
    )
