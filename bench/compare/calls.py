"""How long an engine is in its KV connector. The entry points of any connector of vLLM's are timed.

The engine imports this module as ``kv_connector_module_path``. A class that is asked for by name is
a subclass, with the same name, of the real one. The real one is in the module that
:data:`CONNECTOR` names, or in vLLM's registry where that is empty. The scheduler's process and the
worker's process each append a line of JSON for every step to the file that :data:`CALLS` names.
:func:`read` reads the lines. What a connector does on threads or in other processes does not count,
because the engine does not wait for it.

Every arm's environment imports this module, so it imports only the standard library.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULE = "kvtier.bench.compare.calls"
CONNECTOR, CALLS = "COMPARE_CONNECTOR", "COMPARE_CALLS"
_LOOK_UP = "get_num_new_matched_tokens"
_STEP_ENDS = ("take_events", "clear_connector_metadata")
"""Entry points called last in a step, by the scheduler and by a worker."""


@dataclass(frozen=True, slots=True)
class Step:
    """The calls of one half in one step. ``at``: when it ended, by ``time.perf_counter``, which all
    processes of a machine share. That is before its answer is sent. ``calls``: seconds by entry
    point. ``look_ups``: seconds from a request's first question to its definite answer."""

    at: float
    calls: Mapping[str, float]
    look_ups: Sequence[float]


def read(path: Path) -> list[Step] | None:
    try:
        return [
            Step(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()
        ] or None
    except (OSError, ValueError, TypeError):
        return None


def __getattr__(name: str) -> Any:
    """The timed class of a connector. Raises AttributeError for a name that is not a class."""
    if not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    module = os.environ[CONNECTOR]
    if module:
        real = getattr(importlib.import_module(module), name)
    else:
        real = KVConnectorFactory.get_connector_class_by_name(name)
    made = timed(real, KVConnectorBase_V1, Spent(Path(os.environ[CALLS])))
    globals()[name] = made
    return made


def timed(real: type, base: type, spent: Spent) -> type:
    """A subclass of ``real`` whose methods are timed, except those that it has from ``base``, which
    do nothing. What the engine calls before its first step counts for no answer."""
    own = {
        name
        for name, call in inspect.getmembers(real, inspect.isfunction)
        if name[0] != "_" and call is not getattr(base, name, None)
    }
    methods: dict[str, Any] = {
        name: _timed(name, getattr(real, name), spent) for name in own.union(_STEP_ENDS)
    }
    methods[_LOOK_UP] = _looked_up(methods[_LOOK_UP], spent)
    for name in _STEP_ENDS:
        methods[name] = _ending_step(methods[name], spent)
    return types.new_class(
        real.__name__, (real,), {}, lambda members: members.update(methods, __module__=MODULE)
    )


@dataclass(slots=True)
class Spent:
    """Time since the last line, of this process's one thread, the engine's."""

    path: Path
    file: int = -1
    inside: bool = False
    calls: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    look_ups: list[float] = field(default_factory=list)

    def write(self) -> None:
        if self.file < 0:
            self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        line = json.dumps(
            {"at": time.perf_counter(), "calls": self.calls, "look_ups": self.look_ups}
        )
        os.write(self.file, line.encode() + b"\n")
        self.calls, self.look_ups = {}, []


def _timed(name: str, call: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    """Time outermost calls. What one entry point calls of another counts as its own time."""

    @functools.wraps(call)
    def outer(*args: Any, **more: Any) -> Any:
        if spent.inside:
            return call(*args, **more)
        spent.inside = True
        begun = time.perf_counter()
        try:
            return call(*args, **more)
        finally:
            spent.calls[name] = spent.calls.get(name, 0.0) + time.perf_counter() - begun
            spent.inside = False

    return outer


def _looked_up(call: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    """None as the number of tokens means: ask again."""

    @functools.wraps(call)
    def outer(connector: Any, request: Any, *args: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        answer = call(connector, request, *args, **more)
        if answer[0] is None:
            spent.asked.setdefault(request.request_id, begun)
        else:
            spent.look_ups.append(time.perf_counter() - spent.asked.pop(request.request_id, begun))
        return answer

    return outer


def _ending_step(call: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    @functools.wraps(call)
    def outer(*args: Any, **more: Any) -> Any:
        answer = call(*args, **more)
        spent.write()
        return answer

    return outer
