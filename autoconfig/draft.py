"""Parts of a plan, and drafts of them. Pure: nothing is probed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvtier.autoconfig.breakeven import break_even
from kvtier.autoconfig.facts import MIB
from kvtier.core.fact import Fact
from kvtier.core.terminal import rate_text, size_text
from kvtier.load_policy.prefill import PrefillTime
from kvtier.tiers.registry import TIERS
from kvtier.tiers.seam import Value

T = TypeVar("T", int, float)

_RAM_LATENCY_S = 0.0002


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    value: Value
    source: str
    reason: str


@dataclass(slots=True)
class Plan:
    """Plan of config keys (``settings``), with the numbers behind them (``derived``). ``left_out``:
    tiers with reasons. ``prefill``: the engine's assumed speed until it has computed."""

    settings: list[Row] = field(default_factory=list)
    derived: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    prefill: PrefillTime = field(default=PrefillTime(0.0))

    def values(self) -> dict[str, Value]:
        """Return the values for kvtier's config. Without ``ram_bytes`` kvtier must stay off."""
        return {row.key: row.value for row in self.settings}

    def set(self, key: str, value: Value, source: str, reason: str) -> None:
        self.settings.append(Row(key, value, source, reason))

    def show(self, key: str, value: Value, source: str, reason: str) -> None:
        self.derived.append(Row(key, value, source, reason))

    def leave_out(self, tier: str, reason: str) -> None:
        self.left_out.append((tier, reason))

    def take(self, key: str, fact: Fact[T], otherwise: T, because: str) -> T:
        """Return the fact's value, or else ``otherwise``, with the assumption written down."""
        if fact.value is not None:
            return fact.value
        self.derived.append(Row(key, otherwise, "assumed", f"unknown ({fact.source}); {because}"))
        return otherwise


class Load(NamedTuple):
    """One store's KV: bytes a token, longest prompts, pace to the engine, ranks and stores here."""

    kv_bytes: int
    long_tokens: int
    longest: int
    link: float
    ranks: int
    stores: int

    def too_small(self, size: int) -> str:
        """Return why ``size`` bytes are not worth a tier, or "" if one long context fits."""
        if size >= max(MIB, self.long_tokens * self.kv_bytes):
            return ""
        needed = size_text(self.long_tokens * self.kv_bytes)
        return f"{size_text(size)} a store is too small: {self.long_tokens:,} tokens take {needed}"


def break_even_row(
    tier: str, speed: Fact[float], load: Load, draft: Plan, latency: float | None = None
) -> Row | None:
    """Make the row with the length from which the tier beats computing. Without one the tier is
    left out. ``latency``: seconds until the first byte, or None for the usual."""
    name, _, place = tier.partition(" ")
    bandwidth = max(1.0, min(speed.value or 0.0, load.link))
    usual = TIERS[name].section.latency_s if name in TIERS else _RAM_LATENCY_S
    wait = usual if latency is None else latency
    tokens = break_even(bandwidth, wait, load.kv_bytes, draft.prefill, load.longest)
    source = f"{rate_text(bandwidth)} ({speed.source})"
    if tokens is None:
        taken = f"{load.kv_bytes / bandwidth * 1e6:.3g} us a token to load"
        reason = (
            f"too slow to pay: {taken}, {draft.prefill.per_token * 1e6:.3g} us to compute, at "
            f"{source}"
        )
        draft.leave_out(tier, f"{reason}; no hit of up to {load.longest:,} tokens wins")
        return None
    where = f" from {place}" if place else ""
    reason = f"shorter hits are computed faster than they are loaded{where}"
    return Row(f"{name}_break_even_tokens", tokens, source, reason)


def pays(
    tier: str, speed: Fact[float], load: Load, draft: Plan, latency: float | None = None
) -> bool:
    """Whether hits in the tier are ever faster than computing. The draft shows when, or why not."""
    row = break_even_row(tier, speed, load, draft, latency)
    if row is not None:
        draft.derived.append(row)
    return row is not None


class TierDraft:
    """One tier's part of a plan: see :class:`kvtier.tiers.seam.Draft`."""

    def __init__(self, plan: Plan, load: Load, tier: str) -> None:
        self._plan, self._load, self._tier = plan, load, tier
        self.stores, self.kv_bytes = load.stores, load.kv_bytes
        self.set, self.show, self.take = plan.set, plan.show, plan.take
        self.warn, self.too_small = plan.warnings.append, load.too_small

    def leave_out(self, reason: str) -> None:
        self._plan.leave_out(self._tier, reason)

    def pays(self, speed: Fact[float], latency_s: float | None = None) -> bool:
        return pays(self._tier, speed, self._load, self._plan, latency_s)
