"""``kvtier top``: what the page at ``/`` of a server's admin interface shows, in a terminal.

It asks ``/v1/stats``, and with a token ``/v1/namespaces``, and draws with ``rich``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvtier.admin.forms import Namespace, Namespaces
from kvtier.admin.status import EngineStatus, SizeClassStatus, Stats, TierStatus
from kvtier.cli.operate import queued, tier_name, what_if
from kvtier.cli.surface import Surface
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.terminal import printable, size_text, width

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_EVERY_S = 2.0
_KEPT = 60
"""How many looks the hits over time show."""
_MOST_TENANTS = 8
_FULL_WIDTH = 10
_FILE_WIDTH = 140
"""The columns of a frame that goes to a file or a pipe."""
_BARS = " ▁▂▃▄▅▆▇█"


class Look(NamedTuple):
    """What one frame is made of."""

    stats: Stats
    tenants: Sequence[str] | None
    """The names of tenants and models that came. None: they are told to those who have the
    token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Surface.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="one frame, and no more")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError where ``rich`` is missing, and TierError when no server answers at
    first."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise ConfigError(
            "kvtier top draws with rich, which vLLM installs and this Python does not have: pip "
            "install rich. kvtier stats needs nothing"
        ) from error
    surface = Surface(arguments)
    screen = Screen()
    screen.add(_look(surface))
    console = Console(width=width() or _FILE_WIDTH)
    if arguments.once:
        console.print(screen.frame())
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(
            screen.frame(), console=console, screen=console.is_terminal, auto_refresh=False
        ) as live,
    ):
        while True:
            time.sleep(_EVERY_S)
            try:
                screen.add(_look(surface))
            except TierError as error:
                screen.trouble = str(error)
            live.update(screen.frame(), refresh=True)
    return 0


def _look(surface: Surface) -> Look:
    stats = surface.ask("/v1/stats", Stats)
    if not surface.has_token:
        return Look(stats, None)
    found = surface.ask("/v1/namespaces", Namespaces).namespaces
    return Look(stats, sorted({_name(one) for one in found}))


def _name(one: Namespace) -> str:
    """A tenant, or of engines without one the one that came last."""
    return one.namespace or one.engine or one.fingerprint[:12]


class Screen:
    """The frames of one server. It remembers the last looks."""

    def __init__(self) -> None:
        self.trouble = ""
        """Why there is no newer look."""
        self._looks: deque[Look] = deque(maxlen=_KEPT + 1)

    def add(self, look: Look) -> None:
        """A server that was started again begins anew."""
        if self._looks and look.stats.uptime_s < self._looks[-1].stats.uptime_s:
            self._looks.clear()
        self._looks.append(look)
        self.trouble = ""

    def frame(self) -> RenderableType:
        """All that is shown."""
        from rich.console import Group

        now = self._looks[-1]
        before = self._looks[-2].stats if len(self._looks) > 1 else None
        parts: list[RenderableType] = [_head(now.stats)]
        parts += [_warning(words) for words in filter(None, (self.trouble, *now.stats.trouble))]
        seconds = _seconds(now.stats, before)
        for one in now.stats.size_classes:
            parts.append(_title(f"Tiers, chunks of {size_text(one.slot_bytes)}"))
            parts.append(_tiers(one, _same_size(one, before), seconds))
        if not now.stats.size_classes:
            parts.append(_plain("no engine has come yet"))
        parts += [_title("Hits by tier"), _hits([look.stats for look in self._looks])]
        parts += [_title("Why chunks were computed"), _misses(now.stats)]
        if words := [words for one in now.stats.size_classes for words in what_if(one)]:
            parts += [_title("What would hit more"), *map(_plain, words)]
        parts += [_title("Engines"), _engines(now.stats), *map(_followed, now.stats.engines)]
        parts.append(_tenants(now))
        return Group(*parts)


# ---- parts of a frame ----------------------------------------------------------------------------


def _plain(text: str, style: str = "") -> RenderableType:
    """Text of any origin: a tenant chooses its own name."""
    from rich.text import Text

    return Text(printable(text), style=style)


def _followed(engine: EngineStatus) -> RenderableType:
    """What an engine has said that it holds."""
    blocks = ", ".join(f"{tier} {count:,} blocks" for tier, count in engine.blocks.items())
    return _plain(
        f"{engine.engine}: {(blocks or 'nothing') if engine.followed else 'not followed'}"
    )


def _title(text: str) -> RenderableType:
    return _plain(f"\n{text}", "bold")


def _warning(words: str) -> RenderableType:
    return _plain(f"TROUBLE: {words}", "bold red")


