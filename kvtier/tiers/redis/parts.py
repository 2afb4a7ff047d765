"""The Redis tier's names for :mod:`kvtier.tiers.registry`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from kvtier.core.terminal import size_text
from kvtier.tiers.finding import Finding
from kvtier.tiers.redis.plan import Redis, plan, probe
from kvtier.tiers.redis.section import RedisSection
from kvtier.tiers.redis.url import safe
from kvtier.tiers.seam import Opened, Opening, Trial, then_tried

__all__ = ["SECTION", "away", "findings", "open", "plan", "probe"]

SECTION = RedisSection
_CONNECTIONS = 4
"""In use at once. Hides the network's round trip."""
_PREFIX = "kvtier"
"""First part of every Redis key, for access rules and clean-up."""
_TRIAL_BYTES = 16 << 20
_TRIAL_TTL_S = 300
"""Time after which the chunks of a killed self-test leave Redis."""


def open(own: RedisSection, around: Opening) -> Opened:
    from kvtier.tiers.redis.layout import Form
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.tier import RedisTier

    assert own.url is not None
    servers = RedisServers(
        own.url, credential_provider=own.credential_provider, connections=_CONNECTIONS
    )
    form = Form(_PREFIX, around.namespace)
    tier = RedisTier(servers, form, own.bytes_, around.chunk_bytes, ttl_s=own.ttl_s)
    return Opened(tier, _CONNECTIONS)


def away(own: RedisSection) -> str:
    """Why Redis cannot be used for now. Empty when it can. Raises ConfigError or TierError for a
    fault that waiting does not repair."""
    from kvtier.tiers.redis.errors import FAULTS
    from kvtier.tiers.redis.layout import Form
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.startup import greet, share_of

    assert own.url is not None
    servers = RedisServers(own.url, credential_provider=own.credential_provider, connections=1)
    with closing(servers):
        try:
            facts = greet(servers, Form(_PREFIX, bytes(8)))
        except FAULTS as error:
            return (
                f"redis {servers.label} cannot be reached: {error}; its chunks are misses "
                "until it can"
            )
        share_of(servers.label, own.bytes_, facts)
    return ""


def findings(own: RedisSection, tried: Trial | None) -> Iterator[Finding]:
    small = replace(own, bytes_=_TRIAL_BYTES, ttl_s=_TRIAL_TTL_S)
    do = "look at Redis's memory (maxmemory), rights (ACL) and log"
    yield from then_tried(redis_findings(own, probe(own)), tried, small, do)


def redis_findings(own: RedisSection, redis: Redis) -> Iterator[Finding]:
    """Whether Redis can be reached, and whether it evicts by itself. Pure."""
    where = safe(own.url or "") or own.url
    if not redis.reachable.value:
        do = "start it, or correct redis_url"
        yield Finding("redis", "fail", f"{where}: {redis.reachable.source}", do)
        return
    limit, policy = redis.maxmemory.value, redis.policy.value or "unknown"
    seen = (
        f"{where}: maxmemory {size_text(limit) if limit else 'not set'}, maxmemory-policy {policy}"
    )
    if not limit and own.bytes_ is None:
        yield Finding(
            "redis",
            "fail",
            seen,
            "set redis_bytes, or maxmemory in Redis: without both no size is safe",
        )
    elif policy != "noeviction":
        do = (
            "CONFIG SET maxmemory-policy noeviction: kvtier evicts the end of a prompt first, "
            "Redis cannot know it"
        )
        yield Finding("redis", "warn", seen, do)
    elif not limit:
        yield Finding(
            "redis", "warn", seen, "set maxmemory: Redis may otherwise outgrow its machine"
        )
    elif (own.bytes_ or 0) > limit:
        yield Finding(
            "redis",
            "warn",
            f"{seen}; redis_bytes is more",
            f"lower redis_bytes below {size_text(limit)}",
        )
    else:
        yield Finding("redis", "ok", seen)
