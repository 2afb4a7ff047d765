"""``kvtier launch -- vllm serve MODEL ...``: the same command with kvtier's connector in it, and no process more.

What would only fail a minute into the engine's start is looked at first: kvtier's configuration, vLLM's version, and
whether vLLM's Python can find kvtier at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.assemble import ram_bytes
from kvtier.config import KEYS, Config, Setting, describe, environment, load, replaces_lmcache
from kvtier.connectors.vllm import CONNECTOR, LMCACHE
from kvtier.errors import ConfigError
from kvtier.installed import Installed, judged, look
from kvtier.lmi import PROPERTIES_VARIABLE
from kvtier.terminal import size_text

API_SERVER = "vllm.entrypoints.openai.api_server"
TRANSFER = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "kvtier.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""With its module's path: it works where vLLM's plug-ins are switched off (VLLM_PLUGINS), too."""
_FLAG = "--kv-transfer-config"
_OWN_OFFLOADING = "--kv-offloading-size"


class Command(NamedTuple):
    """``arguments`` are vLLM's, after ``program``; ``python`` is the interpreter that will run it."""

    program: list[str]
    arguments: list[str]
    python: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvtier launch [--config YAML] [--properties FILE] [--print] -- vllm serve MODEL ..."
    parser.add_argument("--config", metavar="YAML", help="configuration file; sets KVTIER_CONFIG_FILE")
    parser.add_argument("--properties", metavar="FILE", help="LMI's serving.properties; sets KVTIER_PROPERTIES_FILE")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=f"vllm serve ..., or python -m {API_SERVER} ...")


def run(arguments: argparse.Namespace) -> int:
    """Become the engine; returns only for ``--print``. Raises ConfigError for what cannot work, before it starts."""
    files = {"KVTIER_CONFIG_FILE": arguments.config, PROPERTIES_VARIABLE: arguments.properties}
    env = environment(**{name: os.path.abspath(path) for name, path in files.items() if path})
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    config = load(env=env)
    command = understood(words, env.get("PATH"))
    found = look(command.python, env)
    said = [judged(found, command.python), *transfer(command.arguments, replaces_lmcache(env))]
    final = with_connector(command, found)
    print(f"kvtier: {'; '.join([*filter(None, said), settings(config)])}", file=sys.stderr, flush=True)
    if arguments.print:
        print(json.dumps(final))
        return 0
    try:
        os.execvpe(final[0], final, env)  # noqa: S606 - the operator's own command
    except OSError as error:
        raise ConfigError(f"{final[0]} cannot be run: {error}") from error


def understood(words: Sequence[str], path: str | None = None) -> Command:
    """The command's parts. Raises ConfigError for one that does not start vLLM's server."""
    name = Path(words[0]).name if words else ""
    if name == "vllm" and words[1:2] == ["serve"]:
        program = shutil.which(words[0], path=path)
        if program is None:
            raise ConfigError(f"{words[0]}: no such program; install vLLM, or activate the environment that has it")
        return Command([program, "serve"], list(words[2:]), _interpreter(program))
    if re.fullmatch(r"python[\d.]*", name) and list(words[1:3]) == ["-m", API_SERVER]:
        return Command(list(words[:3]), list(words[3:]), words[0])
    given = " ".join(words) or "nothing"
    raise ConfigError(
        f"kvtier launch was given {given!r}: expected vllm serve MODEL ..., or python -m {API_SERVER} ..."
    )


def _interpreter(script: str) -> str:
    """The Python in a script's first line, or ours when it has none."""
    with open(script, "rb") as file:
        first = file.readline(512).decode(errors="replace")
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or "python" not in first:
        return sys.executable
    return words[1] if Path(words[0]).name == "env" and len(words) > 1 else words[0]


def transfer(arguments: Sequence[str], replaces: bool) -> list[str]:
    """What to say of the connector that the command names itself; nothing when it names none.

    Raises ConfigError when that is not ours: an engine has one connector.
    """
    if any(word.split("=")[0].replace("_", "-") == _OWN_OFFLOADING for word in arguments):
        raise ConfigError(f"{_OWN_OFFLOADING} is vLLM's own offloading and takes the connector's place: remove it")
    given = named_connector(arguments)
    if given is None:
        return [f"{CONNECTOR} added"]
    if given == CONNECTOR:
        return [f"{CONNECTOR} as the command says"]
    if given == LMCACHE and replaces:
        return [f"{CONNECTOR} in the place of {LMCACHE}"]
    hint = f", or set KVTIER_REPLACE_LMCACHE=1 to have {LMCACHE} served by kvtier" if given == LMCACHE else ""
    raise ConfigError(f"the command asks for the connector {given!r}, and an engine has one: remove {_FLAG}{hint}")


def named_connector(arguments: Sequence[str]) -> str | None:
    """The connector in vLLM's arguments, in each way it may be written there, or in its ``--config`` file."""
    dotted: dict[str, str] = {}
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        name, _, part = name.replace("_", "-").partition(".")
        if name == _FLAG:
            dotted[part] = value if equals else following
    if not dotted:
        return _in_file(arguments)
    return dotted.get("kv-connector") or _connector_of(dotted.get("", "{}"))


def _connector_of(given: object) -> str:
    try:
        content: Any = json.loads(given) if isinstance(given, str) else given
        return str(content["kv_connector"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{_FLAG} {given!r}: expected JSON with kv_connector; or remove it") from None


def _in_file(arguments: Sequence[str]) -> str | None:
    file = _value(arguments, "--config")
    if file is None:
        return None
    import yaml

    try:
        content: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"vLLM's --config {file} cannot be read: {error}") from error
    keys = {str(key).replace("_", "-"): value for key, value in content.items()} if isinstance(content, dict) else {}
    given = keys.get(_FLAG.removeprefix("--"))
    return None if given is None else _connector_of(given)


def _value(arguments: Sequence[str], flag: str) -> str | None:
    for word, following in pairwise([*arguments, ""]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def with_connector(command: Command, found: Installed) -> list[str]:
    """The command to run. The ``vllm`` command of the CPU wheel asks for a distribution called ``vllm`` and ends, so
    there the server is run as a module."""
    program, arguments = command.program, command.arguments
    if found.package != "vllm" and program[1:] == ["serve"]:
        program = [command.python, "-m", API_SERVER]
        if arguments[:1] and not arguments[0].startswith("-"):
            arguments = ["--model", *arguments]
        elif _value(arguments, "--model") is None:
            raise ConfigError(f"with {found.package} the model comes first: vllm serve MODEL ...")
    added = [] if named_connector(arguments) else [_FLAG, json.dumps(TRANSFER)]
    return [*program, *arguments, *added]


def settings(config: Config) -> str:
    """What the cache will be, in a line."""
    if config.auto:
        asked = config.sources["auto"]
        return f"auto-config ({asked}): the engine measures the machine and logs each size with its reason"
    given = [row for row in describe(config) if row.key in config.sources]
    if not given:
        default = KEYS["ram_bytes"]["reason"].partition("none: ")[2]
        return (
            f"defaults: {size_text(ram_bytes(config))} of RAM ({default}), nothing on disk; "
            "KVTIER_AUTO=true sizes every tier, 'kvtier plan' shows how"
        )
    return ", ".join(f"{row.key}={_shown(row)} ({row.source})" for row in given)


def _shown(row: Setting) -> str:
    return size_text(row.value) if row.unit == "bytes" and isinstance(row.value, int) else str(row.value)
