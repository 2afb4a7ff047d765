"""Startup: questions of a Redis tier at its start, and the search for a tenant's chunks.

No answer of a server is believed to be well formed: one that makes no sense is as good as none."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import TierError
from kvtier.core.tenant import UNOWNED, may
from kvtier.core.terminal import size_text
from kvtier.tiers.redis.errors import FAULTS, RefusedError, SetupError
from kvtier.tiers.redis.layout import Form, check_settings
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.wire import INFO, Reply, Wire

_LOG = logging.getLogger(__name__)
_MAXMEMORY_SHARE = 0.9
_PROBE_MS = 1000
_FACTS_S = 5.0
SCAN_S = 5.0
_SEARCH_S = 10.0
ALL_SCANNED_S = 4 * SCAN_S
ALL_SEARCHED_S = 4 * _SEARCH_S
_WORD = re.compile("[a-z-]{1,32}")
_RIGHTS = (
    "+get +getrange +set +exists +unlink +sadd +srem +srandmember +pexpire +scan +info "
    "+object|idletime"
)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts in one node's INFO. None if missing, or in no form that makes sense."""

    maxmemory: int | None = None
    """Bytes, or 0 for no limit."""
    used: int | None = None
    policy: str | None = None
    cluster: bool = False


def node_facts(servers: RedisServers) -> list[NodeFacts]:
    """Return the facts of every node that takes writes, by INFO: hosted Redis often forbids CONFIG
    GET. Raises FAULTS, also when all nodes together take too long, and when URL and server disagree
    about a cluster."""
    with closing(servers.wires(_FACTS_S)) as wires:
        facts = [facts_of(wire.ask([("INFO",)], INFO)[0]) for wire in wires]
    if servers.kind != "cluster" and any(fact.cluster for fact in facts):
        raise SetupError("this is a node of a Redis Cluster; write redis+cluster:// in redis_url")
    return facts


def greet(servers: RedisServers, form: Form) -> list[NodeFacts]:
    """Return the facts of every node, after a trial of everything that the tier will do.

    Raises FAULTS when the server cannot be reached now, TierError for what only the operator can
    mend."""
    probe = form.probe
    trials = [
        ("SET", probe, b"1", "PX", _PROBE_MS),
        ("GET", probe),
        ("GETRANGE", probe, 0, 1),
        ("EXISTS", probe),
        ("UNLINK", probe),
        ("SADD", probe, b"1"),
        ("PEXPIRE", probe, _PROBE_MS),
        ("SREM", probe, b"1"),
    ]
    try:
        facts = node_facts(servers)
        with servers.wire(probe) as wire:
            replies = wire.ask(trials)
    except FAULTS as error:
        if (reason := hopeless(error)) is not None:
            raise TierError(f"Redis tier {servers.label}: {reason}") from error
        raise
    for reply in replies:
        if isinstance(reply, RefusedError) and reply.code == "NOPERM":
            names = probe.decode().removesuffix("probe") + "*"
            more = " +cluster|slots" if servers.kind == "cluster" else ""
            raise TierError(
                f"Redis tier {servers.label}: the user lacks a right ({reply}); allow "
                f"{_RIGHTS}{more} on keys {names}"
            )
    return facts


def room_for(
    label: str, room: int, bytes_: int | None, facts: Sequence[NodeFacts], *, ttl: bool
) -> int:
    """Return how many chunks of ``room`` bytes our share holds. Logs what the server's memory
    settings mean. ``bytes_`` None: nine tenths of ``maxmemory``, or 0 without ``facts`` (the server
    is away). Raises TierError when ``maxmemory`` is needed and not set, or our share is less than a
    chunk."""
    if bytes_ is None and not facts:
        return 0
    policies = sorted({fact.policy for fact in facts if fact.policy is not None})
    limit = limit_of(facts) or 0
    bytes_ = share_of(label, bytes_, facts)
    if bytes_ < room:
        raise TierError(
            f"Redis tier {label}: {bytes_:,} bytes hold no chunk; give at least {room:,}"
        )
    if policies:
        good, why = check_settings(policies, limit, bytes_, ttl)
        _LOG.log(
            logging.INFO if good else logging.WARNING,
            "Redis tier %s: room for %d chunks (%.2f GiB); maxmemory-policy %s, maxmemory %s, of "
            "which %s are used: %s",
            label,
            bytes_ // room,
            bytes_ / 2**30,
            "/".join(policies),
            f"{limit / 2**30:.2f} GiB" if limit else "not set",
            size_text(used_of(facts)),
            why,
        )
    return bytes_ // room


def share_of(label: str, bytes_: int | None, facts: Sequence[NodeFacts]) -> int:
    """Return our bytes of the server's memory. Raises TierError when they stay unknown."""
    if bytes_ is not None:
        return bytes_
    if not (limit := limit_of(facts)):
        raise TierError(
            f"Redis tier {label}: redis_bytes is not given and the server sets no maxmemory; give "
            "redis_bytes"
        )
    return int(_MAXMEMORY_SHARE * limit)


def limit_of(facts: Iterable[NodeFacts]) -> int | None:
    """Return ``maxmemory`` of all nodes together: 0 if one has no limit, None if unknown."""
    limits = [fact.maxmemory for fact in facts]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits) or not known:
        return None
    return sum(known) if all(known) else 0


def used_of(facts: Iterable[NodeFacts]) -> int:
    return sum(fact.used or 0 for fact in facts)


def facts_of(info: Reply) -> NodeFacts:
    if not isinstance(info, bytes):
        return NodeFacts()
    lines = info.decode(errors="replace").splitlines()
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    policy = told.get("maxmemory_policy", "")
    return NodeFacts(
        maxmemory=_size(told.get("maxmemory", "")),
        used=_size(told.get("used_memory", "")),
        policy=policy if _WORD.fullmatch(policy) else None,
        cluster=told.get("cluster_enabled") == "1",
    )


def _size(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def hopeless(error: BaseException) -> str | None:
    """Return what the operator must change, or None for a fault that waiting may heal."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SetupError):
            return str(cause)
        # A connection that ends within the handshake may be a proxy's whose Redis is away.
        cut = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if isinstance(cause, ssl.SSLError) and not cut:
            return f"TLS failed ({cause}); give the server's CA as ?ssl_ca_certs=FILE in redis_url"
        cause = cause.__cause__ or cause.__context__
    return None


def search(
    wire: Wire, form: Form, owner: int | None, found: list[ChunkKey], clock: Callable[[], float]
) -> bool:
    """Add one node's chunks that ``owner`` may drop to ``found``. Returns whether all were seen."""
    until, whole = clock() + _SEARCH_S, True
    for names in wire.scan(form.pattern):
        if clock() > until:
            return False
        keys = [
            parsed[0] for name in names if (parsed := form.parse(name)) is not None and parsed[1]
        ]
        headers = wire.ask(("GET", form.header_name(key)) for key in keys)
        for key, header in zip(keys, headers, strict=True):
            whose = form.owner(header, key)
            if may(owner, whose, shared=True):
                found.append(key)
            elif header is not None and whose == UNOWNED:
                whole = False
    return whole
