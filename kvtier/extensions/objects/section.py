"""The keys of the tier in a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtier.extensions.objects import url as rules
from kvtier.tiers.seam import TierSection, key

DEFAULT_BYTES = 256 << 30
"""When a URL but no size was given: a bucket has no size of its own."""


@dataclass(frozen=True, kw_only=True)
class ObjectSection(TierSection):
    name = "object"
    title = "the bucket"
    latency_s = 0.1
    modules = ("obstore",)
    removed: ClassVar[Mapping[str, str]] = {"threads": "there are eight requests in flight"}
    lmcache: ClassVar[Mapping[str, str]] = {
        "s3": "kvtier's bucket tier is object.url, such as KVTIER_OBJECT_URL=s3://bucket/prefix, "
        "with credentials and region from the environment"
    }

    url: str | None = key(
        "url",
        "bucket that hosts share: s3://, gs:// or az://; none: no such tier",
        url=rules,
        planned="given",
        flag="bucket for the tier that outlives all hosts",
    )
    bytes_: int | None = key(
        "bytes",
        "our share of the bucket; none: 256 GiB",
        needs="url",
        planned="given",
        flag="our share of that bucket (default: 256GiB)",
    )

    @property
    def share(self) -> int:
        """Bytes."""
        return self.bytes_ or DEFAULT_BYTES

    def decided(self) -> dict[str, int]:
        return {"bytes_": self.share}
