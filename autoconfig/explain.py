"""Show a plan: a table for people, YAML for kvtier, JSON for programs. Pure: returns text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from kvtier import terminal
from kvtier.autoconfig.draft import Plan, Row, Value
from kvtier.autoconfig.facts import UNLIMITED
from kvtier.config import masked
from kvtier.terminal import rate_text, size_text


def value_text(key: str, value: Value) -> str:
    """``225485783040`` of ``ram_bytes`` -> ``210 GiB``; counts with thousands' commas; a URL without its password."""
    if isinstance(value, str):
        return str(masked(value))
    if key.endswith("bytes_per_second"):
        return rate_text(value)
    if "bytes" in key:
        return "no limit" if value >= UNLIMITED else size_text(value)
    return f"{value:,}"


def table(plan: Plan, columns: int | None = None) -> str:
    """Columns key, value, source, reason: what was found, then what is set, then what is left out and why.

    ``columns``: as in :func:`kvtier.terminal.table`.
    """
    parts = ["What was found", *_rows(plan.derived, columns)]
    parts += ["", "What is set, for one engine replica, all its ranks together"]
    parts += _rows(plan.settings, columns) if plan.settings else ["nothing: kvtier stays off"]
    if plan.left_out:
        parts += ["", "Left out", *terminal.table(("tier", "reason"), plan.left_out, columns=columns)]
    if plan.warnings:
        parts += ["", "Mind", *plan.warnings]
    return "\n".join(parts)


def _rows(rows: Iterable[Row], columns: int | None) -> list[str]:
    cells = [(row.key, value_text(row.key, row.value), row.source, row.reason) for row in rows]
    return terminal.table(("key", "value", "source", "reason"), cells, columns=columns)


def next_step(plan: Plan) -> str:
    """What somebody who read the plan does with it."""
    if not plan.settings:
        return "free some RAM or take a smaller model, and plan again ('--ram 64GiB' shows what more RAM would give)"
    if not any(row.key == "model" for row in plan.derived):
        return "plan again with --model, because sizes and break-even lengths follow from the model's KV"
    return (
        "KVTIER_AUTO=true has an engine do the same at its start; or 'kvtier plan ... --yaml > /etc/kvtier.yaml' "
        "writes it down, and KVTIER_CONFIG_FILE=/etc/kvtier.yaml uses it"
    )


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
