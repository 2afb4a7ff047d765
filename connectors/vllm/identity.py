"""Identity of an engine: what decides its KV bytes besides the layout. It is made in the
scheduler's process.

Equal identities must mean equal bytes. So everything that vLLM is configured with is part of it,
but for what :mod:`kvtier.connectors.vllm.naming.fields` says does not decide, and why. Where it is
unknown which weights run, the identity contains a random word. Such a cache serves this start of
the engine and no other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from enum import Enum
from pathlib import Path
from re import Pattern
from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.naming.digests import (
    DigestError,
    FileDigests,
    content_files,
    has_weights,
)
from kvtier.connectors.vllm.naming.fields import (
    DECIDES,
    DOES_NOT,
    ENVIRONMENT_DOES_NOT,
    FAMILIES,
    FILES,
    OF_OTHERS,
    SECTIONS,
)
from kvtier.connectors.vllm.versions import running
from kvtier.core.chunk import fingerprint
from kvtier.core.processes import environment

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import RankLayout

logger = logging.getLogger("kvtier.connectors.vllm")

_FORMAT = 3
"""Version of a slot's bytes and of their names. Raise it when their meaning changes."""
_OF_A_FOLDER = frozenset(("_name_or_path", "transformers_version"))
"""Fields of a model's configuration that say where it lies and which library wrote it down."""
_DIGEST_WAIT_S = 120.0
"""Longest wait of a ready engine for the digest of new weights at a first start."""
FROM_FOLDER = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "pt",
    "npcache",
    "mistral",
    "gguf",
    "bitsandbytes",
    "sharded_state",
    "runai_streamer",
    "runai_streamer_sharded",
)
"""vLLM's load formats that read the model's own folder, unless ``model_weights`` says otherwise."""
_MOST_LEVELS = 12

DIGESTS = FileDigests()
_AT_LOAD: dict[Path, Future[str]] = {}
"""Digest of each place's files as :func:`begin` saw them, for the same process."""


def begin(vllm_config: Any) -> None:
    """Begin to read the weight files: workers have loaded them, so they are in the page cache."""
    for model in _models(vllm_config):
        place = _folder(model, vllm_config.load_config)
        if place is not None:
            with contextlib.suppress(DigestError):  # identity() says it
                _AT_LOAD[place] = DIGESTS.begin(content_files(place), place)


