"""``kvtier launch -- vllm serve MODEL ...``: the same command with kvtier's connector in it, and
without a further process. Only data-parallel ranks on this host get one beside them, a server that
they share (:mod:`kvtier.cli.ranks`), and each host of an engine over several, a server of its own.
Faults that would appear only a minute into the engine's start are checked first.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import join, quote

from kvtier.autoconfig.explain import settings_text
from kvtier.autoconfig.gpus import shared_memory
from kvtier.cli import ranks, sglang_command
from kvtier.cli.checks import Installed, look, verdict
from kvtier.cli.key_flags import add_key_flags, given_keys
from kvtier.cli.vllm_command import (
    API_SERVER,
    TRANSFER_FLAG,
    Command,
    allocator,
    named_connector,
    offloading,
    recomputing,
    refuse_expandable_segments,
    refuse_own_offloading,
    transfer,
    understood,
    value,
)
from kvtier.config.keys import KEYS, EngineSection, ServerSection
from kvtier.config.lmi import PROPERTIES_VARIABLE
from kvtier.config.load import load, replaces_lmcache
from kvtier.connectors.vllm import CONNECTOR
from kvtier.core import processes
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment
from kvtier.core.terminal import size_text
from kvtier.started import Started, require_ram
from kvtier.tiers.nvme.disks import probe_disks
from kvtier.tiers.nvme.folder import below, wait_until_free

TRANSFER = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "kvtier.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""Configuration of the connector. With the module's path it works without vLLM's plug-ins too."""
_USUAL_BLOCK_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvtier launch [--config YAML] [--properties FILE] [--print] [--tier] [--KEY VALUE ...] "
        "-- vllm serve MODEL ..."
    )
    add = parser.add_argument
    add("--config", metavar="YAML", help="configuration file; sets KVTIER_CONFIG_FILE")
    add(
        "--properties", metavar="FILE", help="LMI's serving.properties; sets KVTIER_PROPERTIES_FILE"
    )
    help_text = "print the command as a line for the shell instead of running it"
    add("--print", action="store_true", help=help_text)
    help_text = "vLLM's own OffloadingConnector, with a kvtier server as its secondary tier"
    add("--tier", action="store_true", help=help_text)
    add_key_flags(parser, "engine")
    add("command", nargs=argparse.REMAINDER, help=f"vllm serve ..., or python -m {API_SERVER} ...")


def run(arguments: argparse.Namespace) -> int:
    """Become the engine. Returns only for ``--print``. Raises ConfigError if it cannot work."""
    files = {"KVTIER_CONFIG_FILE": arguments.config, PROPERTIES_VARIABLE: arguments.properties}
    more = {name: os.path.abspath(path) for name, path in files.items() if path}
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    given = given_keys(arguments)
    started = Started(load(env=environment(**more), flags=given))
    config = started.config
    more |= {KEYS[key].variable: str(value) for key, value in given.items()}
    if sglang_command.is_sglang(words):
        return sglang_command.launch(words, config, more, prints=arguments.print)
    env = environment(**more)
    refuse_own_offloading(env)
    command = understood(words, env.get("PATH"))
    if command.program[1:] == ["serve"]:  # it imports nothing from here, its processes would
        more[processes.SAFE_PATH] = env.get(processes.SAFE_PATH, "1")
        env = environment(**more)
    refuse_chunks(command.arguments, config.engine)
    listen = ranks.listens_at(command.arguments, config.server)
    away = tried(started, wait=not arguments.print) if not listen else ()
    found = look(command.python, env)
    refuse_expandable_segments(command.arguments, env)
    command = command._replace(arguments=recomputing(command.arguments))
    tier = tier_server(command, config.server, listen, arguments) if arguments.tier else ""
    command = with_tier(command, started, tier)
    said = [verdict(found, command.python), *transfer(command.arguments, replaces_lmcache(env))]
    shares = shares_server(command, config.server)
    serves = bool(tier) and config.server.address is None
    said += [
        "" if tier else ranks_in_words(command, config.server, shares=shares),
        allocator(command.arguments, env, shared_memory()),
        settings(started, serves=shares or serves or bool(listen)),
    ]
    final = with_connector(command, found)
    warnings = (one.text for one in config.remarks if one.level >= logging.WARNING)
    for line in (*warnings, *away, "; ".join(filter(None, said))):
        print(f"kvtier: {line}", file=sys.stderr, flush=True)
    if arguments.print:
        print(*(f"{name}={quote(value)}" for name, value in more.items()), join(final))
        return 0
    if shares:
        env = dict(env) | {"KVTIER_SERVER": ranks.start(env)[0]}
    elif serves:
        ranks.start_at([tier], env, temporary=True)
    elif listen:
        print(f"kvtier: {ranks.start_here(listen, env)}", file=sys.stderr, flush=True)
    return processes.become(final, env)


