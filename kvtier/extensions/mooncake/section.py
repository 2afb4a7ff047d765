"""The keys of the tier in Mooncake's store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtier.extensions.mooncake import url as rules
from kvtier.tiers.seam import TierSection, key


@dataclass(frozen=True, kw_only=True)
class MooncakeSection(TierSection):
    name = "mooncake"
    title = "Mooncake"
    latency_s = 0.003
    medium = "P2P"
    modules = ("mooncake",)
    lmcache: ClassVar[Mapping[str, str]] = {
        "mooncakestore": "kvtier's Mooncake tier is mooncake.url, such as "
        "KVTIER_MOONCAKE_URL='mooncake://master:50051?bytes=64GiB'"
    }

    url: str | None = key(
        "url",
        "Mooncake's store, shared by hosts: mooncake://master:port?bytes=64GiB; none: no such tier",
        url=rules,
    )
