"""``kvtier check``: is all true that an NVMe tier's folder says? Only ``--repair`` changes any."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from kvtier.config.load import load
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.terminal import size_text
from kvtier.tiers.nvme.check import Report, check, tier_folders

_COUNTS = ("good", "corrupt", "damaged", "stale", "free")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "a tier's folder, or one that has some, or several; none: nvme_path"
    parser.add_argument("--nvme", metavar="FOLDER", help=help_text)
    parser.add_argument("--config", metavar="YAML", help="configuration file that has nvme_path")
    help_text = "make every bad slot free; without it nothing is changed"
    parser.add_argument("--repair", action="store_true", help=help_text)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list, an object a folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check. Returns 0 if nothing bad is left, else 1. Raises an error if no check is possible."""
    places = arguments.nvme or load(arguments.config).nvme.path
    if places is None:
        raise ConfigError("no folder to check: give --nvme /path, or the key nvme_path")
    reports: list[Report] = []
    refused: list[str] = []
    for folder in (each for place in places.split(",") for each in tier_folders(Path(place))):
        try:
            reports.append(check(folder, repair=arguments.repair))
        except TierError as error:
            refused.append(str(error))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(reports)).decode())
    else:
        for report in reports:
            print(_told(report))
    if any(report.bad for report in reports) and not arguments.repair:
        print("kvtier check: --repair makes the bad slots free", file=sys.stderr)
    if refused:
        raise TierError("; ".join(refused))
    return int(any(report.bad for report in reports))


def _told(report: Report) -> str:
    end = "closed cleanly" if report.closed else "not closed by its last owner"
    counts = ", ".join(f"{getattr(report, count):,} {count}" for count in _COUNTS)
    lines = [
        f"{report.path}: {report.slots:,} slots of {size_text(report.slot_bytes)}, {end}: {counts}"
    ]
    if report.repaired:
        lines.append(f"{report.repaired:,} made free")
    return "\n  ".join([*lines, *report.problems])
