"""A model's name on the Hugging Face hub -> its folder in this host's hub cache. It asks no network
and needs no library.

The cache has huggingface_hub's form: ``models--ORG--NAME/refs/REVISION`` contains a commit, and
``models--ORG--NAME/snapshots/COMMIT`` contains the files of that commit, as links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kvtier.core.errors import ConfigError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def cache_folder(env: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps its files in this environment."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(variable):
            return Path(env[variable]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def snapshot(name: str, env: Mapping[str, str], revision: str | None = None) -> Path | None:
    """The cached folder of ``name`` at ``revision``. The default is main, or the newest cached
    revision where main was never asked for. None when there is no ``config.json``, or when ``name``
    is not a hub name."""
    if not _NAME.fullmatch(name):
        return None
    place = _place(name, env)
    try:
        commit = (place / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or ""
    if commit:
        named = place / "snapshots" / commit
        return named if (named / "config.json").is_file() else None
    found = [file for file in place.glob("snapshots/*/config.json") if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def model_folder(name: str, env: Mapping[str, str]) -> Path:
    """:func:`snapshot`, or a ConfigError that says what was looked for and what to do."""
    found = snapshot(name, env)
    if found is not None:
        return found
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--model {name}: no such file or folder; expected a local model folder, its "
            "config.json, or a name on the hub such as Qwen/Qwen2.5-7B-Instruct"
        )
    raise ConfigError(
        f"--model {name}: there is no such folder here, and nothing of that name in the hub cache "
        f"(looked for {_place(name, env)}/snapshots/*/config.json; the network is never asked): "
        f"run 'hf download {name} config.json', or give a local model folder or its config.json"
    )


def _place(name: str, env: Mapping[str, str]) -> Path:
    return cache_folder(env) / f"models--{name.replace('/', '--')}"
