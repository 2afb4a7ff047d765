"""The names for :mod:`kvtier.tiers.registry` of the tier in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kvtier.core.terminal import size_text
from kvtier.extensions.objects.plan import plan, probe
from kvtier.extensions.objects.section import ObjectSection
from kvtier.tiers.finding import Finding
from kvtier.tiers.seam import Opened, Opening, Trial, reached, then_tried

__all__ = ["SECTION", "away", "findings", "open", "plan", "probe"]

SECTION = ObjectSection
_REQUESTS = 8
"""In flight. Hides the round trip."""
_TRIAL_BYTES = 32 << 20


def open(own: ObjectSection, around: Opening) -> Opened:
    from kvtier.extensions.objects.bucket import Bucket
    from kvtier.extensions.objects.tier import ObjectTier
    from kvtier.tiers.away.object_layout import ObjectForm

    assert own.url is not None
    bucket = Bucket(own.url, around.chunk_bytes)
    form = ObjectForm(bucket.url.prefix, around.namespace)
    return Opened(ObjectTier(bucket, form, own.share, around.chunk_bytes), _REQUESTS)


def away(own: ObjectSection) -> str:
    from kvtier.extensions.objects.bucket import tried

    assert own.url is not None
    wrong = tried(own.url)
    return f"{wrong}; its chunks are misses until it can" if wrong else ""


def findings(own: ObjectSection, tried: Trial | None) -> Iterator[Finding]:
    assert own.url is not None
    seen = f"{own.url}: written, read, listed and deleted; {size_text(own.share)} are ours"
    found = reached(own.name, partial(away, own), seen, "endpoint")
    do = "look at the bucket's policy and the engine's log"
    yield from then_tried([found], tried, replace(own, bytes_=_TRIAL_BYTES), do)
