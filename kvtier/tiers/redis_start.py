"""What a Redis tier asks at its start: may it work here, and what does it hold? And later: what of it is whose?"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import redis
from redis.exceptions import NoPermissionError

from kvtier.chunk import ChunkKey
from kvtier.errors import TierError
from kvtier.owner import may
from kvtier.tiers.redis_form import Form, judge
from kvtier.tiers.redis_link import FAULTS, Link, Reply, Wire

_LOG = logging.getLogger(__name__)
_SHARE_OF_MAXMEMORY = 0.9
_PROBE_MS = 1000
_SCAN_COUNT = 1000
_MOST_SCANNED = 2_000_000
_SCAN_S = 5.0
_SEARCH_S = 10.0
_ORPHAN_S = 60

Facts = Mapping[str, str]
"""What one node says of itself (INFO); empty where the user may not ask."""


def greet(link: Link, form: Form) -> list[Facts]:
    """Facts of every node, after trying there what the tier will do.

    INFO and not CONFIG GET: it tells the same two settings, and hosted Redis often forbids CONFIG. Raises FAULTS when
    the server cannot be reached now, TierError for what only the operator can mend.
    """
    probe = form.probe
    trials = [("SET", probe, b"1", "PX", _PROBE_MS), ("GET", probe), ("EXISTS", probe), ("UNLINK", probe)]
    try:
        with closing(link.wires()) as wires:
            facts = [_facts(wire.ask([("INFO",)])[0]) for wire in wires]
        _check_kind(link, facts)
        with link.wire(probe) as wire:
            replies = wire.ask(trials)
    except FAULTS as error:
        if (reason := _hopeless(error)) is not None:
            raise TierError(f"Redis tier {link.label}: {reason}") from error
        raise
    denied = [reply for reply in replies if isinstance(reply, NoPermissionError)]
    if denied:
        names = probe.decode().removesuffix("probe") + "*"
        raise TierError(
            f"Redis tier {link.label}: the user lacks a right ({denied[0]}); "
            f"allow +get +set +exists +unlink +scan +info +object|idletime on keys {names}"
        )
    return facts


def room_for(label: str, room: int, bytes_: int | None, facts: Sequence[Facts], *, ttl: bool) -> int:
    """Chunks of ``room`` bytes that our share holds; says in one line what the server's memory settings mean for them.

    ``bytes_`` None: nine tenths of ``maxmemory``. Raises TierError when that is not known, or is less than a chunk.
    """
    policies = sorted({fact["maxmemory_policy"] for fact in facts if "maxmemory_policy" in fact})
    limit = _limit(facts)
    bytes_ = share_of(label, bytes_, facts)
    if bytes_ < room:
        raise TierError(f"Redis tier {label}: {bytes_:,} bytes hold no chunk; give at least {room:,}")
    if policies:
        finding = judge(policies, limit, bytes_, ttl)
        _LOG.log(logging.INFO if finding.good else logging.WARNING,
                 "Redis tier %s: room for %d chunks (%.2f GiB); maxmemory-policy %s, maxmemory %s: %s",
                 label, bytes_ // room, bytes_ / 2**30, "/".join(policies),
                 f"{limit / 2**30:.2f} GiB" if limit else "not set", finding.text)  # fmt: skip
    return bytes_ // room


def share_of(label: str, bytes_: int | None, facts: Sequence[Facts]) -> int:
    """Bytes of its memory that are ours. Raises TierError when nobody says."""
    if bytes_ is not None:
        return bytes_
    if not _limit(facts):
        reason = "the server sets no maxmemory" if facts else "the server cannot be asked for its maxmemory now"
        raise TierError(f"Redis tier {label}: redis_bytes is not given and {reason}; give redis_bytes")
    return int(_SHARE_OF_MAXMEMORY * _limit(facts))


def _limit(facts: Sequence[Facts]) -> int:
    """All nodes' ``maxmemory``; 0 when one sets none."""
    limits = [int(fact.get("maxmemory", 0)) for fact in facts]
    return sum(limits) if all(limits) else 0


def _facts(info: Reply) -> Facts:
    if not isinstance(info, bytes):
        return {}
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _check_kind(link: Link, facts: Sequence[Facts]) -> None:
    if not link.is_cluster and any(fact.get("cluster_enabled") == "1" for fact in facts):
        raise TierError(f"Redis tier {link.label}: this is a Redis Cluster; write redis+cluster:// in redis_url")


def _hopeless(error: BaseException) -> str | None:
    """What the operator must change; None for a fault that may heal by waiting."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, redis.AuthenticationError | NoPermissionError):
            return f"login refused ({cause}); correct user and password in redis_url"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed ({cause}); give the server's CA as ?ssl_ca_certs=FILE in redis_url"
        if "cluster support disabled" in str(cause):
            return "this server is no Redis Cluster; write redis:// or rediss:// in redis_url"
        cause = cause.__cause__ or cause.__context__
    return None


def scan(
    wire: Wire, form: Form, chunk_bytes: int, stamps: dict[ChunkKey, int], clock: Callable[[], float], label: str
) -> None:
    """Stamp the chunks of one node with minus the seconds since they were last used, and take away parts that
    have had no header for a minute: their writer died."""
    until = clock() + _SCAN_S
    headless: set[ChunkKey] = set()
    for names in wire.scan(form.pattern, _SCAN_COUNT):
        ours = [(name, parsed) for name in names if (parsed := form.parse(name)) is not None]
        idle = wire.ask(("OBJECT", "IDLETIME", name) for name, _ in ours)
        for (_, (key, is_header)), seconds in zip(ours, idle, strict=True):
            if is_header:
                stamps[key] = -seconds if isinstance(seconds, int) else 0
            elif isinstance(seconds, int) and seconds > _ORPHAN_S:
                headless.add(key)
        if clock() > until or len(stamps) > _MOST_SCANNED:
            _LOG.warning(
                "Redis tier %s: only the first %d chunks were looked at in the time a start may take; the rest is "
                "found by asking", label, len(stamps),
            )  # fmt: skip
            return
    wire.ask([("UNLINK", *form.names(key, chunk_bytes)) for key in headless - stamps.keys()])


def search(wire: Wire, form: Form, owner: int | None, found: list[ChunkKey], clock: Callable[[], float]) -> bool:
    """Add the chunks of one node that ``owner`` may drop; False when there was no time for all."""
    until = clock() + _SEARCH_S
    for names in wire.scan(form.pattern, _SCAN_COUNT):
        if clock() > until:
            return False
        keys = [parsed[0] for name in names if (parsed := form.parse(name)) is not None and parsed[1]]
        headers = wire.ask(("GET", form.header_name(key)) for key in keys)
        for key, header in zip(keys, headers, strict=True):
            if may(owner, form.owner(header, key)):
                found.append(key)
    return True