def _head(now: Stats) -> RenderableType:
    hours, minutes = divmod(int(now.uptime_s) // 60, 60)
    memory = f"{size_text(now.memory.process)} and {size_text(now.memory.pools)} of pools"
    well = now.ready and not now.trouble
    state = "NOT READY" if not now.ready else "ready" if well else "ready, with trouble"
    return _plain(
        f"kvtier {now.version}  {state}  up {hours} h {minutes} min  memory {memory}",
        "bold" if well else "bold red",
    )


def _table(*heads: str) -> Table:
    """The first column is words, and the others are numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    made.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        made.add_column(head, justify="right", no_wrap=True)
    return made


def _same_size(one: SizeClassStatus, before: Stats | None) -> SizeClassStatus | None:
    """What this size was before, if it has the same tiers."""
    sizes = before.size_classes if before else ()
    old = next((each for each in sizes if each.slot_bytes == one.slot_bytes), None)
    return old if old is not None and len(old.tiers) == len(one.tiers) else None


def _flow(tier: TierStatus, before: TierStatus | None, what: str, seconds: float) -> float:
    """A count of the tier's, or per second since ``before``."""
    count = float(getattr(tier, what))
    return count if before is None else (count - getattr(before, what)) / seconds


def _tiers(now: SizeClassStatus, before: SizeClassStatus | None, seconds: float) -> Table:
    per = "/s" if before else ""
    flows = (f"loads{per}", f"stores{per}", f"evicted{per}")
    heads = ("tier", "full", "holds", "room", *flows, "refused", "failed", "corrupt", "queue")
    made = _table(*heads)
    for place, tier in enumerate(now.tiers):
        old = before.tiers[place] if before else None
        made.add_row(
            tier_name(tier),
            _fill(tier),
            size_text(tier.held * now.slot_bytes),
            size_text(tier.capacity * now.slot_bytes),
            *(f"{_flow(tier, old, what, seconds):,.0f}" for what in ("loads", "stores", "evicted")),
            *(f"{count:,}" for count in (tier.refused, tier.failed, tier.corrupt)),
            queued(tier),
            style="red" if tier.open_breakers else "",
        )
    return made


def _fill(tier: TierStatus) -> str:
    share = tier.held / tier.capacity if tier.capacity else 0.0
    return f"{'█' * round(share * _FULL_WIDTH):░<{_FULL_WIDTH}} {share:4.0%}"


def _hits(looks: Sequence[Stats]) -> Table:
    """Chunks by tier: a bar for each look, and all since the start, and tokens."""
    made = _table("", "chunks", "of asked", "tokens", "of asked")
    made.add_column("over time", no_wrap=True)
    now = looks[-1]
    loads, tokens = _by_tier(now, "loads"), _by_tier(now, "hit_tokens")
    asked = sum(one.asked for one in now.size_classes)
    asked_tokens = sum(one.asked_tokens for one in now.size_classes)
    ideal = sum(one.ideal_tokens for one in now.size_classes)
    steps = [(_by_tier(new, "loads"), _by_tier(old, "loads")) for old, new in pairwise(looks)]
    highest = max((max((new - old).values(), default=0) for new, old in steps), default=0)
    for tier, count in loads.items():
        over_time = [new[tier] - old[tier] for new, old in steps]
        cells = (f"{count:,}", _share(count, asked), f"{tokens[tier]:,}")
        made.add_row(tier, *cells, _share(tokens[tier], asked_tokens), _bars(over_time, highest))
    made.add_row("ideal", "", "", f"{ideal:,}", _share(ideal, asked_tokens), "")
    made.add_row("asked", f"{asked:,}", "", f"{asked_tokens:,}", "", "")
    return made


def _by_tier(stats: Stats, what: str) -> Counter[str]:
    """A count of all size classes by tier, with the tiers that have none."""
    counts = Counter[str]()
    for one in stats.size_classes:
        counts.update({tier.tier: getattr(tier, what) for tier in one.tiers})
    return counts


def _share(count: int, whole: int) -> str:
    return f"{count / whole:.1%}" if whole else "-"


def _bars(counts: Sequence[int], highest: int) -> str:
    most = len(_BARS) - 1
    return "".join(_BARS[-(-max(0, count) * most // highest) if highest else 0] for count in counts)


def _misses(now: Stats) -> RenderableType:
    counts = Counter[str]()
    for one in now.size_classes:
        counts.update(one.missed)
        counts.update(one.declined)
    made = _table("reason", "chunks", "share")
    for reason, count in counts.most_common():
        if count:
            made.add_row(reason, f"{count:,}", _share(count, counts.total()))
    for words in filter(None, (one.zero_hits for one in now.size_classes)):
        made.add_row(f"NO HITS: {words}", "", "", style="red")
    return made if made.row_count else _plain("none so far")


def _engines(now: Stats) -> RenderableType:
    there = now.connections
    return _plain(
        f"{there.open} connected, {there.lingering} with memory still mapped, "
        f"{there.leases} leases; so far {there.accepted} accepted, {there.rejected} rejected, "
        f"{there.dropped} dropped"
    )


def _tenants(look: Look) -> RenderableType:
    count = sum(one.namespaces for one in look.stats.size_classes)
    if look.tenants is None:
        return _plain(f"Tenants and models: {count} (names with --token-file)")
    shown = ", ".join(look.tenants[:_MOST_TENANTS]) or "none"
    more = len(look.tenants) - _MOST_TENANTS
    return _plain(f"Tenants and models: {shown}{f', and {more} more' if more > 0 else ''}")


def _seconds(now: Stats, before: Stats | None) -> float:
    return max(1e-3, now.uptime_s - before.uptime_s) if before else 0.0
