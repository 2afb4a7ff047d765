"""``kvtier launch -- python -m sglang.launch_server ...`` (or ``sglang serve``): the same command
with HiCache on and a kvtier server as its storage. Where no server is named, one is started beside
the engine and ends with it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote

from kvtier.cli import ranks
from kvtier.cli.checks.installed import look
from kvtier.cli.secondary import passed
from kvtier.cli.vllm_command import given, interpreter, value
from kvtier.config.keys import Config
from kvtier.core import processes
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text
from kvtier.tiers.nvme.disks import probe_disks

TESTED = "0.5.23"
_BACKEND, _EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
_PLUGIN = {
    "backend_name": "kvtier",
    "module_path": "kvtier.connectors.sglang",
    "class_name": "KVTier",
}
_PAGE_TOKENS, _FEW_TOKENS = 64, 16
_OTHERS = "SGLang takes no storage of another package with it; remove it"
_NOT_WITH_US = {
    _BACKEND: f"an engine has one storage; remove it, and {_EXTRA} too",
    "--disaggregation-decode-enable-offload-kvcache": _OTHERS,
    "--enable-kv-cache-sharding": _OTHERS,
}
_BOUNCE_BYTES = 1 << 30
"""RAM of a server for each rank whose host memory holds the same pages: two batches, and more."""


def is_sglang(words: Sequence[str]) -> bool:
    name, rest = Path(words[0]).name if words else "", list(words[1:3])
    by_module = re.fullmatch(r"python[\d.]*", name) and rest == ["-m", "sglang.launch_server"]
    return bool(by_module) or (name == "sglang" and rest[:1] == ["serve"])


def refuse(words: Sequence[str]) -> None:
    """Raises ConfigError for flags with which SGLang's HiCache takes no storage of kvtier's."""
    for flag, why in _NOT_WITH_US.items():
        if value(words, flag) is not None:
            raise ConfigError(f"{flag}: {why}")
    for flag in ("--dcp-size", "--decode-context-parallel-size"):
        if str(value(words, flag) or 1) != "1":
            raise ConfigError(f"{flag}: SGLang takes only files and Mooncake with it; remove it")
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
    found = look(python, env)
    if found.sglang is None or not found.kvtier:
        lacks = "kvtier (the wheel that make wheel builds)" if found.sglang else "SGLang"
        raise ConfigError(f"{python} has no {lacks}: install it there")
    tested = "" if found.sglang == TESTED else f" (not tested: {TESTED} is)"
    return f"SGLang {found.sglang}{tested}"


def with_storage(words: Sequence[str], config: Config, server: str) -> list[str]:
    """The command to run. What it says itself stays."""
    extra = json.dumps({**_PLUGIN, "server": server, **passed(config)})
    page = [] if value(words, "--page-size") else ["--page-size", str(_PAGE_TOKENS)]
    tree = [] if "--enable-hierarchical-cache" in words else ["--enable-hierarchical-cache"]
    return [*words, *tree, *page, _BACKEND, "dynamic", _EXTRA, extra]


def server_ram(words: Sequence[str], config: Config, *, has_disk: bool) -> tuple[int | None, str]:
    """RAM of the server beside the engine, and why. None: as kvtier serve sizes it."""
    if "ram_bytes" in config.sources:
        return None, f"with the RAM of {config.sources['ram_bytes']}"
    if value(words, "--hicache-host-memory-mode") == "buffer_only":
        return None, "its RAM is the cache, because SGLang's own (L2) is a buffer only"
    if not has_disk:
        return None, (
            "its RAM holds what SGLang's own (L2) holds too, and no NVMe is below it: give "
            "--hicache-host-memory-mode buffer_only, or nvme_path"
        )
    count = str(given(words, ("--tp-size", "--tensor-parallel-size", "--tp")) or 1)
    size = _BOUNCE_BYTES * max(2, int(count) if count.isdecimal() else 1)
    why = "of RAM, a bounce for its NVMe, because SGLang's own RAM (L2) holds the same pages"
    return size, f"with {size_text(size)} {why}"


def launch(words: Sequence[str], config: Config, more: Mapping[str, str], *, prints: bool) -> int:
    """Become the engine. Returns only where it ``prints`` the command."""
    env, server = processes.environment(**more), config.server.address
    refuse(words)
    said, size = f"its HiCache has the server {server}", None
    if server is None:
        has_disk = bool(config.nvme.path or (config.engine.auto and probe_disks()))
        size, why = server_ram(words, config, has_disk=has_disk)
        said = f"its HiCache has a server that is started beside it; {why}"
    print(f"kvtier: {verdict(words, env)}; {said}", file=sys.stderr, flush=True)
    if prints:
        final = with_storage(words, config, server or "unix:///run/kvtier/kvtier.sock")
        print(" ".join([*(f"{name}={quote(told)}" for name, told in more.items()), join(final)]))
        return 0
    sized = {} if size is None else {"KVTIER_RAM_BYTES": f"{size}B"}
    final = with_storage(words, config, server or ranks.start({**env, **sized}))
    try:
        processes.become(final, env)
    except OSError as error:
        raise ConfigError(f"{final[0]} cannot be run: {error}") from error
