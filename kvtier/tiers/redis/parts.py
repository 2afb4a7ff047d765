"""Parts: the Redis tier's names for :mod:`kvtier.tiers.registry`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar

from kvtier.core.fact import UNSEEN, Fact, known, or_assumed, rate, unknown
from kvtier.core.terminal import size_text
from kvtier.tiers import seam
from kvtier.tiers.redis import url as rules
from kvtier.tiers.redis.url import parse, safe


@dataclass(frozen=True, kw_only=True)
class RedisSection(seam.TierSection):
    name = "redis"
    title = "Redis"
    latency_s = 0.002
    medium = "P2P"
    removed: ClassVar[Mapping[str, str]] = {
        "threads": "there are four connections",
        "prefix": "every Redis key begins with 'kvtier'; namespace keeps tenants apart",
    }

    url: str | None = seam.key(
        "url",
        "Redis, a cluster or Sentinel, shared by hosts; none: no such tier",
        url=rules,
        planned="given",
        flag="Redis for the shared tier",
    )
    credential_provider: str | None = seam.key(
        "object",
        "dotted path of what gives user and password at each login, as redis-py's; none: redis.url",
        needs="url",
    )
    bytes_: int | None = seam.key(
        "bytes",
        "our share of its memory; none: what its maxmemory allows",
        needs="url",
        planned="measured",
    )
    ttl_s: int | None = seam.key(
        "s", "chunks leave Redis after this time; none: when kvtier needs the room", needs="url"
    )


_MIB = 1 << 20
_BLOCK_BYTES = 4 * _MIB
_FREE_PARTS = 8
"""Trial values that must fit into the free room: so one takes at most 1/8 of it."""
_FREE_SHARE = 0.9
"""Part of the free memory. The rest is for Redis's overhead and fragmentation."""


@dataclass(frozen=True, slots=True)
class Redis(seam.TierFacts):
    url: str
    reachable: Fact[bool] = UNSEEN
    maxmemory: Fact[int] = UNSEEN
    """Bytes, or 0 for no limit."""
    used: Fact[int] = UNSEEN
    policy: Fact[str] = UNSEEN
    local: bool = False
    speed: Fact[float] = UNSEEN
    """Bytes a second: the slower of SET and GET of large values."""
    credential_provider: str | None = None
    away: bool = False
    """Whether Redis does not answer, and waiting may mend that."""

    @property
    def host_bytes(self) -> int | None:
        if not self.local or not self.maxmemory.value:
            return None
        return max(0, self.maxmemory.value - (self.used.value or 0))

    def measured(self, seconds: float) -> Redis:
        return replace(self, speed=_speed(self, seconds)) if self.reachable.value else self


def probe(own: RedisSection) -> Redis:
    """Return facts from one INFO of every node, with at most a second to connect and one to answer.
    Memory is the sum of all primaries. Raises ConfigError, which does not show the text, for a text
    that is no Redis URL."""
    from kvtier.tiers.redis.errors import FAULTS
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.startup import hopeless, limit_of, node_facts

    assert own.url is not None
    url = own.url
    servers = RedisServers(url, credential_provider=own.credential_provider, connections=1)
    redis = Redis(url, local=parse(url).local, credential_provider=own.credential_provider)
    try:
        facts = node_facts(servers)
    except FAULTS as error:
        wrong = hopeless(error)
        return replace(redis, reachable=known(False, wrong or str(error)), away=wrong is None)
    finally:
        servers.close()
    source = f"INFO of {servers.label}" + (f", {len(facts)} nodes" if len(facts) > 1 else "")
    used = [fact.used for fact in facts if fact.used is not None]
    limit = limit_of(facts)
    policies = {fact.policy for fact in facts if fact.policy is not None}
    untold = f"{source} does not tell it"
    return replace(
        redis,
        reachable=known(True, source),
        maxmemory=unknown(untold) if limit is None else known(limit, source),
        used=known(sum(used), source) if len(used) == len(facts) else unknown(untold),
        policy=known(" and ".join(sorted(policies)), source) if policies else unknown(untold),
    )


def _speed(redis: Redis, seconds: float) -> Fact[float]:
    from kvtier.tiers.redis.errors import FAULTS, RefusedError, WrongSizeError
    from kvtier.tiers.redis.servers import RedisServers

    room = (redis.maxmemory.value or 1 << 62) - (redis.used.value or 0)
    if room < _FREE_PARTS * _BLOCK_BYTES:
        return unknown("Redis is too full to try")
    name, provider = f"kvtier:probe:{os.getpid()}".encode(), redis.credential_provider
    value, timeout_s = memoryview(bytearray(os.urandom(_BLOCK_BYTES))), max(0.2, seconds)
    servers = RedisServers(
        redis.url, credential_provider=provider, connections=1, timeout_s=timeout_s
    )

    def put(_: int) -> int:
        with servers.wire(name) as wire:
            refusal = wire.put([(name, value)], 60_000)
        if refusal is not None:
            raise refusal
        return _BLOCK_BYTES

    def get(_: int) -> int:
        with servers.wire(name) as wire:
            return sum(memory.nbytes for memory in wire.get([name], [value]))

    try:
        rates = [rate(one, seconds / 2, 64) for one in (put, get)]
        with servers.wire(name) as wire:
            wire.ask([("UNLINK", name)])
    except (*FAULTS, RefusedError, WrongSizeError) as error:
        return unknown(f"Redis trial failed: {error}")
    finally:
        servers.close()
    return known(min(rates), "measured, one connection, 4 MiB values")


