"""Rows that nobody thought of: every field of a model's configuration and every switch of vLLM's
engine, with another value each."""

import json
import typing
from dataclasses import fields, is_dataclass
from typing import Literal

from tests.trust.identity.rows import Row, config, engine

Names = tuple[str, ...]
_DEPTH = 3
_CHOICES = 4
"""Of a switch with many."""
_INNER = ("attention_config", "kernel_config", "mamba_config")
_LEFT_OUT = frozenset(("enable_sleep_mode", "disable_log_stats", "numa_bind", "headless"))


def of_model(base, model):
    """A row for each value in ``config.json``."""
    for path, value in _values((), json.loads((model / "config.json").read_text())):
        other = _other(value)
        if other is not None:
            yield Row(
                f"swept: {'.'.join(path)} {value} to {other}",
                base,
                config(*path, value=other),
                None,
            )


def _values(path, given):
    for name, value in given.items():
        if isinstance(value, dict) and len(path) < _DEPTH:
            yield from _values((*path, name), value)
        else:
            yield (*path, name), value


def _other(value):
    """Another value of this kind. None: there is none to be thought of."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return 1.5 * value or 0.25
    if isinstance(value, list) and len(set(map(str, value))) > 1:
        return value[1:] + value[:1]
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [one * 1.5 for one in value]
    return None


def of_engine(base):
    """A row for each switch of ``EngineArgs``, and for each choice of those with a few."""
    from vllm.engine.arg_utils import EngineArgs

    hints = typing.get_type_hints(EngineArgs)
    for field in fields(EngineArgs):
        if field.name in _LEFT_OUT or field.name.startswith("_"):
            continue
        for value in _choices(hints[field.name], field.default):
            yield Row(f"swept: {field.name} {value}", base, engine(**{field.name: value}), None)

    for name in _INNER:
        for field in fields(_class_of(hints[name])):
            for value in _choices(field.type, field.default):
                yield Row(
                    f"swept: {name}.{field.name} {value}",
                    base,
                    engine(**{name: {field.name: value}}),
                    None,
                )


def _class_of(hint):
    """The configuration's class."""
    return next(one for one in (hint, *typing.get_args(hint)) if is_dataclass(one))


def _choices(hint, default):
    if typing.get_origin(hint) is Literal:
        found = [one for one in typing.get_args(hint) if one != default]
        return found[:_CHOICES]
    inner = typing.get_args(hint)
    if hint is bool or bool in inner:
        return [not default]
    return [one for each in inner for one in _choices(each, default)][:_CHOICES]
