"""The names for :mod:`kvtier.tiers.registry` of the tier in a bucket."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.extras import require
from kvtier.core.fact import UNSEEN, Fact, known, or_assumed, unknown
from kvtier.core.lanes import Lane
from kvtier.core.terminal import size_text
from kvtier.extensions.objects import url as rules
from kvtier.extensions.objects.url import parse
from kvtier.tiers import seam

DEFAULT_BYTES = 256 << 30


@dataclass(frozen=True, kw_only=True)
class ObjectSection(seam.TierSection):
    name = "object"
    title = "the bucket"
    latency_s = 0.1
    modules = ("obstore",)
    removed: ClassVar[Mapping[str, str]] = {"threads": "there are eight requests in flight"}
    lmcache: ClassVar[Mapping[str, str]] = {
        "s3": "kvtier's bucket tier is object.url, such as KVTIER_OBJECT_URL=s3://bucket/prefix, "
        "with credentials and region from the environment"
    }

    url: str | None = seam.key(
        "url",
        "bucket that hosts share: s3://, gs:// or az://; none: no such tier",
        url=rules,
        planned="given",
        flag="bucket for the tier that outlives all hosts",
    )
    bytes_: int | None = seam.key(
        "bytes",
        "our share of the bucket; none: 256 GiB",
        needs="url",
        planned="given",
        flag="our share of that bucket (default: 256GiB)",
    )

    @property
    def share(self) -> int:
        return self.bytes_ or DEFAULT_BYTES

    def decided(self) -> dict[str, int]:
        return {"bytes_": self.share}


_BLOCK_BYTES = 4 << 20
_REQUESTS = 8
"""Most requests that a tier makes at once."""
_TRIALS = 3
_USUAL_BYTES_S, _USUAL_LATENCY_S = 0.68e9, 0.1
"""Pace and latency of S3 by Amazon: eight requests of 85 MB/s, 100 to 200 ms to the first byte."""
_FIRST_REQUESTS = 9
"""Requests until the first chunk is there: eight find a run of 128 chunks, one reads."""


@dataclass(frozen=True, slots=True)
class ObjectStore(seam.TierFacts):
    url: str
    bytes_: Fact[int] = UNSEEN
    reachable: Fact[bool] = UNSEEN
    speed: Fact[float] = UNSEEN
    """Bytes a second of :data:`_REQUESTS` large gets at once."""
    latency: Fact[float] = UNSEEN
    away: bool = False
    """Whether the bucket does not answer now, and may do so later."""

    def measured(self, seconds: float) -> ObjectStore:
        """Measure the latency of a small request, and the pace of eight gets of 4 MiB at once."""
        return _timed(self, seconds) if self.reachable.value else self


def probe(own: ObjectSection) -> ObjectStore:
    """Try each kind of request once. Raises ConfigError, without the URL, if that is no store's."""
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

    bucket, moved = Bucket(store.url, _BLOCK_BYTES), list[int]()
    name = "/".join(filter(None, (bucket.url.prefix, f"kvtier-probe-{os.urandom(8).hex()}")))
    asked = []

    def get() -> None:
        with suppress(*FAULTS):
            while (
                time.perf_counter() < until
                and (found := bucket.get(name, _BLOCK_BYTES)) is not None
            ):
                moved.append(found.nbytes)

    try:
        bucket.put(name, [os.urandom(_BLOCK_BYTES)])
        for _ in range(_TRIALS):
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
        latency=known(statistics.median(asked), f"measured, {_TRIALS} requests"),
    )


def plan(store: ObjectStore | None, draft: seam.Draft) -> None:
    if store is None:
        return draft.leave_out(seam.NO_URL)
    if not store.reachable.value and not store.away:
        return draft.leave_out(f"cannot be used ({store.reachable.source})")
    given = store.bytes_.value is not None
    size = store.bytes_.value or DEFAULT_BYTES
    if short := draft.too_small(size):
        return draft.leave_out(f"{short}; give more object_bytes")
    speed = or_assumed(store.speed, _USUAL_BYTES_S, "a bucket in this region")
    latency = or_assumed(store.latency, _USUAL_LATENCY_S, "a bucket in this region")
    reason = f"one request; the first chunk comes after up to {_FIRST_REQUESTS} of them"
    draft.show("object_latency_ms", round((latency.value or 0.0) * 1e3, 1), latency.source, reason)
    wait = _FIRST_REQUESTS * (latency.value or 0.0)
    if not draft.pays(speed, wait):
        return None
    told = store.reachable.source
    draft.set("object_url", store.url, "given", f"away now ({told})" if store.away else told)
    reason = f"{size // draft.kv_bytes:,} tokens; a bucket has no size of its own"
    draft.set("object_bytes", size, store.bytes_.source if given else "default", reason)
    return None


SECTION = ObjectSection
_TRIAL_BYTES = 32 << 20


def open(own: ObjectSection, around: seam.Opening) -> seam.Opened:
    from kvtier.extensions.objects.bucket import Bucket
    from kvtier.extensions.objects.tier import ObjectTier
    from kvtier.tiers.away.whole_objects import ObjectForm

    assert own.url is not None
    bucket = Bucket(own.url, around.chunk_bytes)
    form = ObjectForm(bucket.url.prefix, around.namespace)
    return seam.Opened(ObjectTier(bucket, form, own.share, around.chunk_bytes), _REQUESTS)


def away(own: ObjectSection) -> str:
    from kvtier.extensions.objects.bucket import tried

    assert own.url is not None
    wrong = tried(own.url)
    return f"{wrong}; its chunks are misses until it can" if wrong else ""


def findings(own: ObjectSection, tried: seam.Trial | None) -> Iterator[seam.Finding]:
    assert own.url is not None
    seen = f"{own.url}: written, read, listed and deleted; {size_text(own.share)} are ours"
    found = seam.reached(own.name, partial(away, own), seen, "endpoint")
    do = "look at the bucket's policy and the engine's log"
    yield from seam.then_tried([found], tried, replace(own, bytes_=_TRIAL_BYTES), do)
