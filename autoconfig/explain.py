"""Shows a plan: a table for people, YAML for kvtier, JSON for programs. Pure: it returns text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from kvtier.autoconfig.draft import Plan, Row
from kvtier.autoconfig.facts import UNLIMITED
from kvtier.config.keys import KEYS, SIZES, Config, KeyRow, describe, file_lines
from kvtier.config.values import masked
from kvtier.core import terminal
from kvtier.core.terminal import rate_text, size_text
from kvtier.tiers.seam import NO_URL, Value


def value_text(key: str, value: Value) -> str:
    """Write a key's value: ``225485783040`` of ``ram_bytes`` as ``210 GiB``, a URL masked."""
    if isinstance(value, str):
        return str(masked(value))
    if key.endswith("bytes_per_second"):
        return rate_text(value)
    if "bytes" in key:
        return "no limit" if value >= UNLIMITED else size_text(value)
    return f"{value:,}"


def table(plan: Plan, used: Config | None = None, columns: int | None = None) -> str:
    """Show a plan in columns: facts, settings, then tiers left out. ``used``: the configuration if
    an operator set some keys, else None."""
    settings = plan.settings if used is None else list(_used(plan, used))
    parts = ["What was found", *_rows(plan.derived, columns)]
    parts += ["", "What is set, for one store: an engine replica's (all ranks here) or a server's"]
    parts += _rows(settings, columns) if settings else ["nothing: kvtier stays off"]
    if plan.left_out:
        left_out = terminal.table(("tier", "reason"), plan.left_out, columns=columns)
        parts += ["", "Left out", *left_out]
    if plan.warnings:
        parts += ["", "Warnings", *plan.warnings]
    return "\n".join(parts)


PLANNED = "auto-config"
_YOURS = "yours"
_TIER_KEYS = ("ram_bytes", *(key.flat for key in KEYS.values() if key.about.planned))


def _used(plan: Plan, used: Config) -> Iterator[Row]:
    planned = {row.key: row for row in plan.settings}
    for key in (*_TIER_KEYS, *(key for key in planned if key not in _TIER_KEYS)):
        row, value, source = planned.get(key), used.value(key), used.source(key)
        if source not in ("default", PLANNED) and value is not None:
            would = (
                f"the plan would be {value_text(key, row.value)}" if row else "the plan has none"
            )
            yield Row(key, value, source, f"{_YOURS}; {would}")
        elif row is not None:
            yield row


def summary(plan: Plan, used: Config) -> str:
    """Summarise the plan in use, wanted tiers that it left out and why, and shared memory."""
    sizes = ", ".join(
        f"{row.key} {value_text(row.key, row.value)}"
        + (f" ({row.reason})" if row.reason.startswith(_YOURS) else "")
        for row in _used(plan, used)
    )
    left_out = [f"; {tier} left out: {why}" for tier, why in plan.left_out if why != NO_URL]
    shared = (f"; one memory: {row.value}" for row in plan.derived if row.key == "unified_memory")
    return (
        f"{sizes or 'nothing set'}{''.join(left_out)}{''.join(shared)}; 'kvtier plan' gives the "
        "reasons"
    )


def configuration_text(config: Config, chunk_tokens: int | None = None) -> str:
    """Write the keys that differ from their defaults in a line, with sources and masked passwords.
    ``chunk_tokens``: an engine's, which is told in any case."""
    told = settings_text(config) or "nothing set"
    if chunk_tokens is not None and f"chunk_tokens={chunk_tokens} " not in told:
        grown = "" if chunk_tokens == config.engine.chunk_tokens else ", in whole blocks"
        told = f"chunk_tokens={chunk_tokens} ({config.source('chunk_tokens')}{grown}), {told}"
    return f"{told}; all else by default"


def settings_text(config: Config) -> str:
    """Write the keys that are set, each with its source. Sizes are as people write them."""
    rows = [row for row in describe(config) if row.key in config.sources and row.value is not None]
    return ", ".join(f"{row.key}={_shown(row)} ({row.source})" for row in rows)


def _shown(row: KeyRow) -> str:
    if row.unit in SIZES and isinstance(row.value, int):
        return size_text(row.value)
    return str(row.value)


def _rows(rows: Iterable[Row], columns: int | None) -> list[str]:
    cells = [(row.key, value_text(row.key, row.value), row.source, row.reason) for row in rows]
    return terminal.table(("key", "value", "source", "reason"), cells, columns=columns)


def next_step(plan: Plan) -> str:
    if not plan.settings:
        return (
            "free some RAM or take a smaller model, and plan again ('--ram 64GiB' shows what "
            "more RAM would give)"
        )
    if not any(row.key == "model" for row in plan.derived):
        return (
            "plan again with --model, because sizes and break-even lengths follow from the "
            "model's KV"
        )
    return (
        "KVTIER_AUTO=true has an engine or a server do so at its start; or 'kvtier plan ... --yaml "
        "> /etc/kvtier.yaml' writes it to a file, and KVTIER_CONFIG_FILE=/etc/kvtier.yaml uses it"
    )


def as_yaml(plan: Plan) -> str:
    head = "# Written by 'kvtier plan --yaml' for this machine, model and layout"
    lines = [
        f"{head}; plan again when one changes.",
        *file_lines(
            (row.key, row.value, f"{value_text(row.key, row.value)}: {row.reason} [{row.source}]")
            for row in plan.settings
        ),
        *(f"# left out: {tier}: {reason}" for tier, reason in plan.left_out),
        *(f"# warning: {warning}" for warning in plan.warnings),
    ]
    return "\n".join(line.replace("\n", " ") for line in lines)


def as_json(plan: Plan) -> str:
    left_out = [{"tier": tier, "reason": reason} for tier, reason in plan.left_out]
    return json.dumps({**asdict(plan), "left_out": left_out, "values": plan.values()}, indent=2)
