"""Every tier there is: kvtier's own, and those of other packages.

Another package's tier is found by an entry point of the group ``kvtier.tiers``, whose name is the
tier's section and whose value is the module with what :mod:`kvtier.tiers.seam` tells::

    [project.entry-points."kvtier.tiers"]
    acme = "acme_tier"

A package's tier that cannot be used is in :data:`BROKEN`, and every reading of a configuration is
refused then. Only this module imports tiers' packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import cast

from kvtier.core.errors import ConfigError, KVTierError
from kvtier.core.extras import require
from kvtier.core.lookup import REMOTE
from kvtier.tiers.seam import Draft, Finding, Opened, Opening, Parts, TierFacts, TierSection, Trial

GROUP = "kvtier.tiers"
_OURS = {
    "nvme": "kvtier.tiers.nvme.parts",
    "redis": "kvtier.tiers.redis.parts",
    "object": "kvtier.extensions.objects.parts",
    "mooncake": "kvtier.extensions.mooncake.parts",
}
_NAMES = ("open", "away", "probe", "findings", "plan")
_SECTION = re.compile(r"[a-z][a-z0-9]{0,30}")
_TAKEN = ("engine", "ram", "server", "admin", REMOTE, "pool")
"""Names of other sections, lanes and places, which no tier may have."""


class RegisteredTier:
    """Tier by its package's module. ``origin``: the package that brings it, "" for kvtier. An
    unknown exception of another package becomes a ConfigError."""

    def __init__(self, parts: Parts, origin: str = "") -> None:
        self._parts, self.origin = parts, origin
        self.section = parts.SECTION
        self.name = parts.SECTION.name
        self.place = next(iter(parts.SECTION.keys()))
        """Flat name of the key that configures the tier."""

    def open(self, own: TierSection, around: Opening) -> Opened:
        with self._in_words("be opened"):
            self._require()
            opened: object = self._parts.open(own, around)
            if not isinstance(opened, Opened) or opened.tier.name != self.name:
                raise TypeError(f"open() gave no Opened with a tier that is named {self.name!r}")
            return opened

    def away(self, own: TierSection) -> str:
        with self._in_words("be tried"):
            self._require()
            return self._parts.away(own)

    def probe(self, own: TierSection) -> TierFacts:
        with self._in_words("be probed"):
            return self._parts.probe(own)

    def findings(self, own: TierSection, tried: Trial | None) -> Iterator[Finding]:
        with self._in_words("be examined"):
            yield from self._parts.findings(own, tried)

    def plan(self, found: TierFacts | None, draft: Draft) -> None:
        with self._in_words("be planned"):
            self._parts.plan(found, draft)

    def _require(self) -> None:
        try:
            require(self.name, self.section.modules)
        except ConfigError as error:
            raise ConfigError(f"{self.place}: {error}, or remove {self.place}") from None

    @contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        try:
            yield
        except KVTierError:
            raise
        except Exception as error:
            if not self.origin:
                raise
            raise ConfigError(
                f"{self.place}: the tier of {self.origin} cannot {what}: "
                f"{type(error).__name__}: {error}; repair or uninstall it, or remove {self.place}"
            ) from error


def _found() -> tuple[dict[str, RegisteredTier], list[str]]:
    tiers = {
        name: RegisteredTier(cast("Parts", import_module(where))) for name, where in _OURS.items()
    }
    broken = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda each: each.name):
        name = point.dist.name if point.dist else "unknown name"
        origin = f"the package {name} (entry point {point.name} = {point.value})"
        try:
            tiers[point.name] = _registered(point, origin, tiers)
        except ConfigError as error:
            broken.append(_words(origin, str(error)))
    return tiers, broken


def _words(origin: str, why: str) -> str:
    return f"the tier of {origin} cannot be used: {why}; repair or uninstall it"


def _registered(
    point: metadata.EntryPoint, origin: str, tiers: Mapping[str, RegisteredTier]
) -> RegisteredTier:
    if point.name in tiers or point.name in _TAKEN:
        raise ConfigError("the section has that name already; expected another name")
    if not _SECTION.fullmatch(point.name):
        raise ConfigError("the name is no section; expected lower-case letters and digits")
    try:
        parts = point.load()
    except Exception as error:
        raise ConfigError(f"it cannot be imported: {type(error).__name__}: {error}") from error
    section = getattr(parts, "SECTION", None)
    if not isinstance(section, type) or not issubclass(section, TierSection):
        raise ConfigError("it has no SECTION that is a subclass of kvtier.tiers.seam.TierSection")
    if missing := [name for name in _NAMES if not callable(getattr(parts, name, None))]:
        raise ConfigError(f"it has no function {', '.join(missing)}")
    _check(section, point.name)
    return RegisteredTier(parts, origin)


def _check(section: type[TierSection], name: str) -> None:
    for attribute in ("name", "title", "latency_s"):
        if not hasattr(section, attribute):
            raise ConfigError(f"its SECTION has no {attribute}")
    if section.name != name:
        raise ConfigError(f"its SECTION is named {section.name!r}; expected {name!r}")
    try:
        keys = section().keys()
    except (AttributeError, KeyError, TypeError):
        raise ConfigError("its SECTION has to be a dataclass, each field made by key()") from None
    if not keys:
        raise ConfigError("its SECTION has no key")


TIERS, BROKEN = _found()
"""Tiers by section, in the order of the table of keys, and why others cannot be used."""


def is_shared(place: str) -> bool:
    """Return whether other hosts reach the chunks of this place. A server's is on another host."""
    return place == REMOTE or (place in TIERS and TIERS[place].section.shared)


def refuse(tier: RegisteredTier, why: str) -> None:
    """Move another package's tier to :data:`BROKEN`: configuration cannot have its section."""
    del TIERS[tier.name]
    BROKEN.append(_words(tier.origin, why))


def configured(sections: Mapping[str, TierSection]) -> list[tuple[RegisteredTier, TierSection]]:
    """Return configured tiers with their sections, in the order of the table of keys."""
    return [(TIERS[name], own) for name, own in sections.items() if own.configured]
