"""A YAML file of an operator's, read with bounds: its size, its depth, and what its aliases would
grow to.

PyYAML's own loader takes the last of two equal keys in silence too. An error names lines and never
quotes them, because a line may hold a password.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from kvtier.core.errors import ConfigError

MOST_BYTES = 1 << 18
MOST_LEVELS = 16
MOST_NODES = 10_000
"""Most keys and values, with each alias counted as all that it stands for."""

_FAULTS = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""Errors of PyYAML besides its own: for 2001-99-99, !!int x, !!bool x, !!timestamp x."""
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    name = f"configuration file {os.fspath(path)!r}"
    try:
        with Path(path).open("rb") as file:
            content = _parsed(file.read(MOST_BYTES + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    except _Refusal as refusal:
        raise ConfigError(f"{name}: {refusal}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{name} is not YAML: {_told(error)}") from None
    except (yaml.YAMLError, *_FAULTS) as error:
        raise ConfigError(f"{name} is not YAML: {_without_quoting(str(error))}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{name}: expected 'key: value' lines, found {type(content).__name__}")
    return {str(key): value for key, value in (content or {}).items()}


def _parsed(text: bytes) -> object:
    if len(text) > MOST_BYTES:
        raise _Refusal(f"more than {MOST_BYTES:,} bytes; is it the right file?")
    return yaml.load(text.decode("utf-8"), _Loader)  # noqa: S506 - a SafeLoader


class _Refusal(Exception):  # noqa: N818 - it never leaves this file
    """YAML that is refused."""


class _Loader(yaml.SafeLoader):
    """Loader that stops at the first node too deep or one too many: PyYAML reads no further."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}
        """Number of nodes in and below each finished node, by its ``id``."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        if self._depth == MOST_LEVELS:
            raise _Refusal(
                f"line {line}: more than {MOST_LEVELS} levels; expected 'key: value' lines"
            )
        before, is_alias = self._nodes, self.check_event(yaml.AliasEvent)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise _Refusal(f"line {line}: an alias inside of what it stands for")
        self._nodes += self._sizes[id(node)] if is_alias else 1
        self._sizes.setdefault(id(node), self._nodes - before)
        if self._nodes > MOST_NODES:
            raise _Refusal(
                f"line {line}: more than {MOST_NODES:,} values, counting what aliases stand for"
            )
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key_node.start_mark.line + 1
            key = str(
                key_node.value
                if key_node.tag == _MERGE
                else self.construct_object(key_node, deep=True)
            )
            if key in lines:
                raise _Refusal(
                    f"line {line}: the key {key!r} stands in line {lines[key]} already; remove "
                    "one of them"
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def _told(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + _without_quoting(
        ", ".join(text for text in (error.context, error.problem) if text)
    )


def _without_quoting(text: str) -> str:
    return re.sub(r"'(?!<)[^']{2,}'", "'...'", text)
