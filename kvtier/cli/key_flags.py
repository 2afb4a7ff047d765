"""Configuration keys as flags of a command: ``--ram-bytes 4GiB``. A flag beats the environment and
files."""

from __future__ import annotations

import argparse
from typing import Any

from kvtier.config.keys import KEYS
from kvtier.config.load import typed

_DEST = "key_"


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    keys = parser.add_argument_group("keys; sizes such as 4GiB or 512MB")
    for key, about in KEYS.items():
        keys.add_argument(
            "--" + key.replace("_", "-"),
            dest=f"{_DEST}{key}",
            metavar=about.unit.upper(),
            help=about.reason.replace("%", "%%"),
        )


def given_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """Flat name -> what was typed, for the keys that were given. Relative paths are below the
    current folder."""
    given = vars(arguments).items()
    return typed(
        {
            name.removeprefix(_DEST): value
            for name, value in given
            if name.startswith(_DEST) and value is not None
        }
    )