def plan(redis: Redis | None, draft: seam.Draft) -> None:
    if redis is None:
        return draft.leave_out(seam.NO_URL)
    if redis.away:
        reason = f"away now ({redis.reachable.source}): its room is 0 until it says how much it has"
        return draft.set("redis_url", redis.url, "given", reason)
    if not redis.reachable.value:
        return draft.leave_out(f"cannot be used ({redis.reachable.source})")
    if not redis.maxmemory.value:
        text = "it has no maxmemory"
        if redis.maxmemory.value is None:
            text = f"its maxmemory is unknown ({redis.maxmemory.source})"
        return draft.leave_out(f"{text}, so no size is safe: set maxmemory, or redis_bytes by hand")
    used = draft.take(
        "redis_used_bytes", redis.used, redis.maxmemory.value // 2, "assumed half full"
    )
    size = int(max(0, redis.maxmemory.value - used) * _FREE_SHARE) // draft.stores
    size -= size % _MIB
    if short := draft.too_small(size):
        return draft.leave_out(
            f"{short} ({size_text(used)} of {size_text(redis.maxmemory.value)} used)"
        )
    if not draft.pays(or_assumed(redis.speed, 0.8e9, "Redis")):
        return None
    if "random" in (redis.policy.value or ""):
        draft.warn(
            f"Redis policy {redis.policy.value} evicts at random: set noeviction, kvtier evicts"
        )
    draft.set("redis_url", redis.url, "given", redis.reachable.source)
    reason = f"0.9 of what is left; {size // draft.kv_bytes:,} tokens"
    draft.set("redis_bytes", size, redis.maxmemory.source, reason)
    return None


SECTION = RedisSection
_CONNECTIONS = 4
"""Connections to a node, and so calls at once. Several hide the network's round trip."""
_PREFIX = "kvtier"
_TRIAL_BYTES = 16 << 20
_TRIAL_TTL_S = 300
"""Time after which chunks that a killed self-test leaves expire."""


def open(own: RedisSection, around: seam.Opening) -> seam.Opened:
    from kvtier.tiers.redis.layout import Form
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.tier import RedisTier

    assert own.url is not None
    servers = RedisServers(
        own.url, credential_provider=own.credential_provider, connections=_CONNECTIONS
    )
    form = Form(_PREFIX, around.namespace)
    tier = RedisTier(servers, form, own.bytes_, around.chunk_bytes, ttl_s=own.ttl_s)
    return seam.Opened(tier, _CONNECTIONS)


def away(own: RedisSection) -> str:
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


def findings(own: RedisSection, tried: seam.Trial | None) -> Iterator[seam.Finding]:
    small = replace(own, bytes_=_TRIAL_BYTES, ttl_s=_TRIAL_TTL_S)
    do = "look at Redis's memory (maxmemory), rights (ACL) and log"
    yield from seam.then_tried(redis_findings(own, probe(own)), tried, small, do)


def redis_findings(own: RedisSection, redis: Redis) -> Iterator[seam.Finding]:
    where = safe(own.url or "") or own.url
    if not redis.reachable.value:
        do = "start it, or correct redis_url"
        yield seam.Finding("redis", "fail", f"{where}: {redis.reachable.source}", do)
        return
    limit, policy = redis.maxmemory.value, redis.policy.value or "unknown"
    most = size_text(limit) if limit else "not set"
    seen = f"{where}: maxmemory {most}, maxmemory-policy {policy}"
    if not limit and own.bytes_ is None:
        do = "set redis_bytes, or maxmemory in Redis: without both no size is safe"
        yield seam.Finding("redis", "fail", seen, do)
    elif policy != "noeviction":
        do = (
            "CONFIG SET maxmemory-policy noeviction: kvtier evicts the end of a prompt first, "
            "Redis cannot know it"
        )
        yield seam.Finding("redis", "warn", seen, do)
    elif not limit:
        yield seam.Finding(
            "redis", "warn", seen, "set maxmemory: Redis may otherwise outgrow its machine"
        )
    elif (own.bytes_ or 0) > limit:
        do = f"lower redis_bytes below {size_text(limit)}"
        yield seam.Finding("redis", "warn", f"{seen}; redis_bytes is more", do)
    else:
        yield seam.Finding("redis", "ok", seen)
