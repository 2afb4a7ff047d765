"""Where the value of each key comes from.

Sources, weakest first: defaults, file, environment (``KVTIER_<KEY>``), flags. The file is the one
that ``KVTIER_CONFIG_FILE`` names, else the LMCache file that ``LMCACHE_CONFIG_FILE`` or LMI's
``lmcache_config_file`` names. An unknown key and a value that cannot be read are errors.

Variables that are not keys:

- ``KVTIER_CONFIG_FILE``;
- ``KVTIER_PROPERTIES_FILE``: an LMI ``serving.properties``;
- ``KVTIER_REPLACE_LMCACHE``: serve vLLM's ``LMCacheConnectorV1``, and read every
  ``LMCACHE_<KEY>`` variable;
- ``KVTIER_ENCRYPTION_KEY``: the key that ``encryption_key_file`` would hold. A secret is not a
  value that may be shown.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier.config import lmcache, lmi, values
from kvtier.config.keys import KEYS, REMOVED, SECTIONS, SIZES, Config, Key, Remark
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment
from kvtier.core.terminal import UnitError
from kvtier.tiers.registry import BROKEN

REPLACE_LMCACHE = "KVTIER_REPLACE_LMCACHE"
ENCRYPTION_KEY = "KVTIER_ENCRYPTION_KEY"
NO_KEYS = ("KVTIER_CONFIG_FILE", lmi.PROPERTIES_VARIABLE, REPLACE_LMCACHE, ENCRYPTION_KEY)


def load(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    ranks: int = 1,
) -> Config:
    """Load the effective configuration. Raises ConfigError.

    ``file`` beats the files named in the environment. ``flags``: from a command line or the
    engine's connector settings, None for one that is not given. ``ranks``: of the engine's workers,
    because LMCache's files give sizes per worker."""
    if BROKEN:
        raise ConfigError("; ".join(BROKEN))
    surroundings = environment() if env is None else env
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    remarks, of_file = list(lmi.misspelt(surroundings)), list[Remark]()
    above = [*_from_environment(surroundings), *_from_flags(flags or {}, surroundings, remarks)]
    ours = os.fspath(file or surroundings.get("KVTIER_CONFIG_FILE", ""))
    auto = _asks_for_auto(above)
    beside = [] if not auto or os.path.isfile(ours) else lmi.beside_auto(auto, ours, surroundings)
    if ours:
        below = list(_from_file(ours, surroundings, of_file))
        # A file of ours without sizes leaves them to auto-config.
        if auto and any(given.key in _SIZES and given.value is not None for given in below):
            lmi.beside_auto(auto, ours, surroundings)
    else:
        below = list(_from_lmcache(surroundings, ranks, of_file))
    for key, given, source in [*below, *above]:
        if given is not None and not (
            beside and source.startswith(_SIZED_BY_HAND) and key in _SIZES
        ):
            found[key], sources[key] = _parse(key, given, source), source
    return Config(remarks=(*remarks, *beside, *of_file)).with_keys(sources, **found)