def tier_server(
    command: Command, server: ServerSection, listen: Sequence[str], arguments: argparse.Namespace
) -> str:
    """Return the address of the server that is to be vLLM's secondary tier. Raises ConfigError if
    the command has a connector, or several servers."""
    if named_connector(command.arguments) is not None:
        raise ConfigError(f"--tier writes {TRANSFER_FLAG}, and the command has one: remove either")
    if listen:
        raise ConfigError(f"--tier: one server is expected, and server_address={server.address}")
    if arguments.print and server.address is None:
        raise ConfigError("--tier --print: give --server too, because nothing is started to print")
    return server.address or ranks.new_address()


def with_tier(command: Command, started: Started, server: str) -> Command:
    """Add vLLM's own connector over ``server``, if there is one, to the command. vLLM's pool has
    half of what ``ram_bytes`` gives the server."""
    if not server:
        return command
    given = offloading(started.config, server, started.ram_bytes // 2)
    return command._replace(arguments=[*command.arguments, TRANSFER_FLAG, json.dumps(given)])


def refuse_chunks(arguments: Sequence[str], engine: EngineSection) -> None:
    """Raise ConfigError for chunks that are not whole blocks of the engine. If the command names no
    block, vLLM's own choice is a multiple of 16."""
    given = value(arguments, "--block-size") or ""
    block = int(str(given)) if str(given).isdecimal() and int(str(given)) else _USUAL_BLOCK_TOKENS
    if engine.chunk_tokens % block:
        raise ConfigError(
            f"chunk_tokens={engine.chunk_tokens} ({engine.source('chunk_tokens')}) is no multiple "
            f"of the engine's block of {block} tokens; give a multiple of it, such as "
            f"{max(block, engine.chunk_tokens // block * block)}"
        )


def tried(started: Started, *, wait: bool) -> Iterable[str]:
    """Try the engine's places, and tell those away for now. Raises ConfigError or TierError for a
    fault that stays. ``wait``: for a process that still has the NVMe folder."""
    auto, server = started.config.engine.auto, started.config.server.address
    # auto-config checks its own sizes, and a server has the RAM tier of its engines
    if not (auto or server):
        require_ram(started.ram_bytes, source=started.config.ram.source("bytes_"))
    started.require_record()
    away = started.try_engine_start().values()
    folders = started.nvme_folders()
    if auto and server is None and not folders:
        folders = [Path(disk.path) for disk in probe_disks()]
    if wait:
        wait_until_free(each for place in folders for each in (place, *(below(place, "*/") or ())))
    return away


def shares_server(command: Command, server: ServerSection) -> bool:
    """Whether several ranks on this host would each make a store. False if the command names the
    connector itself, because its settings count then."""
    told = server.address is not None or named_connector(command.arguments) is not None
    return not told and ranks.local_ranks(command.arguments) > 1


def ranks_in_words(command: Command, server: ServerSection, *, shares: bool) -> str:
    """Return a line about several ranks here; empty if there are none, or a server is named."""
    count = ranks.local_ranks(command.arguments)
    if shares:
        return f"{count} data-parallel ranks share a server"
    if count > 1 and server.address is None:
        return (
            f"{count} data-parallel ranks keep a store each: start kvtier serve and set "
            "KVTIER_SERVER=unix:///path for one that they share"
        )
    return ""


def with_connector(command: Command, found: Installed) -> list[str]:
    """Return the command to run. The CPU wheel's ``vllm`` command looks for a distribution called
    ``vllm`` and fails, so there the server is run as a module."""
    program, arguments = command.program, command.arguments
    if found.package != "vllm" and program[1:] == ["serve"]:
        program = [command.python, "-m", API_SERVER]
        if arguments[:1] and not arguments[0].startswith("-"):
            arguments = ["--model", *arguments]
        elif value(arguments, "--model") is None:
            raise ConfigError(f"with {found.package} the model comes first: vllm serve MODEL ...")
    added = [] if named_connector(arguments) else [TRANSFER_FLAG, json.dumps(TRANSFER)]
    return [*program, *arguments, *added]


def settings(started: Started, *, serves: bool) -> str:
    """Describe the cache's settings in a line. ``serves``: launch starts the engine's server."""
    config = started.config
    if config.engine.auto and (serves or not config.server.here):
        return (
            f"auto-config ({config.sources['auto']}): the {'server' if serves else 'engine'} "
            "measures the machine and logs each size with its reason"
        )
    default = KEYS["ram_bytes"].reason.partition("none: ")[2]
    return settings_text(config) or (
        f"defaults: {size_text(started.ram_bytes)} of RAM ({default}), nothing on disk; "
        "KVTIER_AUTO=true sizes every tier, 'kvtier plan' shows how"
    )
