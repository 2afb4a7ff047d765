"""Configuration keys as flags of a command: ``--ram-bytes 4GiB``. A flag beats the environment and
files. A command has those that count for it, and its ``--help`` shows those that most give."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from kvtier.config.keys import KEYS
from kvtier.config.load import typed

_DEST = "key_"
Whose = Literal["engine", "server", "both"]
_NOT_OF = {
    "server": {
        *("chunk_tokens", "save_decode", "spans", "load_timeout_ms", "namespace"),
        *("server", "server_timeout_ms"),
    },
    "engine": {
        *("admin", "admin_token_file", "admin_engines"),
        *("slot_bytes", "server_events", "namespace_percent"),
    },
    "both": set[str](),
}
"""Keys without an effect, by the process that they do not count for."""
_ELSEWHERE = {
    "server": "is an engine's: give it to kvtier launch",
    "engine": "is a server's: give it to kvtier serve, or in the environment",
}
_USUAL = {
    *("auto", "server", "server_token_file", "admin", "admin_token_file", "chunk_tokens"),
    *("namespace", "encryption_key_file", "record", "log_level"),
}


def add_key_flags(parser: argparse.ArgumentParser, whose: Whose = "both") -> None:
    keys = parser.add_argument_group(
        "keys", "sizes such as 4GiB or 512MB; --help-all shows every key"
    )
    for flat, key in KEYS.items():
        flag = "--" + flat.replace("_", "-")
        if flat in _NOT_OF[whose]:
            elsewhere = _ELSEWHERE[whose]
            keys.add_argument(flag, action=_NotHere, const=elsewhere, help=argparse.SUPPRESS)
            continue
        usual = flat in _USUAL or (key.name in ("path", "url", "bytes") and key.section != "server")
        help_text = _about(flat) if usual else argparse.SUPPRESS
        keys.add_argument(flag, dest=f"{_DEST}{flat}", metavar=key.unit.upper(), help=help_text)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="as --help, with every key")


def _about(flat: str) -> str:
    return KEYS[flat].reason.replace("%", "%%")


def show_every_key(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.dest.startswith(_DEST):
            action.help = _about(action.dest.removeprefix(_DEST))


class _NotHere(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.error(f"{self.option_strings[0]} {self.const}")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        show_every_key(parser)
        parser.print_help()
        parser.exit()


def given_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return flat name -> what was typed. Relative paths are below the current folder."""
    given = vars(arguments).items()
    return typed(
        {
            name.removeprefix(_DEST): value
            for name, value in given
            if name.startswith(_DEST) and value is not None
        }
    )
