"""The ``kvtier`` command. A subcommand is one line of :data:`COMMANDS`; its module is imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import kvtier
from kvtier.errors import KVTierError


class Command(NamedTuple):
    """``add_arguments`` declares the flags, ``run`` does the work and gives the exit status."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _module(name: str, part: str = "") -> Callable[[], Command]:
    """A subcommand whose module, or ``part`` of it, has the two functions; imported only when it is asked for."""

    def find() -> Command:
        module: Any = importlib.import_module(name)
        found = getattr(module, part) if part else module
        return Command(found.add_arguments, found.run)

    return find


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    from kvtier.config import KEYS

    parser.add_argument("--file", metavar="YAML", help="configuration file; beats KVTIER_CONFIG_FILE")
    parser.add_argument("--ranks", type=int, default=1, help="worker ranks, for LMCache files (sizes are per worker)")
    parser.add_argument("--yaml", action="store_true", help="print a file that gives this configuration")
    for key, about in KEYS.items():
        flag = "--" + key.replace("_", "-")
        parser.add_argument(
            flag, dest=f"key_{key}", metavar=about["unit"].upper(), help=about["reason"].replace("%", "%%")
        )


def _show_config(arguments: argparse.Namespace) -> int:
    import logging

    from kvtier.config import describe, load
    from kvtier.remarks import tell

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    given = vars(arguments)
    flags = {name.removeprefix("key_"): value for name, value in given.items() if name.startswith("key_")}
    config = load(arguments.file, flags=flags, ranks=arguments.ranks)
    tell(config.remarks)
    for row in describe(config):
        if arguments.yaml:
            print(f"{row.key}: {json.dumps(row.value)}  # {row.unit}; {row.source}; {row.reason}")
        else:
            shown = "none" if row.value is None else row.value
            print(f"{row.key:16} {shown!s:24} {row.unit:8} {row.source:16} {row.reason}")
    return 0


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """For a command without flags."""


def _show_version(arguments: argparse.Namespace) -> int:
    print(f"kvtier {kvtier.__version__}")
    return 0


COMMANDS: dict[str, tuple[str, Callable[[], Command]]] = {
    "bench long-doc-qa": (
        "time to first token on long documents, with and without kvtier",
        _module("kvtier.bench.long_doc_qa"),
    ),
    "plan": ("what auto-config would set on this machine, and why", _module("kvtier.autoconfig.command")),
    "config": (
        "print the effective configuration and where each value came from",
        lambda: Command(_config_arguments, _show_config),
    ),
    "doctor": ("is everything here as an engine with kvtier needs it? exit status 1 if not", _module("kvtier.doctor")),
    "launch": ("run vllm serve with kvtier in it: kvtier launch -- vllm serve MODEL ...", _module("kvtier.launch")),
    "check": ("verify every slot of an NVMe tier that is not in use; --repair frees bad ones", _module("kvtier.fsck")),
    "clear": ("make a server forget a tenant, or everything", _module("kvtier.operate", "ClearCommand")),
    "stats": ("what a server holds and does; --watch for rates", _module("kvtier.operate", "StatsCommand")),
    "serve": ("one cache for several engines, on this host and others", _module("kvtier.serve")),
    "version": ("print kvtier's version", lambda: Command(_no_arguments, _show_version)),
}
"""Words on the command line -> (help, how to find the command)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: the command's; 2 for what the operator gave wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, leaves = _parsers()
    for name, (_, find) in COMMANDS.items():
        if words[: len(name.split())] == name.split():
            command = find()
            command.add_arguments(leaves[name])
            arguments = leaves[name].parse_args(words[len(name.split()) :])
            return _run(command, arguments)
    parser.parse_args(words)
    parser.print_help()
    return 2


def _run(command: Command, arguments: argparse.Namespace) -> int:
    try:
        return command.run(arguments)
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole tree of parsers, and each command's own by its words. Two words make a group (``bench``)."""
    root = argparse.ArgumentParser(prog="kvtier", description=(kvtier.__doc__ or "").partition("\n")[0])
    branches = {"": root.add_subparsers(metavar="COMMAND")}
    leaves = {}
    for name, (help_text, _) in COMMANDS.items():
        group, _, leaf = name.rpartition(" ")
        if group not in branches:
            under = branches[""].add_parser(group, help=f"{group} ...")
            branches[group] = under.add_subparsers(metavar="COMMAND", required=True)
        leaves[name] = branches[group].add_parser(leaf, help=help_text, description=help_text)
    return root, leaves


if __name__ == "__main__":
    sys.exit(main())
