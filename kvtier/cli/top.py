"""``kvtier stats`` and ``kvtier top``: what the page at ``/`` of a server's admin interface shows,
in a terminal, once or as it changes. What matters most stands first: it may have 24 lines only."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import textwrap
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvtier.admin import status
from kvtier.admin.forms import Namespace, Namespaces
from kvtier.cli.operate import Surface
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.terminal import printable, size_text, table, width

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_EVERY_S = 2.0
_KEYS_S = 0.2
"""Longest time until a key or a new size of the terminal is noticed."""
_MINUTE_S = 60.0
_MOST_TENANTS = 8
_FULL_COLUMNS = 6
_FILE_COLUMNS = 140
_BARS = " ▁▂▃▄▅▆▇█"
_FLOWS = ("loads", "stores", "evicted")
_ALWAYS = ("tier", "held", "loads", "stores")
"""Columns that are shown also if they have zeros alone."""
_FAULTS = {name: name for name in ("refused", "failed", "corrupt")} | {"missed": "misses"}
_NOTHING_POINTS = 0.1
"""Points of hits below which a difference is not told."""


class Look(NamedTuple):
    stats: status.Stats
    tenants: Sequence[str] | None = None
    """Names of tenants, or None without the token."""
    past: Sequence[status.Moment] = ()


class Line(NamedTuple):
    text: str
    style: str = ""


class StatsCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        Surface.add_arguments(parser)
        parser.add_argument(
            "--json", action="store_true", help="print the document of /v1/stats on one line"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        now = Surface(arguments).ask("/v1/stats", status.Stats)
        print(msgspec.json.encode(now).decode() if arguments.json else screen(Look(now)))
        return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Surface.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="one frame, and no more")


def run(arguments: argparse.Namespace) -> int:
    """Draw. Raises ConfigError without ``rich``, and TierError when no server answers at first."""
    surface = Surface(arguments)
    if arguments.once:
        print(screen(look(surface), width()))
        return 0
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise ConfigError(
            "kvtier top draws with rich, which vLLM installs and this Python does not have: pip "
            "install rich. kvtier stats needs nothing"
        ) from error
    now, before, trouble = look(surface), None, ""
    # A width that is given would be kept when the terminal is resized.
    console = Console() if width() else Console(width=_FILE_COLUMNS)

    def drawn() -> Text:
        return _fitted(frame(now, before, trouble, console.width), console)

    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as typed,
        Live(drawn(), console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while not _waited(typed, console, lambda: live.update(drawn(), refresh=True)):
            try:
                old, now, trouble = now.stats, look(surface, now.past), ""
                # a server that was started again begins anew
                before = old if old.uptime_s <= now.stats.uptime_s else None
            except TierError as error:
                trouble = str(error)
            live.update(drawn(), refresh=True)
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


def look(surface: Surface, past: Sequence[status.Moment] = ()) -> Look:
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


def _fitted(lines: list[Line], console: Console) -> Text:
    from rich.text import Text

    lines[0] = Line(f"{lines[0].text}  (q ends)", lines[0].style)
    if console.is_terminal and (more := len(lines) - console.height) > 0:
        lines = [*lines[: -more - 1], Line(f"({more + 1} more in a higher window)", "dim")]
    whole = Text("\n", no_wrap=True, overflow="crop")
    return whole.join(Text(line.text, line.style) for line in lines)


# ---- a frame -------------------------------------------------------------------------------------


def screen(now: Look, columns: int | None = None) -> str:
    return "\n".join(line.text for line in frame(now, columns=columns))


def frame(
    now: Look, before: status.Stats | None = None, trouble: str = "", columns: int | None = None
) -> list[Line]:
    """Make the lines, wrapped at ``columns``. ``before``: the last look, since when counts of
    chunks are rates, or None for counts since the start."""
    wrapped = (
        Line(text, style)
        for line, style in _frame(now, before, trouble, columns)
        for text in (textwrap.wrap(line, columns) if columns and len(line) > columns else [line])
    )
    return [*wrapped]


def _frame(
    now: Look, before: status.Stats | None, trouble: str, columns: int | None
) -> Iterator[Line]:
    stats, tenants, past = now
    moments = [*past, status.moment(stats)]
    yield _head(stats)
    for words in filter(None, (trouble, *stats.trouble)):
        yield Line(printable(f"TROUBLE: {words}"), "bold red")
    if stats.size_classes:
        yield _hit_rate(moments, stats)
    else:
        yield Line("no engine has come yet")
    for one in stats.size_classes:
        yield Line("")
        yield Line(printable(_size_words(one)), "bold")
        yield from _tiers(one, before, stats.uptime_s, columns)
        yield from _misses(one)
    yield from _over_time(moments, columns or _FILE_COLUMNS)
    yield Line(_engines(stats.connections))
    yield from map(_followed, stats.engines)
    yield Line(printable(_tenants(stats, tenants)))
    for one in stats.size_classes:
        yield from map(Line, what_if(one))


def _head(now: status.Stats) -> Line:
    hours, minutes = divmod(int(now.uptime_s) // 60, 60)
    memory = f"{size_text(now.memory.process)} + pools {size_text(now.memory.pools)}"
    well = now.ready and not now.trouble
    state = "NOT READY" if not now.ready else "ready" if well else "ready, with trouble"
    text = f"kvtier {now.version}  {state}  up {hours} h {minutes} min  memory {memory}"
    return Line(text, "bold" if well else "bold red")


def _hit_rate(moments: Sequence[status.Moment], stats: status.Stats) -> Line:
    now = moments[-1]
    first = next(one for one in moments if one.uptime_s >= now.uptime_s - _MINUTE_S)
    asked, hits = now.asked_tokens - first.asked_tokens, now.hit_tokens - first.hit_tokens
    ideal = sum(one.ideal_tokens for one in stats.size_classes)
    of_all = _share(now.hit_tokens, now.asked_tokens)
    lately = f"{_share(hits, asked)} in the last minute, " if len(moments) > 1 else ""
    saved = _share(now.saved_compute, now.asked_compute)
    return Line(
        f"hit rate {lately}{of_all} of {now.asked_tokens:,} tokens since the start "
        f"({_share(ideal, now.asked_tokens)} if nothing had ever left); saved compute {saved}",
        "bold",
    )


def _size_words(one: status.SizeClassStatus) -> str:
    models = f" ({', '.join(one.models)})" if one.models else ""
    loads = sum(tier.loads for tier in one.tiers)
    return (
        f"chunks of {size_text(one.slot_bytes)}{models}: {_share(loads, one.asked)} of "
        f"{one.asked:,} chunks asked for were hits; slots: {one.free} free, {one.filling} filling, "
        f"{one.pinned} pinned"
    )


def _tiers(
    now: status.SizeClassStatus,
    looked: status.Stats | None,
    uptime_s: float,
    columns: int | None,
) -> Iterator[Line]:
    """Yield the table of the tiers. Columns of zeros alone are left out, and the last ones where
    ``columns`` are too few."""
    tiers, same = now.tiers, looked and _same_size(now, looked)
    seconds = max(1e-3, uptime_s - looked.uptime_s) if looked else 1.0
    cells = {"tier": [tier.tier + " AWAY" * bool(tier.open_breakers) for tier in tiers]}
    cells |= {"held": [f"{tier.held:,}" for tier in tiers], "full": [*map(_fill, tiers)]}
    for head, what in (("holds", "held"), ("of", "capacity")):
        cells[head] = [size_text(getattr(tier, what) * now.slot_bytes) for tier in tiers]
    cells["hits"] = [_share(tier.hit_tokens, now.asked_tokens) for tier in tiers]
    for what in _FLOWS:
        old = [getattr(tier, what) for tier in same.tiers] if same else [0] * len(tiers)
        counts = [getattr(tier, what) - was for tier, was in zip(tiers, old, strict=True)]
        cells[what + ("/s" if same else "")] = [f"{count / seconds:,.0f}" for count in counts]
    for head, what in _FAULTS.items():
        cells[head] = [f"{getattr(tier, what):,}" for tier in tiers]
    lanes = [tier.lane for tier in tiers]
    cells["queue"] = [f"{one.queued_reads}+{one.queued_writes}" if one else "-" for one in lanes]
    for head, what in (("read", "bytes_read"), ("written", "bytes_written")):
        cells[head] = [size_text(getattr(tier, what)) for tier in tiers]
    kept = {
        head: column
        for head, column in cells.items()
        if not set(column) <= {"0", "-", "0+0", "0 B"} or head.startswith(_ALWAYS)
    }
    while True:
        lines = table([*kept], [*zip(*kept.values(), strict=True)], numbers=range(1, len(kept)))
        if not columns or len(kept) == 1 or max(map(len, lines)) <= columns:
            break
        kept.popitem()
    styles = ["", *("red" * bool(tier.open_breakers) for tier in tiers)]
    yield from map(Line, lines, styles)


def _same_size(one: status.SizeClassStatus, before: status.Stats) -> status.SizeClassStatus | None:
    sizes = before.size_classes
    old = next((each for each in sizes if each.slot_bytes == one.slot_bytes), None)
    return old if old is not None and len(old.tiers) == len(one.tiers) else None


def _fill(tier: status.TierStatus) -> str:
    share = tier.held / tier.capacity if tier.capacity else 0.0
    return f"{'█' * round(share * _FULL_COLUMNS):░<{_FULL_COLUMNS}} {share:4.0%}"


def _misses(one: status.SizeClassStatus) -> Iterator[Line]:
    """Yield why nothing is hit, why chunks were computed, and what the audit has found."""
    if one.zero_hits:
        yield Line(f"NO HITS: {one.zero_hits}", "red")
    counts = Counter(one.missed) + Counter(one.declined)
    if whole := counts.total():
        reasons = (f"{count / whole:.0%} {reason}" for reason, count in counts.most_common())
        yield Line(f"computed: {', '.join(reasons)}")
    if one.audited:
        wrong = f"{one.audit_mismatches:,} had other bytes"
        yield Line(f"audit: {one.audited:,} chunks compared, {wrong}")


def _over_time(moments: Sequence[status.Moment], columns: int) -> Iterator[Line]:
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
    if highest > 0:
        minutes = (moments[-1].uptime_s - moments[0].uptime_s) / 60
        yield Line("")
        yield Line(f"hits over the last {minutes:.0f} min")
        for tier, counts in served.items():
            yield Line(f"{tier:{label}}  {_bars(counts, highest)}")


def _share(count: int, whole: int) -> str:
    return f"{count / whole:.1%}" if whole else "-"


def _bars(counts: Sequence[int], highest: int) -> str:
    most = len(_BARS) - 1
    return "".join(_BARS[-(-max(0, count) * most // highest) if highest else 0] for count in counts)


def _engines(there: status.ConnectionStatus) -> str:
    told = {
        "with memory still mapped": there.lingering,
        "leases": there.leases,
        "rejected": there.rejected,
        "dropped": there.dropped,
    }
    more = "".join(f", {count} {words}" for words, count in told.items() if count)
    return f"engines: {there.open} connected{more}; {there.accepted} so far"


def _followed(engine: status.EngineStatus) -> Line:
    blocks = ", ".join(f"{tier} {count:,} blocks" for tier, count in engine.blocks.items())
    told = (blocks or "nothing") if engine.followed else "not followed"
    return Line(printable(f"{engine.engine}: {told}"))


def _tenants(now: status.Stats, tenants: Sequence[str] | None) -> str:
    count = sum(one.namespaces for one in now.size_classes)
    if tenants is None:
        return f"tenants and models: {count} (names with --token-file)"
    shown = ", ".join(tenants[:_MOST_TENANTS]) or "none"
    more = len(tenants) - _MOST_TENANTS
    return f"tenants and models: {shown}{f', and {more} more' if more > 0 else ''}"


def what_if(size_class: status.SizeClassStatus) -> Iterator[str]:
    """Yield lines: hits of other sizes, the policy's setting that rules, hits of the others."""
    for tier in size_class.tiers:
        if any(tier.what_if.values()):
            yield _other_sizes(tier, tier.capacity * size_class.slot_bytes)
    hits, asked = size_class.policy_hits, size_class.policy_asked
    if asked and size_class.policy in hits:
        saved = size_class.policy_saved
        others = ", ".join(
            f"{name} {100 * (count - hits[size_class.policy]) / asked:+.1f}"
            f" ({saved[name] / (saved[size_class.policy] or 1):.2f} x)"
            for name, count in sorted(hits.items(), key=lambda item: -item[1])
            if name != size_class.policy
        )
        rules = f"{hits[size_class.policy] / asked:.1%} of all {asked:,} chunks of prompts"
        yield (
            f"policy: {size_class.policy} rules, {rules} in RAM, vLLM's own hits among them; the "
            f"others, in points (and saved compute): {others}"
        )


def _other_sizes(tier: status.TierStatus, size: int) -> str:
    """Write ``ram of 64 GiB: +64 GiB = +7.0 points``, more first, if a size changes anything."""
    ratios = {float(scale): 100 * ratio for scale, ratio in tier.what_if.items()}
    most = max(ratios.values())
    enough = min(scale for scale, ratio in ratios.items() if most - ratio < _NOTHING_POINTS)
    said = [
        f"{'-' if scale < 1 else '+'}{size_text(abs(scale - 1) * size)} = "
        f"{ratio - ratios[1]:+.1f} points"
        for scale, ratio in sorted(ratios.items(), key=lambda one: (one[0] < 1, one[0]))
        if abs(ratio - ratios[1]) >= _NOTHING_POINTS and scale <= max(1, enough)
    ]
    if enough < max(ratios):
        said.append(f"beyond {size_text(enough * size)} it adds nothing")
    error = f", give or take {100 * tier.what_if_error:.1f}" if tier.what_if_error else ""
    return (
        f"{tier.tier} of {size_text(size)} under LRU, vLLM's own hits among them: "
        f"{'; '.join(said) or 'no other size changes it'}{error}"
    )
