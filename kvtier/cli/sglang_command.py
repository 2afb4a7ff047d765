"""``kvtier launch -- python -m sglang.launch_server ...`` (or ``sglang serve``): the same command
with HiCache on and a kvtier server as its storage. Where no server is named, one is started beside
the engine and ends with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote

from kvtier.autoconfig.model import usual
from kvtier.autoconfig.plan import below_hicache
from kvtier.cli import ranks
from kvtier.cli.checks import look, planned
from kvtier.cli.vllm_command import given, passed, understood, value
from kvtier.config.keys import Config
from kvtier.core import processes
from kvtier.core.errors import ConfigError

TESTED = "0.5.23"
_SCRIPT, _MODULE = "sglang", "sglang.launch_server"
_BACKEND, _EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
_PLUGIN = {
    "backend_name": "kvtier",
    "module_path": "kvtier.connectors.sglang",
    "class_name": "KVTier",
}
_PRINTED = "unix:///run/kvtier/kvtier.sock"
_PAGE_TOKENS, _FEW_TOKENS = 64, 16
_OTHERS = "SGLang takes no storage of another package with it; remove it"
_NOT_WITH_US = {
    _BACKEND: f"an engine has one storage; remove it, and {_EXTRA} too",
    "--disaggregation-decode-enable-offload-kvcache": _OTHERS,
    "--enable-kv-cache-sharding": _OTHERS,
    **dict.fromkeys(("--dcp-size", "--decode-context-parallel-size"), _OTHERS),
}


def is_sglang(words: Sequence[str]) -> bool:
    return [*words[2:3]] == [_MODULE] or [Path(one).name for one in words[:1]] == [_SCRIPT]


def refuse(words: Sequence[str]) -> None:
    """Raise ConfigError for flags with which SGLang's HiCache takes no storage of kvtier's."""
    for flag, why in _NOT_WITH_US.items():
        if (told := value(words, flag)) is not None and str(told) != "1":
            raise ConfigError(f"{flag}: {why}")
    page = str(value(words, "--page-size") or _PAGE_TOKENS)
    if page.isdecimal() and int(page) < _FEW_TOKENS:
        raise ConfigError(f"--page-size {page}: small chunks are slow; give {_FEW_TOKENS} or more")


def verdict(words: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a line about the SGLang that the command starts. Raises ConfigError for none, or for
    no kvtier beside it."""
    python = understood(words, env.get("PATH"), _SCRIPT, _MODULE).python
    found = look(python, env)
    if found.sglang is None or not found.kvtier:
        lacks = "kvtier (the wheel that make wheel builds)" if found.sglang else "SGLang"
        raise ConfigError(f"{python} has no {lacks}: install it there")
    tested = "" if found.sglang == TESTED else f" (not tested: {TESTED} is)"
    return f"SGLang {found.sglang}{tested}"


def server_ram(words: Sequence[str], config: Config) -> tuple[int | None, str]:
    """Return the RAM of the server beside the engine, or None for its own choice, and why."""
    if "ram_bytes" in config.sources:
        return None, f"the RAM of {config.sources['ram_bytes']}"
    if value(words, "--hicache-host-memory-mode") == "buffer_only":
        return None, "its RAM is the cache, because SGLang's own (L2) is a buffer only"
    if config.engine.auto:
        config, _ = planned(config, usual("a server is told no model"), server=True)
    count = str(given(words, ("--tp-size", "--tensor-parallel-size", "--tp")))
    return below_hicache(int(count) if count.isdecimal() else 1, has_disk=bool(config.nvme.path))


def launch(words: Sequence[str], config: Config, more: Mapping[str, str], *, prints: bool) -> int:
    """Become the engine, or stay the parent of one and of its server: SGLang kills its children."""
    env, server, supervisor = processes.environment(**more), config.server.address, None
    refuse(words)
    found, said = verdict(words, env), f"the server {server}"
    if server is None:
        size, why = server_ram(words, config)
        said = f"a server that is started beside it: {why}"
        sized = {} if size is None else {"KVTIER_RAM_BYTES": f"{size}B"}
        server, supervisor = (_PRINTED, None) if prints else ranks.start(env | sized)
    print(f"kvtier: {found}; its HiCache has {said}", file=sys.stderr, flush=True)
    extra = json.dumps({**_PLUGIN, "server": server, **passed(config)})
    page = [] if value(words, "--page-size") else ["--page-size", str(_PAGE_TOKENS)]
    final = [*words, "--enable-hierarchical-cache", *page, _BACKEND, "dynamic", _EXTRA, extra]
    if prints:
        print(*(f"{name}={quote(told)}" for name, told in more.items()), join(final))
        return 0
    if supervisor is None or (status := processes.parent()) is None:
        processes.become(final, env)
    supervisor.terminate()
    supervisor.wait()
    return status
