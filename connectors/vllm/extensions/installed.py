"""Which extensions an engine has: kvtier's own, and those that other packages bring. Those of
``kvtier.extensions`` are found by name: ``engine`` of each has a function that makes them.

Another package names one in the entry point group ``kvtier.vllm_extensions``, and an engine's
``kv_connector_extra_config`` switches it on by that name, with its own keys::

    {"extensions": {"audit": {"folder": "/var/log/audit"}}}

What is installed and not named is not even imported. The entry point is a class or a function that
is called with the keys and the :class:`~kvtier.connectors.vllm.extension.Tools`, and gives an
:class:`~kvtier.connectors.vllm.extension.Extension`.

Such an extension watches, and loads no KV: its ``join``, ``promise`` and ``allocated`` are not
called, because a worker knows kvtier's own jobs only. When another hook of it fails the log says so
once, and no hook of it is called any more. So no request fails because of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvtier.api import KVStore
from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.connectors.vllm.extensions.outcomes import HitLog, Misses, Traces
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.hints import Said
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.eviction.hints import NO_HINT

if TYPE_CHECKING:
    from kvtier.connectors.vllm.worker_side.extension import WorkerExtension

logger = logging.getLogger("kvtier.connectors.vllm")

GROUP = "kvtier.vllm_extensions"
_WHERE = "kv_connector_extra_config"
_COUNTS = "extension_"


def installed(named: Any, tools: Tools) -> tuple[Extension, ...]:
    """Make the named extensions, in the configuration's order. ``named``: keys of each by its name.
    Raises ConfigError for one that is not installed, or cannot be made."""
    if not isinstance(named, Mapping):
        raise ConfigError(
            f"extensions={named!r} ({_WHERE}): expected the keys of each extension by its name, "
            "such as {'audit': {}}; correct it or remove it"
        )
    return tuple(_Guarded(str(name), _made(str(name), named[name], tools)) for name in named)


def _made(name: str, keys: Any, tools: Tools) -> Extension:
    point = _point(name)
    if not isinstance(keys, Mapping | None):
        raise ConfigError(
            f"extensions.{name}={keys!r} ({_WHERE}): expected a mapping of its keys; correct it or "
            "remove it"
        )
    try:
        made = point.load()(dict(keys or {}), tools)
    except Exception as error:
        raise ConfigError(
            f"extensions.{name} ({_WHERE}): {point.value} cannot be made with the keys "
            f"{[*(keys or {})]}: {type(error).__name__}: {error}; correct them or its package, or "
            "remove it"
        ) from error
    if not isinstance(made, Extension):
        raise ConfigError(
            f"extensions.{name} ({_WHERE}): {point.value} gave a {type(made).__name__}, expected a "
            f"{Extension.__module__}.{Extension.__name__}; correct its package or remove it"
        )
    return made


def _point(name: str) -> EntryPoint:
    found = entry_points(group=GROUP)
    for point in found:
        if point.name == name:
            return point
    raise ConfigError(
        f"extensions.{name} ({_WHERE}): no installed package has it in the entry point group "
        f"{GROUP}, which has {sorted(found.names) or 'none'}; install its package or remove it"
    )


class _Guarded(Extension):
    def __init__(self, name: str, own: Extension) -> None:
        self._name, self._own = name, own

    def _call(self, hook: str, *given: Any, **named: Any) -> Any:
        try:
            return _asked(self._own, hook, *given, **named)
        except Exception:
            logger.exception(
                "extension %s: its %s failed, so none of its hooks is called any more",
                self._name,
                hook,
            )
            self._own = Extension()
            return _asked(self._own, hook, *given, **named)

    def counts(self) -> dict[str, int]:
        counted: dict[str, int] = self._call("counts")
        return {f"{_COUNTS}{self._name}_{what}": count for what, count in counted.items()}


def _asked(own: Extension, hook: str, *given: Any, **named: Any) -> Any:
    found = getattr(own, hook)
    return found(*given, **named) if callable(found) else found


def _guarded(hook: str) -> Callable[..., Any]:
    def call(self: _Guarded, *given: Any, **named: Any) -> Any:
        return self._call(hook, *given, **named)

    return call


for _hook, _plain in vars(Extension).items():
    if not _hook.startswith("_") and _hook not in {"join", "promise", "allocated", *vars(_Guarded)}:
        _call = _guarded(_hook)
        setattr(_Guarded, _hook, property(_call) if isinstance(_plain, property) else _call)


class HintDelivery(Extension):
    """Tells the store of hints of finished requests after their saves, which would cancel them."""

    def __init__(self, store: KVStore, geometry: Geometry) -> None:
        self._store, self._geometry = store, geometry
        self._waiting: dict[str, tuple[Said, Sequence[ChunkKey]]] = {}
        self._counts = Counter[str]()

    def finished(self, prompt: Prompt, *, saving: bool) -> None:
        said, name = prompt.said, prompt.request.request_id
        keys = prompt.chain.keys if prompt.chain is not None else ()
        for kind in said.kinds:
            self._counts[f"hints_{kind}"] += 1
        if said.hint == NO_HINT or not (keys or said.session):
            return
        self._waiting[name] = said, keys
        if not saving:
            self._tell(name)

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        for name in last_of if self._waiting else ():
            self._tell(name)

    def counts(self) -> dict[str, int]:
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return counts

    def _tell(self, name: str) -> None:
        if name in self._waiting:
            said, keys = self._waiting.pop(name)
            if keys:  # without a whole chunk the hint is about the session's last prompt
                keys = self._geometry.run(keys, 0, len(keys) * self._geometry.chunk_tokens).keys
            self._store.hint(keys, said.hint, said.session)


def shipped(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    """Make kvtier's own extensions, in the order in which they are asked. vLLM's configuration
    decides on events and traces."""
    wants_traces = facts.vllm_config.observability_config.otlp_traces_endpoint
    return (
        *_beside("spans", tools, facts),
        Misses(tools),
        HintDelivery(tools.store, tools.geometry),
        *_beside("event_stream", tools, facts),
        Traces() if wants_traces else HitLog(),
        EarlyLoads(tools, facts.duty),
    )


def _beside(name: str, tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    found: tuple[Extension, ...] = import_module(f"kvtier.extensions.{name}.engine").extensions(
        tools, facts
    )
    return found


def of_worker(vllm_config: Any, kept: Any, kv_caches: Any) -> tuple[WorkerExtension, ...]:
    mover = import_module("kvtier.extensions.spans.mover")
    made: WorkerExtension = mover.extension(vllm_config, kept, kv_caches)
    return (made,)
