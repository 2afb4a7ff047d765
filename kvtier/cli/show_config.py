"""``kvtier config``: every key with its value here and now, its unit and its source."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

from kvtier.cli.key_flags import add_key_flags, given_keys
from kvtier.config.keys import KEYS, SIZES, Config, KeyRow, describe, file_lines, tell
from kvtier.config.load import load
from kvtier.config.values import masked
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text, table, width
from kvtier.started import Started
from kvtier.tiers.registry import TIERS

_HEADS = ("key", "value", "unit", "source", "what for")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvtier config [--config YAML] [--ranks N] [--yaml | --json] [--KEY VALUE ...]"
    parser.add_argument(
        "--config", metavar="YAML", help="configuration file; beats KVTIER_CONFIG_FILE"
    )
    help_text = "worker ranks, for LMCache files: their sizes are per worker (default: 1)"
    parser.add_argument("--ranks", type=int, default=1, help=help_text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--yaml", action="store_true", help="print a file that gives this configuration"
    )
    form.add_argument("--json", action="store_true", help="print every key as JSON")
    add_key_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    if arguments.ranks < 1:
        raise ConfigError(f"--ranks {arguments.ranks}: expected 1 or more")
    config = load(arguments.config, flags=given_keys(arguments), ranks=arguments.ranks)
    tell(config.remarks)
    rows, started = describe(config), Started(config)
    if arguments.yaml:
        lines = [(row.key, row.value, f"{row.unit}; {row.source}; {row.reason}") for row in rows]
        print("\n".join(file_lines(lines)))
    elif arguments.json:
        # ``value`` is what was set (null: nothing), ``effective`` what follows from it
        told = [row._asdict() | {"effective": effective(started, row.key)} for row in rows]
        print(json.dumps(told, indent=2))
    else:
        cells = [(row.path, _shown(started, row), row.unit, row.source, row.reason) for row in rows]
        print("\n".join(table(_HEADS, cells, columns=width())))
    return 0


def effective(started: Started, key: str) -> Any:
    """Return the value for an engine started here; None if it has none or gets it elsewhere."""
    value = masked(started.config.value(key))
    if value is not None or _elsewhere(started.config, key):
        return value
    if key == "ram_bytes":
        return started.ram_bytes
    decided = {tier.name: own.decided() for tier, own in started.tiers}
    return decided.get(KEYS[key].section, {}).get(KEYS[key].field)


def _elsewhere(config: Config, key: str) -> str:
    """Return who else decides about a key that is not set; empty if this configuration does."""
    if key == "ram_bytes" and config.server.here:
        return "the server's"
    section = KEYS[key].section
    if section in TIERS and not config.tiers[section].configured:
        return "no such tier" if key == TIERS[section].place else "-"
    measured = key == "ram_bytes" or KEYS[key].about.planned == "measured"
    return "auto-config, at the start" if config.engine.auto and measured else ""


def _shown(started: Started, row: KeyRow) -> str:
    used = effective(started, row.key)
    if used is None:
        return _elsewhere(started.config, row.key) or row.reason.partition("none: ")[2] or "-"
    if row.unit in SIZES and isinstance(used, int):
        return size_text(used)
    return str(used).lower() if isinstance(used, bool) else str(used)
