"""Show a plan: a table for people, YAML for kvtier, JSON for programs. Pure: returns text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from kvtier.autoconfig.facts import UNLIMITED
from kvtier.autoconfig.plan import Plan, Row, Value
from kvtier.config import masked
from kvtier.terminal import size_text


def value_text(key: str, value: Value) -> str:
    """``225485783040`` of ``ram_bytes`` -> ``210 GiB``; counts with thousands' commas; a URL without its password."""
    if isinstance(value, str):
        return str(masked(value))
    if "bytes" in key:
        return "no limit" if value >= UNLIMITED else size_text(value)
    return f"{value:,}"


def table(plan: Plan) -> str:
    """Columns key, value, source, reason: what was found, then what is set, then what is left out and why."""
    parts = ["What was found", _rows(plan.derived), "", "What is set, for one engine replica, all its ranks together"]
    parts.append(_rows(plan.settings) if plan.settings else "  nothing: kvtier stays off")
    if plan.left_out:
        parts += ["", "Left out", *(f"  {tier}: {reason}" for tier, reason in plan.left_out)]
    if plan.warnings:
        parts += ["", "Mind", *(f"  {warning}" for warning in plan.warnings)]
    return "\n".join(parts)


def _rows(rows: Iterable[Row]) -> str:
    cells = [(row.key, value_text(row.key, row.value), row.source, row.reason) for row in rows]
    cells.insert(0, ("key", "value", "source", "reason"))
    widths = [min(44, max(len(cell[column]) for cell in cells)) for column in range(3)]
    lines = []
    for cell in cells:
        padded = (text.ljust(width) for text, width in zip(cell, widths, strict=False))
        lines.append(("  " + "  ".join([*padded, cell[3]])).rstrip())
    return "\n".join(lines)


def as_yaml(plan: Plan) -> str:
    """The configuration file that would give the same by hand, reasons as comments."""
    lines = ["# Written by 'kvtier plan --yaml' for this machine, model and layout; plan again when one changes."]
    for row in plan.settings:
        lines.append(f"# {value_text(row.key, row.value)}: {row.reason} [{row.source}]")
        lines.append(f"{row.key}: {json.dumps(row.value)}")
    lines += [f"# left out: {tier}: {reason}" for tier, reason in plan.left_out]
    lines += [f"# mind: {warning}" for warning in plan.warnings]
    return "\n".join(line.replace("\n", " ") for line in lines)


def as_json(plan: Plan) -> str:
    left_out = [{"tier": tier, "reason": reason} for tier, reason in plan.left_out]
    return json.dumps({**asdict(plan), "left_out": left_out, "values": plan.values()}, indent=2)
