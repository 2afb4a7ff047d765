"""A Redis server, cluster or Sentinel."""

from __future__ import annotations

from kvtier.autoconfig.facts import Redis
from kvtier.core.fact import known, unknown


def probe_redis(url: str) -> Redis:
    """One INFO of every node, with at most a second to connect and one to answer. Memory is that of
    all primaries together. Raises ConfigError for text that is not a Redis URL, without showing
    it."""
    from kvtier.tiers.redis.errors import FAULTS
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.startup import hopeless, limit_of, node_facts, wrong_kind
    from kvtier.tiers.redis.url import parse

    servers = RedisServers(url, connections=1)
    local = parse(url).local
    try:
        facts = node_facts(servers)
        wrong = wrong_kind(servers, facts)
    except FAULTS as error:
        wrong = hopeless(error) or str(error)
    finally:
        servers.close()
    if wrong is not None:
        return Redis(url, reachable=known(False, wrong), local=local)
    source = f"INFO of {servers.label}" + (f", {len(facts)} nodes" if len(facts) > 1 else "")
    used = [fact.used for fact in facts if fact.used is not None]
    limit = limit_of(facts)
    policies = {fact.policy for fact in facts if fact.policy is not None}
    untold = f"{source} does not tell it"
    return Redis(
        url,
        reachable=known(True, source),
        maxmemory=unknown(untold) if limit is None else known(limit, source),
        used=known(sum(used), source) if len(used) == len(facts) else unknown(untold),
        policy=known(" and ".join(sorted(policies)), source) if policies else unknown(untold),
        local=local,
    )
