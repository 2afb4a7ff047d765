"""AWS LMI's two options for a KV cache: ``OPTION_<NAME>`` in the environment, or ``option.<name>``
in the model's own ``serving.properties``, which comes first."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kvtier.config.keys import Remark
from kvtier.core.errors import ConfigError

SERVING_PROPERTIES = "/opt/ml/model/serving.properties"
"""Properties file of LMI's containers, read if no other file is named."""
PROPERTIES_VARIABLE = "KVTIER_PROPERTIES_FILE"

_OPTIONS = ("lmcache_auto_config", "lmcache_config_file")
_LIKE_PART = 0.8
_LINE = re.compile(r"((?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(.*)", re.DOTALL)


class Option(NamedTuple):
    value: str
    source: str


def option(name: str, env: Mapping[str, str]) -> Option | None:
    """Read LMI's option ``name``. Raises ConfigError for a properties file that cannot be read."""
    value = _properties(env).get(f"option.{name}", "")
    if value:
        return Option(value, f"option.{name} in {properties_file(env)}")
    variable = f"OPTION_{name.upper()}"
    return Option(env[variable], f"environment {variable}") if env.get(variable) else None


def _properties(env: Mapping[str, str]) -> dict[str, str]:
    file = properties_file(env)
    if file is None:
        return {}
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"properties file {str(file)!r} cannot be read: {error}") from error


def misspelt(env: Mapping[str, str]) -> Iterator[Remark]:
    """Warn of each option that is nearly one of LMI's for a cache. Raises ConfigError when the
    properties file cannot be read."""
    given = [(name, "option.") for name in _properties(env)]
    for name, form in [*given, *((name, "OPTION_") for name in env)]:
        own = name.removeprefix(form).lower()
        near = difflib.get_close_matches(own, _OPTIONS, n=1, cutoff=_LIKE_PART)
        if name.startswith(form) and own not in _OPTIONS and near:
            meant = form + (near[0].upper() if form.isupper() else near[0])
            text = f"{name} is not an option of LMI's, so it has no effect; {meant} is one"
            yield Remark(logging.WARNING, text)


def config_file(env: Mapping[str, str]) -> Option | None:
    """Read ``lmcache_config_file``. A relative path counts from the file that names it."""
    given = option("lmcache_config_file", env)
    file = properties_file(env)
    if given is None or file is None or not given.source.startswith("option."):
        return given
    return given._replace(value=str(file.parent / given.value))


def beside_auto(asked: str, ours: object, env: Mapping[str, str]) -> list[Remark]:
    """Check that sizes have one source, as in LMI: ``LMCACHE_CONFIG_FILE`` gets a warning that
    auto-config's count. Raises ConfigError for every other file, and if that one is missing.
    ``asked``: who asks for auto-config. ``ours``: kvtier's own file."""
    option, lmcaches = config_file(env), env.get("LMCACHE_CONFIG_FILE")
    named = str(ours) if ours else option.value if option else None
    if named is None and lmcaches and not Path(lmcaches).is_file():
        named = f"{lmcaches} (environment LMCACHE_CONFIG_FILE), which is not there,"
    if named is not None:
        raise ConfigError(
            f"{asked} asks for auto-config and the file {named} sets sizes by hand: remove one of "
            "the two ('kvtier plan --yaml' writes the file that auto-config would use)"
        )
    if not lmcaches:
        return []
    text = f"{asked} asks for auto-config and environment LMCACHE_CONFIG_FILE names {lmcaches}"
    return [Remark(logging.WARNING, f"{text}: sizes are auto-config's, the file's other keys hold")]


def properties_file(env: Mapping[str, str]) -> Path | None:
    """Return the named properties file, else LMI's own if this is such a container."""
    named = env.get(PROPERTIES_VARIABLE)
    if named:
        return Path(named)
    usual = Path(SERVING_PROPERTIES)
    return usual if usual.is_file() else None


def parse(text: str) -> dict[str, str]:
    """Parse Java's properties: ``key=value``, ``key: value`` or ``key value``. ``#`` and ``!``
    begin a comment, a backslash joins the next line."""
    found = {}
    for line in re.sub(r"(?<!\\)((?:\\\\)*)\\\r?\n[ \t]*", r"\1", text).splitlines():
        content = line.strip()
        if content and content[0] not in "#!" and (match := _LINE.fullmatch(content)):
            found[_unescaped(match[1])] = _unescaped(match[2])
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
