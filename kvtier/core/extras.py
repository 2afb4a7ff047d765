"""Packages that only some users need, and what to say when one of them is missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from kvtier.core.errors import ConfigError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "encryption": ("cryptography",),
    "object": ("obstore",),
    "mooncake": ("mooncake",),
    "server": ("aiofiles", "aiohttp", "prometheus_client"),
    "bench": ("aiohttp", "matplotlib", "rich"),
}
"""Extra -> the modules that it installs."""


def how(extra: str) -> str:
    """The command that installs an extra: ``pip install 'kvtier[server]'``."""
    return f"pip install 'kvtier[{extra}]'"


def require(extra: str) -> None:
    """Raises ConfigError, which names the missing modules and the command, when a module of
    ``extra`` is not installed."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise ConfigError(f"not installed here: {', '.join(missing)}; {how(extra)}")


def explained(error: ModuleNotFoundError) -> str | None:
    """What to do about an import that failed. None when the module belongs to no extra: then its
    absence is a bug."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed here; {how(extra)}"
    return None
