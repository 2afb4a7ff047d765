"""``kvtier top``: what the page at ``/`` of a server's admin interface shows, in a terminal. What
matters most stands first, because it may have 24 lines only."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvtier.admin import status
from kvtier.admin.forms import Namespace, Namespaces
from kvtier.cli.operate import Surface, queued, tier_name, what_if
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.terminal import printable, size_text, width

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_EVERY_S = 2.0
_KEYS_S = 0.2
"""Longest time until a key or a new size of the terminal is noticed."""
_MINUTE_S = 60.0
_MOST_TENANTS = 8
_FULL_COLUMNS = 6
_FILE_COLUMNS = 140
_BARS = " ▁▂▃▄▅▆▇█"
_FLOWS = ("loads", "stores", "evicted")
_FAULTS = ("refused", "failed", "corrupt")


class Look(NamedTuple):
    stats: status.Stats
    tenants: Sequence[str] | None
    """Names of tenants, or None without the token."""
    past: Sequence[status.Moment] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Surface.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="one frame, and no more")


def run(arguments: argparse.Namespace) -> int:
    """Draw. Raises ConfigError without ``rich``, and TierError when no server answers at first."""
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
    screen.add(_look(surface, ()))
    # A width that is given would be kept when the terminal is resized.
    console = Console() if width() else Console(width=_FILE_COLUMNS)
    if arguments.once:
        console.print(screen.frame(console.width))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as typed,
        Live(
            screen.fitted(console), console=console, screen=console.is_terminal, auto_refresh=False
        ) as live,
    ):
        while not _waited(
            typed, console, lambda: live.update(screen.fitted(console), refresh=True)
        ):
            try:
                screen.add(_look(surface, screen.past))
            except TierError as error:
                screen.trouble = str(error)
            live.update(screen.fitted(console), refresh=True)
    return 0


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Have standard input tell each key at once. None if it is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    typed = sys.stdin.fileno()
    before = termios.tcgetattr(typed)
    tty.setcbreak(typed)
    try:
        yield typed
    finally:
        termios.tcsetattr(typed, termios.TCSADRAIN, before)


def _waited(typed: int | None, console: Console, redraw: Callable[[], None]) -> bool:
    """Wait until the next look. Returns True if ``q`` was typed or nobody can type any more."""
    until, size = time.monotonic() + _EVERY_S, console.size
    while (left := until - time.monotonic()) > 0:
        ready = select.select([] if typed is None else [typed], [], [], min(left, _KEYS_S))[0]
        if ready and typed is not None and os.read(typed, 64).lower() in (b"", b"q", b"\x1b"):
            return True
        if console.size != size:
            size = console.size
            redraw()
    return False


def _look(surface: Surface, past: Sequence[status.Moment]) -> Look:
    """Ask the server. ``past``: moments of the last hour, asked for again if they are too old."""
    stats = surface.ask("/v1/stats", status.Stats)
    if not past or not 0 <= stats.uptime_s - past[-1].uptime_s < status.EVERY_S:
        past = surface.ask("/v1/history", status.Moments).moments
    if not surface.has_token:
        return Look(stats, None, past)
    found = surface.ask("/v1/namespaces", Namespaces).namespaces
    return Look(stats, sorted({_name(one) for one in found}), past)


def _name(one: Namespace) -> str:
    return one.namespace or one.engine or one.fingerprint[:12]


class Screen:
    def __init__(self) -> None:
        self.trouble = ""
        self._before: status.Stats | None = None
        self._now: Look | None = None

    @property
    def past(self) -> Sequence[status.Moment]:
        return self._now.past if self._now else ()

    def add(self, look: Look) -> None:
        """Add a look. A server that was started again begins anew."""
        old = self._now.stats if self._now else None
        self._before = old if old and old.uptime_s <= look.stats.uptime_s else None
        self._now = look
        self.trouble = ""

    def frame(self, columns: int) -> RenderableType:
        from rich.console import Group

        return Group(*self._parts(columns))

    def fitted(self, console: Console) -> RenderableType:
        from rich.console import Group

        parts = self._parts(console.width)
        heights = [len(console.render_lines(part, pad=False)) for part in parts]
        if not console.is_terminal or sum(heights) <= console.height:
            return Group(*parts)
        shown = len(parts)
        while shown > 1 and sum(heights[:shown]) >= console.height:
            shown -= 1
        left = len(parts) - shown
        return Group(*parts[:shown], _plain(f"({left} more in a higher window)", "dim"))

    def _parts(self, columns: int) -> list[RenderableType]:
        assert self._now is not None
        stats, tenants, past = self._now
        moments = [*past, status.moment(stats)]
        parts: list[RenderableType] = [_head(stats)]
        parts += [_warning(words) for words in filter(None, (self.trouble, *stats.trouble))]
        parts.append(_hit_rate(moments, stats))
        for one in stats.size_classes:
            parts.append(_title(_size_words(one)))
            parts.append(_tiers(one, self._before, stats.uptime_s))
        if not stats.size_classes:
            parts.append(_plain("no engine has come yet"))
        parts.append(_over_time(moments, columns))
        parts += _misses(stats)
        parts += map(_plain, (words for one in stats.size_classes for words in what_if(one)))
        parts += [_engines(stats), *map(_followed, stats.engines), _tenants(stats, tenants)]
        return parts


# ---- parts of a frame ----------------------------------------------------------------------------


def _plain(text: str, style: str = "") -> RenderableType:
    """Make text safe to show, whatever its origin: a tenant chooses its own name."""
    from rich.text import Text

    return Text(printable(text), style=style)


def _followed(engine: status.EngineStatus) -> RenderableType:
    blocks = ", ".join(f"{tier} {count:,} blocks" for tier, count in engine.blocks.items())
    return _plain(
        f"{engine.engine}: {(blocks or 'nothing') if engine.followed else 'not followed'}"
    )


def _title(text: str) -> RenderableType:
    return _plain(f"\n{text}", "bold")


def _warning(words: str) -> RenderableType:
    return _plain(f"TROUBLE: {words}", "bold red")


def _head(now: status.Stats) -> RenderableType:
    hours, minutes = divmod(int(now.uptime_s) // 60, 60)
    memory = f"{size_text(now.memory.process)} + pools {size_text(now.memory.pools)}"
    well = now.ready and not now.trouble
    state = "NOT READY" if not now.ready else "ready" if well else "ready, with trouble"
    return _plain(
        f"kvtier {now.version}  {state}  up {hours} h {minutes} min  memory {memory}  (q ends)",
        "bold" if well else "bold red",
    )


def _hit_rate(moments: Sequence[status.Moment], stats: status.Stats) -> RenderableType:
    now = moments[-1]
    first = next(one for one in moments if one.uptime_s >= now.uptime_s - _MINUTE_S)
    asked, hits = now.asked_tokens - first.asked_tokens, now.hit_tokens - first.hit_tokens
    ideal = sum(one.ideal_tokens for one in stats.size_classes)
    of_all = _share(now.hit_tokens, now.asked_tokens)
    saved = _share(now.saved_compute, now.asked_compute)
    return _plain(
        f"hit rate {_share(hits, asked)} in the last minute, {of_all} of {now.asked_tokens:,} "
        f"tokens since the start ({_share(ideal, now.asked_tokens)} if nothing had ever left); "
        f"saved compute {saved}",
        "bold",
    )


def _size_words(one: status.SizeClassStatus) -> str:
    models = f" ({', '.join(one.models)})" if one.models else ""
    return f"chunks of {size_text(one.slot_bytes)}{models}"


def _table(*heads: str) -> Table:
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    made.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        made.add_column(head, justify="right", no_wrap=True)
    return made


def _same_size(
    one: status.SizeClassStatus, before: status.Stats | None
) -> status.SizeClassStatus | None:
    sizes = before.size_classes if before else ()
    old = next((each for each in sizes if each.slot_bytes == one.slot_bytes), None)
    return old if old is not None and len(old.tiers) == len(one.tiers) else None


def _tiers(now: status.SizeClassStatus, looked: status.Stats | None, uptime_s: float) -> Table:
    before = _same_size(now, looked)
    seconds = max(1e-3, uptime_s - looked.uptime_s) if looked else 1.0
    columns = {"tier": [*map(tier_name, now.tiers)], "full": [*map(_fill, now.tiers)]}
    for head, what in (("holds", "held"), ("of", "capacity")):
        columns[head] = [size_text(getattr(tier, what) * now.slot_bytes) for tier in now.tiers]
    columns["hits"] = [_share(tier.hit_tokens, now.asked_tokens) for tier in now.tiers]
    for what in _FLOWS:
        old = [getattr(tier, what) for tier in before.tiers] if before else [0] * len(now.tiers)
        counts = [getattr(tier, what) - was for tier, was in zip(now.tiers, old, strict=True)]
        columns[what + ("/s" if before else "")] = [f"{count / seconds:,.0f}" for count in counts]
    for what in _FAULTS:
        columns[what] = [f"{getattr(tier, what):,}" for tier in now.tiers]
    columns["queue"] = [*map(queued, now.tiers)]
    kept = {
        head: cells
        for head, cells in columns.items()
        if not set(cells) <= {"0", "-", "0+0"} or head.startswith(("loads", "stores"))
    }
    made = _table(*kept)
    for tier, cells in zip(now.tiers, zip(*kept.values(), strict=True), strict=True):
        made.add_row(*cells, style="red" if tier.open_breakers else "")
    return made


def _fill(tier: status.TierStatus) -> str:
    share = tier.held / tier.capacity if tier.capacity else 0.0
    return f"{'█' * round(share * _FULL_COLUMNS):░<{_FULL_COLUMNS}} {share:4.0%}"


def _over_time(moments: Sequence[status.Moment], columns: int) -> RenderableType:
    """Draw the chunks that each tier served, one bar for each stretch of the last hour."""
    tiers = list(moments[-1].loads)
    label = max(map(len, tiers), default=0)
    room = max(1, min(len(moments) - 1, columns - label - 2))
    cuts = [moments[place * (len(moments) - 1) // room] for place in range(room + 1)]
    served = {
        tier: [new.loads.get(tier, 0) - old.loads.get(tier, 0) for old, new in pairwise(cuts)]
        for tier in tiers
    }
    highest = max((count for counts in served.values() for count in counts), default=0)
    minutes = (moments[-1].uptime_s - moments[0].uptime_s) / 60
    lines = [f"\nhits over the last {minutes:.0f} min"]
    lines += [f"{tier:{label}}  {_bars(counts, highest)}" for tier, counts in served.items()]
    return _plain("\n".join(lines) if highest > 0 else "")


def _share(count: int, whole: int) -> str:
    return f"{count / whole:.1%}" if whole else "-"


def _bars(counts: Sequence[int], highest: int) -> str:
    most = len(_BARS) - 1
    return "".join(_BARS[-(-max(0, count) * most // highest) if highest else 0] for count in counts)


def _misses(now: status.Stats) -> list[RenderableType]:
    counts = Counter[str]()
    for one in now.size_classes:
        counts.update(one.missed)
        counts.update(one.declined)
    reasons = [
        f"{_share(count, counts.total())} {reason}"
        for reason, count in counts.most_common()
        if count
    ]
    parts = [_plain(f"computed: {', '.join(reasons) or 'none so far'}")]
    verdicts = filter(None, (one.zero_hits for one in now.size_classes))
    return [*(_plain(f"NO HITS: {words}", "red") for words in verdicts), *parts]


def _engines(now: status.Stats) -> RenderableType:
    there = now.connections
    told = {
        "with memory still mapped": there.lingering,
        "leases": there.leases,
        "rejected": there.rejected,
        "dropped": there.dropped,
    }
    more = "".join(f", {count} {words}" for words, count in told.items() if count)
    return _plain(f"engines: {there.open} connected{more}; {there.accepted} so far")


def _tenants(now: status.Stats, tenants: Sequence[str] | None) -> RenderableType:
    count = sum(one.namespaces for one in now.size_classes)
    if tenants is None:
        return _plain(f"tenants and models: {count} (names with --token-file)")
    shown = ", ".join(tenants[:_MOST_TENANTS]) or "none"
    more = len(tenants) - _MOST_TENANTS
    return _plain(f"tenants and models: {shown}{f', and {more} more' if more > 0 else ''}")
