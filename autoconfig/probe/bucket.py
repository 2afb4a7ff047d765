"""Looks at an object store for a plan."""

from __future__ import annotations

from kvtier.autoconfig.facts import ObjectStore
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.extras import require
from kvtier.core.fact import known, unknown
from kvtier.tiers.objects.url import parse


def probe_objects(url: str, bytes_: int | None = None) -> ObjectStore:
    """Try once what a tier does with a bucket. ``bytes_``: our share, if one was given. Raises
    ConfigError for text that is no URL of an object store, without showing it."""
    label = parse(url).label
    try:
        require("object")
        from kvtier.tiers.objects.bucket import tried

        wrong = tried(url)
    except (ConfigError, TierError) as error:
        wrong = str(error)
    what = f"{label}: written, read, listed and deleted"
    return ObjectStore(
        url,
        unknown("no object_bytes was given") if bytes_ is None else known(bytes_, "given"),
        known(not wrong, wrong or what),
        unknown("not measured"),
        unknown("not measured"),
    )
