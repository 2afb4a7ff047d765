"""Every configured place for chunks, with a trial between two processes.

Nothing here makes a lasting change, and every check has a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kvtier import selftest
from kvtier.assemble import object_bytes, try_mooncake, try_objects
from kvtier.autoconfig.facts import Redis
from kvtier.autoconfig.probe.disks import probe_disk
from kvtier.autoconfig.probe.redis import probe_redis
from kvtier.checks import disk_findings
from kvtier.cli.checks.configuration import no_key
from kvtier.config.keys import Config
from kvtier.config.values import masked
from kvtier.core.errors import KVTierError
from kvtier.core.finding import Finding
from kvtier.core.terminal import size_text
from kvtier.tiers.mooncake import url as mooncake_url


def check_ram() -> Finding:
    """Reach the slots as a worker does."""
    return Finding.of(
        "self-test ram",
        selftest.try_ram(),
        "slots filled here, mapped and compared by a second process",
        (
            "workers map the pool through /proc/PID/fd: same user, /proc mounted without hidepid, "
            "memfd_create allowed"
        ),
    )


def _then_tried(
    findings: Iterable[Finding], config: Config, trial: Callable[[Config], str], do: str
) -> Iterator[Finding]:
    """The findings on a tier. When none is a fail, and what must be encrypted can be, the tier's
    self-test follows."""
    found = list(findings)
    yield from found
    if all(finding.state != "fail" for finding in found) and not no_key(config):
        yield Finding.of(
            f"self-test {found[0].check}",
            trial(config),
            "chunks written, closed, read and compared by a second process",
            do,
        )


def check_nvme(config: Config) -> Iterator[Finding]:
    if config.nvme_path:
        findings = disk_findings(config, probe_disk(config.nvme_path))
        do = f"look at the file system of {config.nvme_path} and the kernel's log (dmesg)"
        yield from _then_tried(findings, config, selftest.try_nvme, do)


def check_redis(config: Config) -> Iterator[Finding]:
    if config.redis_url:
        findings = redis_findings(config, probe_redis(config.redis_url))
        do = "look at Redis's memory (maxmemory), rights (ACL) and log"
        yield from _then_tried(findings, config, selftest.try_redis, do)


def redis_findings(config: Config, redis: Redis) -> Iterator[Finding]:
    """Whether Redis can be reached, and whether it evicts by itself. Pure."""
    where = masked(config.redis_url)
    if not redis.reachable.value:
        do = "start it, or correct redis_url"
        yield Finding("redis", "fail", f"{where}: {redis.reachable.source}", do)
        return
    limit, policy = redis.maxmemory.value, redis.policy.value or "unknown"
    seen = (
        f"{where}: maxmemory {size_text(limit) if limit else 'not set'}, maxmemory-policy {policy}"
    )
    if not limit and config.redis_bytes is None:
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
    elif (config.redis_bytes or 0) > limit:
        yield Finding(
            "redis",
            "warn",
            f"{seen}; redis_bytes is more",
            f"lower redis_bytes below {size_text(limit)}",
        )
    else:
        yield Finding("redis", "ok", seen)


def check_objects(config: Config) -> Iterator[Finding]:
    if config.object_url:
        seen = (
            f"{masked(config.object_url)}: written, read, listed and deleted; "
            f"{size_text(object_bytes(config))} are ours"
        )
        found = _reached("object", partial(try_objects, config), seen, "endpoint")
        do = "look at the bucket's policy and the engine's log"
        yield from _then_tried([found], config, selftest.try_objects, do)


def check_mooncake(config: Config) -> Iterator[Finding]:
    if config.mooncake_url:
        place = mooncake_url.parse(config.mooncake_url)
        seen = f"{place.label}: its master answers; {size_text(place.bytes_)} of its pool are ours"
        found = _reached("mooncake", partial(try_mooncake, config), seen, "master")
        do = "look at the hosts that lend memory to the pool, and at the network between"
        yield from _then_tried([found], config, selftest.try_mooncake, do)


def _reached(tier: str, look: Callable[[], str], seen: str, end: str) -> Finding:
    """Whether a store on the network can be used now. ``end``: what of it is asked."""
    try:
        return Finding.of(tier, look(), seen, f"look at the network and the {end} from here")
    except KVTierError as error:
        return Finding(tier, "fail", str(error), "correct it: no chunk is kept there before")
