"""The names for :mod:`kvtier.tiers.registry` of the tier in Mooncake's store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvtier.core.terminal import size_text
from kvtier.extensions.mooncake import url
from kvtier.extensions.mooncake import url as rules
from kvtier.tiers import seam


@dataclass(frozen=True, kw_only=True)
class MooncakeSection(seam.TierSection):
    name = "mooncake"
    title = "Mooncake"
    latency_s = 0.003
    medium = "P2P"
    modules = ("mooncake",)
    lmcache: ClassVar[Mapping[str, str]] = {
        "mooncakestore": "kvtier's Mooncake tier is mooncake.url, such as "
        "KVTIER_MOONCAKE_URL='mooncake://master:50051?bytes=64GiB'"
    }

    url: str | None = seam.key(
        "url",
        "Mooncake's store, shared by hosts: mooncake://master:port?bytes=64GiB; none: no such tier",
        url=rules,
    )


SECTION = MooncakeSection
_CALLS = 4
"""Most calls at once. Each has memory for one chunk."""


def open(own: MooncakeSection, around: seam.Opening) -> seam.Opened:
    from kvtier.extensions.mooncake.tier import MooncakeStore, MooncakeTier
    from kvtier.tiers.away.whole_objects import ObjectForm

    assert own.url is not None
    store = MooncakeStore(own.url, around.chunk_bytes, _CALLS)
    return seam.Opened(
        MooncakeTier(store, ObjectForm("", around.namespace), around.chunk_bytes), _CALLS
    )


def away(own: MooncakeSection) -> str:
    from kvtier.extensions.mooncake.tier import MooncakeError, MooncakeStore

    assert own.url is not None
    with closing(MooncakeStore(own.url, 1, 1)) as store:
        try:
            store.greet()
        except MooncakeError as error:
            return f"{store.label}: {error}; its chunks are misses until it can be reached"
    return ""


def probe(_own: MooncakeSection) -> seam.TierFacts:
    return seam.TierFacts()


def findings(own: MooncakeSection, tried: seam.Trial | None) -> Iterator[seam.Finding]:
    assert own.url is not None
    place = url.parse(own.url)
    seen = f"{place.label}: its master answers; {size_text(place.bytes_)} of its pool are ours"
    found = seam.reached(own.name, partial(away, own), seen, "master")
    do = "look at the hosts that lend memory to the pool, and at the network between"
    yield from seam.then_tried([found], tried, own, do)


def plan(_found: seam.TierFacts | None, _draft: seam.Draft) -> None:
    """Plan nothing: the URL has the size."""
