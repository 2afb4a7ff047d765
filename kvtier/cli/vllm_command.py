"""vLLM's command line: which program it starts, and for which connector it asks."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.config import lmi
from kvtier.config.keys import CACHE_KEYS, Config
from kvtier.connectors.vllm import CONNECTOR, LMCACHE
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact
from kvtier.core.terminal import size_text

API_SERVER = "vllm.entrypoints.openai.api_server"
TRANSFER_FLAG = "--kv-transfer-config"
_MULTI = "MultiConnector"
_OWN_OFFLOADING = "--kv-offloading-size"
_POLICY = "kv_load_failure_policy"
ALLOCATOR, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
CUMEM = "--enable-cumem-allocator"
_STILL = ("--enable-sleep-mode", CUMEM)
"""Flags with each of which the KV cache lies in memory of another allocator."""


class Command(NamedTuple):
    """Command that starts vLLM. ``arguments`` follow ``program``. ``python`` runs it."""

    program: list[str]
    arguments: list[str]
    python: str


def understood(
    words: Sequence[str], path: str | None = None, script: str = "vllm", module: str = API_SERVER
) -> Command:
    """Parse a command. Raises ConfigError for one that does not start the server."""
    name = Path(words[0]).name if words else ""
    if name == script and words[1:2] == ["serve"]:
        program = shutil.which(words[0], path=path)
        if program is None:
            raise ConfigError(
                f"{words[0]}: no such program; install it, or activate the environment that has it"
            )
        return Command([program, "serve"], list(words[2:]), interpreter(program))
    if re.fullmatch(r"python[\d.]*", name) and list(words[1:3]) == ["-m", module]:
        return Command(list(words[:3]), list(words[3:]), words[0])
    given = " ".join(words) or "nothing"
    raise ConfigError(
        f"the command {given!r} was given: expected {script} serve MODEL ..., or python "
        f"-m {module} ..."
    )


def interpreter(script: str) -> str:
    """Return the Python in a script's first line, or this process's if it has none."""
    with open(script, "rb") as file:
        first = file.readline(512).decode(errors="replace")
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or "python" not in first:
        return sys.executable
    return words[1] if Path(words[0]).name == "env" and len(words) > 1 else words[0]


def transfer(arguments: Sequence[str], replaces: bool) -> list[str]:
    """Return a log line about the connector that the command names. Raises ConfigError if it is not
    kvtier's, because an engine has one connector."""
    if value(arguments, _OWN_OFFLOADING) is not None:
        raise _own_offloading(_OWN_OFFLOADING)
    given = named_connector(arguments)
    if given is None:
        return [f"{CONNECTOR} added"]
    name = _name(given)
    if name == CONNECTOR:
        return [f"{CONNECTOR} as the command says"]
    if name == LMCACHE and replaces:
        return [f"{CONNECTOR} in the place of {LMCACHE}"]
    if line := _secondary(given):
        return [line]
    if _is_beside(given):
        others = ", ".join(child for child in _children(given) if child != CONNECTOR) or "no other"
        return [f"{CONNECTOR} beside {others}", *_failing(given)]
    hint = (
        f", or set KVTIER_REPLACE_LMCACHE=1 to have {LMCACHE} served by kvtier"
        if name == LMCACHE
        else f", or name both in a {_MULTI} (deploy/disaggregated)"
    )
    raise ConfigError(
        f"the command asks for the connector {name!r}, and an engine has one: remove "
        f"{TRANSFER_FLAG}{hint}"
    )


def recomputing(arguments: Sequence[str]) -> list[str]:
    """Add kvtier's failure policy to vLLM's arguments if kvtier is one of a MultiConnector's: only
    a connector alone sets the policy itself. A policy that the command gives stays."""
    given = named_connector(arguments)
    if given is None or not _is_beside(given) or _POLICY in given:
        return list(arguments)
    transfer = json.dumps({**given, _POLICY: "recompute"})
    return [*_without_transfer(arguments), TRANSFER_FLAG, transfer]


def _is_beside(given: Mapping[str, Any]) -> bool:
    return _name(given) == _MULTI and CONNECTOR in _children(given)


def _failing(given: Mapping[str, Any]) -> list[str]:
    policy = given.get(_POLICY, "fail, vLLM's default")
    if policy == "recompute":
        return []
    ends = "a request whose cached KV cannot be loaded ends with an error"
    return [f"{_POLICY} is {policy}: {ends}; 'recompute' beside 'kv_connector' computes it"]


