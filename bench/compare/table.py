"""The comparison as two printed tables: what the same documents cost again, and what an arm takes
for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.bench.compare import limits
from kvtier.bench.compare.arm_result import ArmResult, arm_results, ours
from kvtier.bench.compare.measures import Again, Run
from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.compare.rows import milliseconds, part
from kvtier.bench.processes.engine import modes_told

_WIDTH = 220
_READ = (
    "CPU: beyond a hit in vLLM's own cache, its bounds, times kvtier's. Look-up: of a load, of "
    "what no tier holds. Connector: the engine's own time in it, a load and (its part of) a fill. "
    "Second engine, restarted: first TTFT, mean, part cached."
)
_MIB = 1 << 20


def print_tables(
    arms: Sequence[Contender],
    runs: Sequence[Run],
    reasons: Mapping[str, str],
    token_bytes: int = 0,
    found_limits: Sequence[Mapping[str, float]] = (),
) -> None:
    from rich.console import Console
    from rich.table import Table

    found, bounds = arm_results(arms, runs, token_bytes), limits.medians(found_limits)
    console = Console(width=max(_WIDTH, Console().width))
    for title, columns in (
        ("The same long documents again: time to first token", _TIMES),
        ("What it takes", _TAKES),
    ):
        table = Table(title=title, title_justify="left")
        table.add_column("arm", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        if columns is _TIMES:
            table.add_column("note")
        for arm in arms:
            one = found.get(arm.name)
            seen = None if one is None else _Seen(arm, one, ours(one, found, arms), bounds)
            cells = ["-" if seen is None else cell(seen) for cell in columns.values()]
            table.add_row(
                arm.name,
                *cells,
                *([reasons.get(arm.name) or arm.note] if columns is _TIMES else ()),
            )
        console.print(table)
    console.print(_READ)
    if mode := modes_told(run.mode for run in runs):
        console.print(f"The engines ran by {mode}.")
    if bounds:
        told = ", ".join(f"{name} {value:.1f} GB/s" for name, value in bounds.items())
        console.print(f"Limits of this machine: {told}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a row is made of. ``best``: the kvtier arm with which it is compared."""

    arm: Contender
    one: ArmResult
    best: ArmResult | None
    bounds: Mapping[str, float]


def _load(seen: _Seen) -> str:
    of = part(seen.one.load_speed, seen.bounds.get(seen.arm.limit))
    return _number(seen.one.load_speed, ".1f") + ("" if of is None else f" ({of:.0%})")


def _cpu(seen: _Seen) -> str:
    """With its bounds, and as a multiple of kvtier's."""
    own, best = seen.one.cpu_gib, seen.best.cpu_gib if seen.best else None
    if own is None:
        return ""
    times = part(own.value, best.value) if best else None
    return f"{own.value:.2f} s ({own.low:.2f} to {own.high:.2f})" + (
        "" if times is None else f" {times:.1f} x"
    )


def _filling(seen: _Seen) -> str:
    share = "" if seen.one.fill_share is None else f" ({seen.one.fill_share:.1%})"
    return "" if seen.one.engine_fill is None else f"{seen.one.engine_fill * 1e6:.2f} ms{share}"


def _again(again: Again | None) -> str:
    if again is None:
        return ""
    if again.mean is None or again.first is None:
        return "failed"
    return f"{again.first:.3f}, {again.mean:.3f} s, {again.cached:.0%}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


_TIMES: dict[str, Callable[[_Seen], str]] = {
    "TTFT mean": lambda seen: f"{seen.one.ttft_mean:.3f} s",
    "p50": lambda seen: f"{seen.one.ttft_p50:.3f} s",
    "load cost": lambda seen: _number(milliseconds(seen.one.load_cost), ".0f", " ms"),
    "times kvtier's": lambda seen: _number(seen.one.times_ours, ".2f", " x"),
    "load GB/s (of limit)": _load,
    "tok/s, no reuse": lambda seen: _number(seen.one.fill, ",.0f"),
    "half reused": lambda seen: _number(seen.one.mixed, ",.0f"),
    "cached": lambda seen: f"{seen.one.cached:.0%}",
    "unlike none": lambda seen: _number(seen.one.differing, "d"),
}
_TAKES: dict[str, Callable[[_Seen], str]] = {
    "CPU s a GiB of hits": _cpu,
    "look-up, cold": lambda seen: ", ".join(
        filter(
            None,
            (
                _number(milliseconds(one), ".2f", " ms")
                for one in (seen.one.look_up, seen.one.cold_look_up)
            ),
        )
    ),
    "connector, a load": lambda seen: _number(milliseconds(seen.one.engine_load), ".2f", " ms"),
    "1,000 tokens filled": _filling,
    "save GB/s": lambda seen: _number(seen.one.save_speed, ".1f"),
    "beyond budget": lambda seen: _number(part(seen.one.beyond_budget, _MIB), ",.0f", " MiB"),
    "second engine": lambda seen: _again(seen.one.second),
    "restarted": lambda seen: _again(seen.one.restart),
}