def typed(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Make relative paths of typed ``flags`` absolute, below the current folder. Files and engines
    must give absolute paths, because a reader cannot see which folder they are relative to."""
    paths = {key for key, about in KEYS.items() if about.unit in ("file", "folder", "folders")}
    return {
        key: ",".join(map(os.path.abspath, value.split(","))) if key in paths and value else value
        for key, value in flags.items()
    }


def filled(config: Config, plan: Mapping[str, Any], source: str) -> Config:
    """Fill in the values of ``plan`` for the keys that are not set. Sizes in
    ``LMCACHE_MAX_LOCAL_*`` are upper bounds, because LMI counts neither the cgroup nor the disk's
    content. A disk without a size that the plan left out is not used."""
    given = config.sources
    lmi_set = {key for key in given if given[key].startswith("environment LMCACHE_MAX_LOCAL_")}
    new = {
        key: value
        for key, value in plan.items()
        if key not in given or (key in lmi_set and value < config.value(key))
    }
    if "nvme_path" not in plan and (config.nvme.bytes_ is None or "nvme_bytes" in lmi_set):
        new |= {"nvme_path": None, "nvme_bytes": None}
    return config.with_keys(dict.fromkeys(new, source), **new)


def replaces_lmcache(env: Mapping[str, str] | None = None) -> bool:
    """Whether kvtier takes the place of LMCache's connector. Raises ConfigError for a bad flag."""
    given = (environment() if env is None else env).get(REPLACE_LMCACHE) or "false"
    try:
        return values.parse_flag(given)
    except ValueError:
        raise ConfigError(f"{REPLACE_LMCACHE}={given!r}: expected true or false") from None


def encryption_key() -> str | None:
    """Return the environment's encryption key as given. An empty one counts as given, and is no
    key: a cache must not go in plain because a secret was missing."""
    return environment().get(ENCRYPTION_KEY)


def shown(key: str, value: object) -> object:
    return values.shown(key, value, KEYS[key].unit if key in KEYS else "")


_SIZES = ("ram_bytes", "nvme_bytes")
_SIZED_BY_HAND = "LMCache file "


def _asks_for_auto(above: Sequence[_Given]) -> str:
    """Return the variable or flag that asks for auto-config, or "". ``auto: true`` in a file of
    ours is that file's own wish."""
    asked = [given for given in above if given.key == "auto" and given.value is not None]
    return asked[-1].source if asked and _parse(*asked[-1]) else ""


class _Given(NamedTuple):
    key: str
    value: object
    source: str


def _lmcache_files(env: Mapping[str, str]) -> list[lmi.Option]:
    own = env.get("LMCACHE_CONFIG_FILE")
    found = [lmi.Option(own, "environment LMCACHE_CONFIG_FILE")] if own else []
    option = lmi.config_file(env)
    return [*found, option] if option else found


def _from_file(ours: str, env: Mapping[str, str], remarks: list[Remark]) -> Iterator[_Given]:
    for other in _lmcache_files(env):
        first = f"{ours} is kvtier's own file and comes first"
        text = f"{other.source}={other.value} is not read: {first}"
        remarks.append(Remark(logging.INFO, text))
    yield from _in_sections(_yaml(ours), f"file {ours}", remarks)


def _from_lmcache(env: Mapping[str, str], ranks: int, remarks: list[Remark]) -> Iterator[_Given]:
    path = next((named.value for named in _lmcache_files(env)), None)
    if path is None and not replaces_lmcache(env):
        return
    raw = _yaml(path) if path else {}
    overrides = lmcache.from_environment(env, every=replaces_lmcache(env))
    notes = lmcache.translate({**raw, **overrides}, ranks)
    remarks += lmcache.remarked(notes, shown)
    for note in notes:
        top = note.key.partition(".")[0]
        source = (
            f"environment {lmcache.variable(top)}"
            if top in overrides
            else f"{_SIZED_BY_HAND}{path}: {note.key}"
        )
        if note.ours is not None:
            yield _Given(note.ours, note.value, source)


def _yaml(path: str) -> dict[str, Any]:
    from kvtier.config.yaml_file import read_yaml  # 15 ms that only a start with a file pays

    return read_yaml(path)


_SERVICE_LINK = re.compile(
    r"KVTIER_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""Names of variables that Kubernetes gives every pod for a service called kvtier or kvtier-..."""


def _from_environment(env: Mapping[str, str]) -> Iterator[_Given]:
    if auto := lmi.option("lmcache_auto_config", env):
        yield _Given("auto", auto.value, auto.source)
    for name, value in env.items():
        if not name.startswith("KVTIER_") or name in NO_KEYS or _SERVICE_LINK.fullmatch(name):
            continue
        source = f"environment {name}"
        yield _Given(_known(name.removeprefix("KVTIER_").lower(), source), value or None, source)


def _from_flags(
    flags: Mapping[str, object], env: Mapping[str, str], remarks: list[Remark]
) -> Iterator[_Given]:
    for key, value in flags.items():
        if key in SECTIONS and isinstance(value, Mapping):
            for given in _in_section(key, value, "flag"):
                yield from _from_flags({given.key: given.value}, env, remarks)
        elif key not in KEYS and replaces_lmcache(env):
            text = f"connector setting {key}={shown(key, value)} is not kvtier's and has no effect"
            remarks.append(Remark(logging.WARNING, text))
        else:
            known = _known(key, "flag")
            rules = KEYS[known].about.url
            if rules and isinstance(value, str) and "***" in str(rules.masked(value)):
                remarks.append(Remark(logging.WARNING, _SEEN_BY_ALL.format(key=known)))
            yield _Given(known, value, "flag")


_SEEN_BY_ALL = (
    "{key} holds a password, and every user of this host can read a command line: give it in a "
    "file (KVTIER_CONFIG_FILE), or in the environment"
)


def _in_sections(
    content: Mapping[str, Any], source: str, remarks: list[Remark]
) -> Iterator[_Given]:
    """Yield the keys of a file. A flat name is an old one, whose new one a remark tells."""
    seen = set[str]()
    for key, value in content.items():
        if key in SECTIONS and (value is None or isinstance(value, Mapping)):
            found = list(_in_section(key, value or {}, source))
        elif key in SECTIONS and key not in KEYS:
            example = next(iter(_of_section(key).values())).path
            raise ConfigError(
                f"{key}={shown(key, value)!r} ({source}): expected a section with keys below it, "
                f"such as {example}"
            )
        else:
            found = [_Given(_known(key, source, in_file=True), value, source)]
            text = f"{key} ({source}) is an old name of {KEYS[key].path}: write it in its section"
            remarks.append(Remark(logging.INFO, text))
        for given in found:
            if given.key in seen:
                path = KEYS[given.key].path
                raise ConfigError(f"{path} and its old name stand in {source}: remove one of them")
            seen.add(given.key)
        yield from found


def _in_section(section: str, content: Mapping[Any, Any], source: str) -> Iterator[_Given]:
    for name, value in content.items():
        key = _of_section(section).get(name)
        if key is None:
            raise _unknown(f"{section}.{name}", source, _nearest_path(section, str(name)))
        yield _Given(key.flat, value, source)


def _of_section(section: str) -> dict[str, Key]:
    return {key.name: key for key in KEYS.values() if key.section == section}


def _nearest_path(section: str, name: str) -> str:
    for flat in (name, f"{section}_{name}"):
        if flat in KEYS:
            return KEYS[flat].path
    own = [key.path for key in _of_section(section).values()]
    return difflib.get_close_matches(f"{section}.{name}", own, n=1, cutoff=0.0)[0]


def _known(key: str, source: str, *, in_file: bool = False) -> str:
    if key in KEYS:
        return key
    near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)[0]
    raise _unknown(key, source, KEYS[near].path if in_file else near)


def _unknown(key: str, source: str, near: str) -> ConfigError:
    now = REMOVED.get(key.replace(".", "_"))
    if now is not None:
        return ConfigError(f"{key!r} ({source}) is not a key any more: {now}; remove it")
    file = (
        "; it is LMCache's: name an LMCache file in LMCACHE_CONFIG_FILE, not in KVTIER_CONFIG_FILE"
    )
    hint = file if lmcache.is_known(key) else ""
    return ConfigError(f"unknown key {key!r} ({source}); the nearest is {near!r}{hint}")


def _parse(key: str, given: object, source: str) -> Any:
    if KEYS[key].unit == "url":
        return _url(key, given, source)
    parse, expected = values.PARSERS[KEYS[key].unit]
    # a number outside a file of ours comes from a program, or LMCache's GiB, and nobody typed it
    exact = KEYS[key].unit in SIZES and type(given) is int and not source.startswith("file ")
    try:
        return parse(f"{given}B" if exact else given)
    except (ValueError, OverflowError) as error:
        if isinstance(error, UnitError):
            expected = f"{expected}; {error}"
        raise ConfigError(
            f"{key}={shown(key, given)!r} ({source}): expected {expected}; correct it or remove it"
        ) from None


def _url(key: str, given: object, source: str) -> str:
    text, rules = given if isinstance(given, str) else "", KEYS[key].about.url
    assert rules is not None  # the registry takes no tier that has none
    try:
        rules.parse(text)
    except ConfigError as error:
        shown = rules.masked(text)
        raise ConfigError(f"{key}={shown!r} ({source}): {error}; correct it or remove it") from None
    return text