def _without_transfer(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    follows = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if not follows and name.replace("_", "-") != TRANSFER_FLAG:
            kept.append(word)
        follows = not follows and name.replace("_", "-") == TRANSFER_FLAG and not equals
    return kept


def refuse_own_offloading(env: Mapping[str, str]) -> None:
    """Raise ConfigError if LMI's options ask for vLLM's own offloading."""
    given = lmi.option("kv_offloading_size", env)
    if given is not None:
        raise _own_offloading(given.source)


def refuse_expandable_segments(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise ConfigError if torch's allocator may move the KV cache: vLLM refuses to start with any
    connector then. vLLM looks at one variable, for these very letters."""
    told = env.get(ALLOCATOR, "")
    if EXPANDABLE in told and not has_own_allocator(arguments):
        raise ConfigError(
            f"{ALLOCATOR}={told}: vLLM refuses {EXPANDABLE} beside any connector. Take it out, "
            f"or give {' or '.join(_STILL)}"
        )


def has_own_allocator(arguments: Sequence[str]) -> bool:
    return any(value(arguments, flag) not in (None, False) for flag in _STILL)


def _own_offloading(source: str) -> ConfigError:
    return ConfigError(
        f"{source} asks for vLLM's own offloading, which silently replaces kvtier's connector: "
        "remove it"
    )


def named_connector(arguments: Sequence[str]) -> Mapping[str, Any] | None:
    """Read the KV transfer configuration of arguments or ``--config`` file, however it is written,
    or None. Raises ConfigError if it names no connector."""
    dotted = {part: given for name, part, given in _flags(arguments) if name == TRANSFER_FLAG}
    if dotted.get("kv-connector"):
        return {"kv_connector": dotted["kv-connector"]}
    if dotted:
        return _transfer_config(dotted.get("", "{}"))
    in_file = _in_file(arguments, TRANSFER_FLAG)
    return None if in_file is None else _transfer_config(in_file)


def value(arguments: Sequence[str], flag: str) -> Any:
    """Read a vLLM flag's value on the command line or in the ``--config`` file, or None."""
    for name, part, given in _flags(arguments):
        if name == flag and not part:
            return given
    return None if flag == "--config" else _in_file(arguments, flag)


def given(arguments: Sequence[str], names: Sequence[str]) -> Any:
    found = (value(arguments, name) for name in names)
    return next((one for one in found if one is not None), None)


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each word as a flag: its name, the part behind a dot in it, and its value."""
    for word, following in pairwise([*arguments, ""]):
        name, equals, given = word.partition("=")
        name, _, part = name.replace("_", "-").partition(".")
        yield name, part, given if equals else following


def _transfer_config(given: object) -> Mapping[str, Any]:
    try:
        content: Any = json.loads(given) if isinstance(given, str) else given
        _name(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{TRANSFER_FLAG} {str(given)[:200]!r}: expected JSON with kv_connector; or remove it"
        ) from None
    else:
        return dict(content)


def _name(transfer_config: Mapping[str, Any]) -> str:
    return str(transfer_config["kv_connector"])


def _children(transfer_config: Mapping[str, Any]) -> list[Any]:
    extra = transfer_config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    return [child.get("kv_connector") for child in children or () if isinstance(child, Mapping)]


def _in_file(arguments: Sequence[str], flag: str) -> Any:
    file = value(arguments, "--config")
    if file is None:
        return None
    import yaml

    try:
        content: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"vLLM's --config {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        return None
    keys = {str(key).replace("_", "-"): given for key, given in content.items()}
    return keys.get(flag.removeprefix("--"))


_TOLD = f"{ALLOCATOR}={EXPANDABLE}"
SETTINGS = f"{CUMEM} and {_TOLD}"
_VARIABLES = (ALLOCATOR, "PYTORCH_ALLOC_CONF")


def allocator(arguments: Sequence[str], env: Mapping[str, str], shared: Fact[str]) -> str:
    """Return the arguments that vLLM's command lacks, and why. Empty if the GPU has its own memory
    or is AMD's, or torch's allocator is told already."""
    name = shared.value
    if name is None or name.startswith("AMD"):
        return ""
    if any(EXPANDABLE in env.get(variable, "") for variable in _VARIABLES):
        return ""
    lacks = _TOLD if has_own_allocator(arguments) else SETTINGS
    return (
        f"CPU and GPU share one memory ({name}) and {lacks} is not set: torch keeps what long "
        "prompts took, until the host has none left"
    )


# ---- kvtier launch --tier: vLLM's own OffloadingConnector over a kvtier server -------------------

OFFLOADING = "OffloadingConnector"
_TIER = "KVTierTier"
_POOL = "cpu_bytes_to_use"


def offloading(config: Config, server: str, pool_bytes: int) -> dict[str, Any]:
    """Make vLLM's ``--kv-transfer-config`` for its own pool of ``pool_bytes`` above ``server``."""
    entry = {"type": _TIER, "module_path": "kvtier.connectors.vllm_tier", "server": server}
    entry |= passed(config)
    extra = {"spec_name": "TieringOffloadingSpec", _POOL: pool_bytes}
    extra |= {"block_size": config.engine.chunk_tokens, "secondary_tiers": [entry]}
    return {"kv_connector": OFFLOADING, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def passed(config: Config) -> dict[str, Any]:
    """Return the given keys that a cache over the server has too."""
    return {key: config.value(key) for key in CACHE_KEYS if key in config.sources}


def _secondary(transfer: Mapping[str, Any]) -> str:
    """Return a log line about a ``--kv-transfer-config``; empty unless it names kvtier's tier."""
    extra = transfer.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping) or f"'{_TIER}'" not in str(extra.get("secondary_tiers")):
        return ""
    pool = extra.get(_POOL)
    size = size_text(pool) if isinstance(pool, int) else "no size"
    return (
        f"{OFFLOADING} over kvtier's server: vLLM brings back no more of a prompt than its own "
        f"pool holds ({_POOL}, {size}), however large the tiers below it are"
    )
