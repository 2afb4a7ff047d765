"""``kvtier launch -- python -m sglang.launch_server ...`` (or ``sglang serve``): the same command
with HiCache on and a kvtier server as its storage. Where no server is named, one is started beside
the engine and ends with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote

from kvtier.cli import ranks
from kvtier.cli.vllm_command import interpreter, value
from kvtier.config.keys import Config
from kvtier.core import processes
from kvtier.core.errors import ConfigError

TESTED = "0.5.23"
_MODULE = "sglang.launch_server"
_BACKEND, _EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
_PLUGIN = {
    "backend_name": "kvtier",
    "module_path": "kvtier.connectors.sglang.plugin",
    "class_name": "KVTier",
    "interface_v1": 1,
}
_PAGE_TOKENS, _FEW_TOKENS = 64, 16
_LOOK = """
import importlib.metadata as m, importlib.util as u, json
try: version = m.version("sglang")
except m.PackageNotFoundError: version = None
print(json.dumps([version, bool(u.find_spec("kvtier"))]))
"""
_LOOK_TIMEOUT_S = 60


def is_sglang(words: Sequence[str]) -> bool:
    name = Path(words[0]).name if words else ""
    by_module = re.fullmatch(r"python[\d.]*", name) and list(words[1:3]) == ["-m", _MODULE]
    return bool(by_module) or (name == "sglang" and list(words[1:2]) == ["serve"])


def refuse(words: Sequence[str]) -> None:
    """Raises ConfigError for flags with which SGLang's HiCache takes no storage of kvtier's."""
    given = value(words, _BACKEND)
    if given is not None:
        raise ConfigError(
            f"{_BACKEND} {given}: an engine has one storage; remove it, and {_EXTRA} too"
        )
    for flag in ("--dcp-size", "--decode-context-parallel-size"):
        if str(value(words, flag) or 1) != "1":
            raise ConfigError(f"{flag}: SGLang takes only files and Mooncake with it; remove it")
    for flag in ("--disaggregation-decode-enable-offload-kvcache", "--enable-kv-cache-sharding"):
        if flag in words:
            raise ConfigError(f"{flag}: SGLang takes no storage of another package with it")
    page = str(value(words, "--page-size") or _PAGE_TOKENS)
    if page.isdecimal() and int(page) < _FEW_TOKENS:
        raise ConfigError(
            f"--page-size {page}: each page is a chunk, and small ones are slow; give "
            f"{_FEW_TOKENS} or more, such as {_PAGE_TOKENS}"
        )


def verdict(words: Sequence[str], env: Mapping[str, str]) -> str:
    """A line about the SGLang that the command starts. Raises ConfigError for none, or for no
    kvtier beside it."""
    python = words[0]
    if Path(python).name == "sglang":
        script = shutil.which(python, path=env.get("PATH"))
        python = interpreter(script) if script else python
    command, clean = processes.python(python, "-c", _LOOK), processes.without_settings(env)
    try:
        done = processes.run(
            command, clean, capture_output=True, text=True, timeout=_LOOK_TIMEOUT_S, check=True
        )
        found, has_kvtier = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{python} does not tell whether it has SGLang: {error}") from error
    if found is None or not has_kvtier:
        lacks = "SGLang" if found is None else "kvtier (the wheel that make wheel builds)"
        raise ConfigError(f"{python} has no {lacks}: install it there")
    return f"SGLang {found}" + ("" if found == TESTED else f" (not tested: {TESTED} is)")


def with_storage(words: Sequence[str], config: Config, server: str) -> list[str]:
    """The command to run. What it says itself stays."""
    keys = {key: value for key, value in _keys(config).items() if value}
    extra = json.dumps({**_PLUGIN, "server": server, **keys})
    page = [] if value(words, "--page-size") else ["--page-size", str(_PAGE_TOKENS)]
    tree = [] if "--enable-hierarchical-cache" in words else ["--enable-hierarchical-cache"]
    return [*words, *tree, *page, _BACKEND, "dynamic", _EXTRA, extra]


def _keys(config: Config) -> dict[str, object]:
    server = config.server
    return {
        "server_token_file": server.token_file,
        "server_ca": server.ca,
        "server_cert": server.cert,
        "server_key": server.key_,
        "server_unencrypted": server.unencrypted,
        "namespace": config.engine.namespace,
    }


def launch(words: Sequence[str], config: Config, more: Mapping[str, str], *, prints: bool) -> int:
    """Become the engine. Returns only where it ``prints`` the command."""
    env = processes.environment(**more)
    refuse(words)
    said, server = verdict(words, env), config.server.address
    print(f"kvtier: {said}; {_about(config)}", file=sys.stderr, flush=True)
    if prints:
        final = with_storage(words, config, server or "unix:///run/kvtier/kvtier.sock")
        print(" ".join([*(f"{name}={quote(told)}" for name, told in more.items()), join(final)]))
        return 0
    final = with_storage(words, config, server or ranks.start(env))
    try:
        processes.become(final, env)
    except OSError as error:
        raise ConfigError(f"{final[0]} cannot be run: {error}") from error


def _about(config: Config) -> str:
    if config.server.address:
        return f"its HiCache has the server {config.server.address}"
    sizes = "auto-config sizes it" if config.engine.auto else "with the sizes of kvtier serve"
    return f"its HiCache has a server that is started beside it ({sizes})"