def identity(vllm_config: Any, ranks: Mapping[tuple[int, int], RankLayout]) -> dict[str, Any]:
    """Return the identity, as JSON, on purpose without ids of machine and process and names of
    local folders. Logs once why an identity is of this start only."""
    versions = software()  # the import of vLLM sets variables
    walk = Walk()
    config = walk.of(vllm_config, "vllm_config")
    environment, whys = variables(FAMILIES, OF_OTHERS), list(walk.unnamed)
    weights = [
        _weights(model, vllm_config.load_config, ranks, whys) for model in _models(vllm_config)
    ]
    if walk.unknown:
        logger.info(
            "this vLLM has settings that kvtier does not know: %s. They are part of the names of "
            "chunks, so another value makes the cache cold",
            ", ".join(walk.unknown),
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        whys.append("calculate_kv_scales takes the KV scales from the first prompts")
    if any(rank.model is None for rank in ranks.values()):
        whys.append("the loaded model's layers cannot be looked at")
    whys += filter(None, map(_foreign_code, _models(vllm_config)))
    found: dict[str, Any] = {
        "format": _FORMAT,
        "software": versions,
        "config": config,
        "environment": environment,
        "weights": weights,
    }
    digests = [f"{part} {fingerprint(found[part]).hex()[:8]}" for part in found if part != "format"]
    logger.info(
        "chunks are named by %s; of the environment: %s. What differs from an earlier start has "
        "made its chunks cold",
        ", ".join(digests),
        ", ".join(environment) or "nothing",
    )
    return found | {"start": start_word(whys[0])} if whys else found


def start_word(why: str) -> str:
    """Return a random word that makes the keys valid for this start only. Logs why, once a call."""
    logger.warning("%s: what kvtier keeps is of use to this start of the engine only", why)
    return secrets.token_hex(16)


def software() -> dict[str, str]:
    """Return versions of what computes: another one may have other bits in its results."""
    return {"vllm": running()} | versions(("torch", "transformers"))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = dict[str, str]()
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# ---- configuration -------------------------------------------------------------------------------


class Walk:
    """Reader of a configuration object's values. ``unknown``: ``section.field`` of fields that are
    in neither table. ``unnamed``: why a value has no form that another start would have too."""

    def __init__(self) -> None:
        self.unknown = list[str]()
        self.unnamed = list[str]()
        self._dtype: Any = "auto"

    def of(self, config: Any, section: str) -> dict[str, Any]:
        found = {}
        if section == "vllm_config":
            self._dtype = getattr(getattr(config, "model_config", None), "dtype", "auto")
        for name, value in _fields(config):
            place = f"{section}.{name}"
            if place in DOES_NOT or _is_off(place, value, config, self._dtype):
                continue
            if place not in DECIDES:
                self.unknown.append(place)
            found[name] = self.plain(self._read(value, place), place)
        return found

    def _read(self, value: Any, place: str) -> Any:
        if place not in FILES or not value:
            return value
        try:
            return files_digest([Path(value)])
        except (DigestError, LateError) as error:
            self.unnamed.append(f"{place}: {error}")
            return value

    def plain(self, value: Any, place: str, depth: int = 0) -> Any:
        """Return the value as JSON. ``place`` names it where it has no such form."""
        if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
            return value
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, Enum):
            return f"{type(value).__name__}.{value.name}"
        if depth == _MOST_LEVELS:
            self.unnamed.append(f"{place} is nested deeper than {_MOST_LEVELS}")
            return None
        if isinstance(value, Mapping):
            return {str(key): self.plain(inner, place, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(inner, place, depth + 1) for inner in value]
        if isinstance(value, set | frozenset):
            plain = [self.plain(inner, place, depth + 1) for inner in value]
            return sorted(plain, key=json.dumps)
        return self._object(value, place, depth)

    def _object(self, value: Any, place: str, depth: int) -> Any:
        if hasattr(value, "to_dict") and not isinstance(value, type):
            return self.plain(without_folders(value.to_dict()), place, depth + 1)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        kind = type(value)
        if f"{kind.__module__}.{kind.__qualname__}" in ("torch.dtype", "torch.device"):
            return str(value)
        called = value if isinstance(value, type) or callable(value) else None
        name = getattr(called, "__qualname__", "")
        if name and "<" not in name:
            return f"{getattr(called, '__module__', '')}.{name}"
        if _is_configuration(value):
            section = place.rpartition(".")[2]
            return self.of(value, SECTIONS.get(section, section))
        self.unnamed.append(f"{place} is a {kind.__qualname__}, which has no name of its own")
        return None


def files_digest(files: Sequence[Path]) -> str:
    return DIGESTS.begin(files, Path(os.path.commonpath([file.parent for file in files]))).result(
        _DIGEST_WAIT_S
    )


def _is_configuration(value: Any) -> bool:
    is_struct = hasattr(value, "__struct_fields__")
    return (
        dataclasses.is_dataclass(value) or is_struct or type(value).__name__.endswith("Namespace")
    )


def _fields(config: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(config):
        return [(one.name, getattr(config, one.name, None)) for one in dataclasses.fields(config)]
    if hasattr(config, "__struct_fields__"):
        return [(name, getattr(config, name)) for name in config.__struct_fields__]
    return sorted(vars(config).items())


def _is_off(place: str, value: Any, config: Any, dtype: Any) -> bool:
    """Return whether a LoRA field changes nothing without an adapter: such engines share chunks."""
    if place == "vllm_config.lora_config":
        return value is None or _is_all_off(value, dtype)
    if not place.startswith("lora_config.") or not dataclasses.is_dataclass(config):
        return False
    default = next(
        one.default for one in dataclasses.fields(config) if place.endswith(f".{one.name}")
    )
    return bool(value == default) or (
        place == "lora_config.lora_dtype" and value in ("auto", dtype)
    )


def _is_all_off(lora: Any, dtype: Any) -> bool:
    places = [(f"lora_config.{name}", value) for name, value in _fields(lora)]
    return all(place in DOES_NOT or _is_off(place, value, lora, dtype) for place, value in places)


def without_folders(value: Any) -> Any:
    """Return a model's configuration without folders, also inside it (an EAGLE draft's)."""
    if isinstance(value, Mapping):
        return {
            name: without_folders(inner)
            for name, inner in value.items()
            if name not in _OF_A_FOLDER
        }
    return [without_folders(one) for one in value] if isinstance(value, list | tuple) else value


def variables(families: Pattern[str], of_others: Pattern[str]) -> dict[str, str]:
    """Return the variables of ``families`` that decide, without ``of_others``."""
    return {
        name: value
        for name, value in sorted(environment().items())
        if families.match(name)
        and name not in ENVIRONMENT_DOES_NOT
        and not of_others.fullmatch(name)
    }


def _models(vllm_config: Any) -> list[Any]:
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None) if speculative else None
    own = getattr(vllm_config, "model_config", None)
    return [one for one in (own, draft) if one is not None]


def _foreign_code(model: Any) -> str:
    """Return why the model's Python code is unknown, "" for vLLM's own or its folder's."""
    if not getattr(model, "trust_remote_code", False):
        return ""
    told = getattr(model.hf_config, "auto_map", None) or {}
    texts = [
        one for value in told.values() for one in (value if isinstance(value, list) else [value])
    ]
    named = [one.partition("--") for one in texts if isinstance(one, str) and "--" in one]
    far = [name for name, _, _ in named if name != model.model]
    return f"the model's code is that of another repository ({far[0]})" if far else ""


# ---- weights -------------------------------------------------------------------------------------


def _weights(
    model: Any, load: Any, ranks: Mapping[tuple[int, int], RankLayout], whys: list[str]
) -> dict[str, Any]:
    """Return the weights by the content of the files that vLLM reads and of all beside them. If not
    local, by name and what every rank sees in the loaded model. ``whys`` gets why not."""
    place = _folder(model, load)
    others = sorted({one for rank in ranks.values() for one in getattr(rank, "others", ())})
    if place is not None:
        try:
            files = [_begun(place), *(_other(*one) for one in others)]
            return {"files": [one.result(_DIGEST_WAIT_S) for one in files]}
        except DigestError as error:
            whys.append(str(error))
        except LateError:
            whys.append(f"the files of {place} were not read within {_DIGEST_WAIT_S:.0f} s")
        return {}
    if any(rank.weights is None for rank in ranks.values()):
        whys.append(
            f"the weights of {_source(model)} can be read neither from local files nor from "
            "the loaded model"
        )
    return {"from": _source(model), "loaded": [rank.weights for _, rank in sorted(ranks.items())]}


def _other(name: str, revision: str, folder: str) -> Future[str]:
    place = local(name, revision or None)
    if place is None:
        raise DigestError(f"the weights of {name}, which the model takes too, are not local files")
    return _begun(place / folder, configured=False)


def is_local(vllm_config: Any) -> bool:
    models = _models(vllm_config)
    return all(_folder(one, vllm_config.load_config) is not None for one in models)


def _begun(place: Path, *, configured: bool = True) -> Future[str]:
    found = DIGESTS.begin(content_files(place, configured=configured), place)
    if _AT_LOAD.get(place, found) is not found:  # one Future for files as they are
        raise DigestError(f"the files of {place} changed while the engine started")
    return found


def _source(model: Any) -> str:
    return f"{getattr(model, 'model_weights', '') or model.model} (revision {model.revision})"


def _folder(model: Any, load: Any) -> Path | None:
    load_format = str(getattr(load.load_format, "value", load.load_format)).lower()
    if getattr(model, "model_weights", "") or load_format not in FROM_FOLDER:
        return None
    place = local(model.model, model.revision)
    try:
        return place if place is not None and has_weights(content_files(place)) else None
    except DigestError:
        return place


def local(name: str, revision: str | None) -> Path | None:
    """Return a path, or the snapshot in the hub's cache, or None if neither is there."""
    place = Path(name)
    if place.exists():
        return place
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no name of a hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None
