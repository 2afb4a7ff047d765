"""Packages that only some users need, and what to say when one of them is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec

from kvtier.core.errors import ConfigError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "encryption": ("cryptography",),
    "server": ("aiofiles", "aiohttp", "prometheus_client"),
    "bench": ("aiohttp", "matplotlib"),
}
"""Extra -> the modules that it installs. A tier's own are in its section."""


def how(extra: str) -> str:
    """Return the command that installs an extra's packages: ``pip install 'aiohttp>=3.11' ...``.

    The command has the packages themselves, and not an extra of kvtier: no package index has
    kvtier, so that name there could be anybody's.
    """
    try:
        found = metadata.requires("kvtier") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return f"pip install '.[{extra}]' in a checkout of kvtier"
    marker = f'extra == "{extra}"'
    packages = [
        need.partition(";")[0].strip() for need in found if marker in need.replace("'", '"')
    ]
    return f"pip install {' '.join(map(repr, packages))}"


def require(extra: str, modules: Sequence[str] | None = None) -> None:
    """Raise ConfigError, which names the missing modules and the command, if a module of ``extra``
    is not installed. ``modules``: of an extra that is not in :data:`EXTRAS`."""
    wanted = EXTRAS[extra] if modules is None else modules
    missing = [module for module in wanted if find_spec(module) is None]
    if missing:
        raise ConfigError(f"not installed here: {', '.join(missing)}; {how(extra)}")


def explained(error: ModuleNotFoundError) -> str | None:
    """Return advice about a failed import, or None for a module of no extra, which is a bug."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed here; {how(extra)}"
    return None
