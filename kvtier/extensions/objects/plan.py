"""Auto-config of a bucket: its facts, and the keys that follow."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.extras import require
from kvtier.core.fact import UNSEEN, Fact, known, or_assumed, unknown
from kvtier.core.lanes import Lane
from kvtier.extensions.objects.section import DEFAULT_BYTES, ObjectSection
from kvtier.extensions.objects.url import parse
from kvtier.tiers.seam import NO_URL, Draft, TierFacts

_BLOCK = 4 << 20
_REQUESTS = 8
"""At once, as a tier makes them."""
_ASKED = 3
_SPEED, _LATENCY = 0.68e9, 0.1
"""Amazon's figures of S3: 85 to 90 MB/s a request, of which a tier makes eight at once, and 100 to
200 ms until the first byte of each."""
_BEFORE_FIRST = 9
"""One after the other before a chunk comes: eight find a run of 128 chunks, one reads."""


@dataclass(frozen=True, slots=True)
class ObjectStore(TierFacts):
    """A bucket, with the prefix that is ours."""

    url: str
    bytes_: Fact[int] = UNSEEN
    """Our share of it, where one was given."""
    reachable: Fact[bool] = UNSEEN
    speed: Fact[float] = UNSEEN
    """Of as many gets of large objects at once as a tier makes."""
    latency: Fact[float] = UNSEEN
    """Seconds of one request."""
    away: bool = False
    """True when the bucket does not answer now, and waiting may mend that."""

    def measured(self, seconds: float) -> ObjectStore:
        """The time of a request that moves nothing, and eight gets of 4 MiB at once. One object,
        which is deleted."""
        return _timed(self, seconds) if self.reachable.value else self


def probe(own: ObjectSection) -> ObjectStore:
    """Try once what a tier does with a bucket. Raises ConfigError for text that is no URL of an
    object store, without showing it."""
    assert own.url is not None
    url, bytes_, label = own.url, own.bytes_, parse(own.url).label
    away = False
    try:
        require(own.name, own.modules)
        from kvtier.extensions.objects.bucket import tried

        away = bool(wrong := tried(url))
    except (ConfigError, TierError) as error:
        wrong = str(error)
    what = f"{label}: written, read, listed and deleted"
    return ObjectStore(
        url,
        unknown("no object_bytes was given") if bytes_ is None else known(bytes_, "given"),
        known(not wrong, wrong or what),
        unknown("not measured"),
        unknown("not measured"),
        away,
    )


def _timed(store: ObjectStore, seconds: float) -> ObjectStore:
    from kvtier.extensions.objects.bucket import FAULTS, Bucket, words

    bucket, moved = Bucket(store.url, _BLOCK), list[int]()
    name = "/".join(filter(None, (bucket.url.prefix, f"kvtier-probe-{os.urandom(8).hex()}")))
    asked = []

    def get() -> None:
        with suppress(*FAULTS):
            while time.perf_counter() < until and (found := bucket.get(name, _BLOCK)) is not None:
                moved.append(found.nbytes)

    try:
        bucket.put(name, [os.urandom(_BLOCK)])
        for _ in range(_ASKED):
            begun = time.perf_counter()
            bucket.has(name)
            asked.append(time.perf_counter() - begun)
        lane = Lane("probe", _REQUESTS, urgent_bound=1, bound=_REQUESTS)
        begun = time.perf_counter()
        until = begun + seconds / 2
        for _ in range(_REQUESTS):
            lane.submit(get)
        lane.close(10 * seconds)
        took = time.perf_counter() - begun
    except FAULTS as error:
        failed: Fact[float] = unknown(f"trial failed: {words(error)}")
        return replace(store, speed=failed, latency=failed)
    finally:
        with suppress(*FAULTS):
            bucket.delete([name])
        bucket.close()
    speed = known(sum(moved) / took, f"measured, {_REQUESTS} gets of 4 MiB at once")
    return replace(
        store,
        speed=speed if moved else unknown("trial failed: no get ended"),
        latency=known(statistics.median(asked), f"measured, {_ASKED} requests"),
    )


def plan(store: ObjectStore | None, draft: Draft) -> None:
    if store is None:
        return draft.leave_out(NO_URL)
    if not store.reachable.value and not store.away:
        return draft.leave_out(f"cannot be used ({store.reachable.source})")
    given = store.bytes_.value is not None
    size = store.bytes_.value or DEFAULT_BYTES
    if short := draft.too_small(size):
        return draft.leave_out(f"{short}; give more object_bytes")
    speed = or_assumed(store.speed, _SPEED, "a bucket in this region")
    latency = or_assumed(store.latency, _LATENCY, "a bucket in this region")
    draft.show(
        "object_latency_ms",
        round((latency.value or 0.0) * 1e3, 1),
        latency.source,
        f"one request; the first chunk comes after up to {_BEFORE_FIRST} of them",
    )
    wait = _BEFORE_FIRST * (latency.value or 0.0)
    if not draft.pays(speed, wait):
        return None
    told = store.reachable.source
    draft.set("object_url", store.url, "given", f"away now ({told})" if store.away else told)
    draft.set(
        "object_bytes",
        size,
        store.bytes_.source if given else "default",
        f"{size // draft.kv_bytes:,} tokens; a bucket has no size of its own",
    )
    return None
