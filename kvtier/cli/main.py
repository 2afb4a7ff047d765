"""The ``kvtier`` command. Subcommands are in :data:`COMMANDS`, and imported when they run."""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import kvtier
from kvtier.core.errors import ConfigError, KVTierError
from kvtier.core.extras import explained
from kvtier.core.processes import environment
from kvtier.core.terminal import Parser, nearest, size_text

_OPERATOR_ERROR = 2
_CLOSED_PIPE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT
_VERSION = f"kvtier {kvtier.__version__}"


class VersionCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add nothing: the command has no arguments."""

    @staticmethod
    def run(_: argparse.Namespace) -> int:
        print(_VERSION)
        return 0


class Subcommand(NamedTuple):
    place: str
    """Name of a module of kvtier, or of a class in one behind a colon, with ``add_arguments`` and
    ``run``, which returns the exit status."""
    help: str


COMMANDS = {
    "bench long-doc-qa": Subcommand(
        "bench.long_doc_qa.run", "time to first token on long documents, with and without kvtier"
    ),
    "bench multi-turn": Subcommand(
        "bench.multi_turn.run",
        "time to first token in conversations on two engines behind a router, with and without "
        "kvtier",
    ),
    "bench queue": Subcommand(
        "bench.queue.run",
        "time to first token behind a queue of engines, by eviction policy; simulated",
    ),
    "bench model": Subcommand(
        "bench.model", "make a small model with random weights, which vLLM serves"
    ),
    "bench spans": Subcommand(
        "bench.spans.run",
        "time to first token of prompts with retrieved documents, beside agreement of answers",
    ),
    "plan": Subcommand("autoconfig.command", "what auto-config would set on this machine, and why"),
    "config": Subcommand(
        "cli.show_config", "print the effective configuration and where each value came from"
    ),
    "doctor": Subcommand(
        "cli.doctor", "is everything here as an engine with kvtier needs it? exit status 1 if not"
    ),
    "launch": Subcommand(
        "cli.launch", "run vllm serve with kvtier in it: kvtier launch -- vllm serve MODEL ..."
    ),
    "check": Subcommand(
        "cli.operate:CheckCommand",
        "verify every slot of an NVMe tier that is not in use; --repair frees bad ones",
    ),
    "clear": Subcommand(
        "cli.operate:ClearCommand", "make a server drop a tenant's chunks, or all chunks"
    ),
    "simulate": Subcommand(
        "bench.traces.commands.simulate",
        "what caches of given sizes would have hit of recorded requests",
    ),
    "replay": Subcommand(
        "bench.traces.commands.replay",
        "send recorded requests to a running server, with real bytes",
    ),
    "stats": Subcommand("cli.top:StatsCommand", "what a server holds and does"),
    "top": Subcommand(
        "cli.top", "what a server holds and does, as it changes, drawn in the terminal"
    ),
    "serve": Subcommand("cli.serve", "one cache for several engines, on this host and others"),
    "token": Subcommand(
        "cli.operate:TokenCommand",
        "print a new random token, or the one made of it that only reads the metrics",
    ),
    "warm": Subcommand(
        "extensions.spans.warm", "have a running engine compute documents, so that they are cached"
    ),
    "version": Subcommand("cli.main:VersionCommand", "print kvtier's version"),
}
"""Subcommands by their words."""
_COMPLETING = "_ARGCOMPLETE"
_LEAST_ADDRESS_BYTES = 512 << 20
_ADDRESSES = (
    "give at least 512 MiB of address space (ulimit -v) beside what ram_bytes says, or no limit"
)
_KEY_NAMED = {"record": "; recording is a key: engine.record, or --record FOLDER of serve"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 2 for wrong input, 130 after ^C, 141 when the
    reader of standard output went away (``| head``), as for a program that a signal ended."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would then report the error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(words: list[str]) -> int:
    parsers = _parsers()
    if _COMPLETING in environment():
        _complete(parsers)
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        return _no_command(parsers, words)
    try:
        _require_addresses()
        command = _found(COMMANDS[name].place)
        command.add_arguments(parsers[name])
        return int(command.run(parsers[name].parse_args(words[len(name.split()) :])))
    except KVTierError as error:
        return _told(str(error))
    except MemoryError:
        return _told(f"no memory; {_ADDRESSES}")
    except ModuleNotFoundError as error:
        if (what := explained(error)) is None:
            raise
        return _told(what)
    except OSError as error:
        if error.filename is None:  # it is about no file or folder that the operator named
            raise
        return _told(f"{error.filename}: {error.strerror}")


def _complete(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Tell a shell what may follow, and end. Nothing happens without argcomplete."""
    with suppress(ModuleNotFoundError):
        import argcomplete

        from kvtier.cli.key_flags import show_every_key

        line = " ".join(environment().get("COMP_LINE", "").split()[1:])
        named = [name for name in COMMANDS if f"{line} ".startswith(f"{name} ")]
        for name in named:
            _found(COMMANDS[name].place).add_arguments(parsers[name])
            show_every_key(parsers[name])
        argcomplete.autocomplete(parsers[""])


def _require_addresses() -> None:
    """Raise ConfigError if so few addresses are allowed that numpy would hang or fail."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < _LEAST_ADDRESS_BYTES:
        raise ConfigError(f"RLIMIT_AS is {size_text(limit)}: {_ADDRESSES}")


def _found(place: str) -> Any:
    module, _, part = place.partition(":")
    found = importlib.import_module(f"kvtier.{module}")
    return getattr(found, part) if part else found


def _no_command(parsers: Mapping[str, argparse.ArgumentParser], words: list[str]) -> int:
    group = words[0] if words and words[0] in parsers else ""
    tried = words[1 if group else 0 :]
    known = sorted(
        {each.removeprefix(group).split()[0] for each in COMMANDS if each.startswith(group)}
    )
    if tried and not tried[0].startswith("-"):
        key = _KEY_NAMED.get(tried[0], "")
        near = key or nearest(tried[0], known)
        parsers[group].error(f"no command {tried[0]!r}{near}; there are {', '.join(known)}")
    parsers[""].parse_args(words)
    parsers[""].print_help()
    return _OPERATOR_ERROR


def _told(what: str) -> int:
    print(f"kvtier: {what}", file=sys.stderr)
    return _OPERATOR_ERROR


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """Make every parser, by words: "" (the whole command), groups such as ``bench``, commands."""
    root = Parser(prog="kvtier", description=(kvtier.__doc__ or "").partition("\n")[0])
    root.add_argument("--version", action="version", version=_VERSION)
    parsers: dict[str, argparse.ArgumentParser] = {"": root}
    branches: dict[str, Any] = {"": root.add_subparsers(metavar="COMMAND")}
    for name, (_, help_text) in COMMANDS.items():
        group, _, leaf = name.rpartition(" ")
        if group not in branches:
            inside = ", ".join(
                each.split()[-1] for each in COMMANDS if each.startswith(f"{group} ")
            )
            listed = f"benchmarks: {inside}"
            parsers[group] = branches[""].add_parser(group, help=listed, description=listed)
            branches[group] = parsers[group].add_subparsers(metavar="COMMAND", required=True)
        parsers[name] = branches[group].add_parser(leaf, help=help_text, description=help_text)
    return parsers
