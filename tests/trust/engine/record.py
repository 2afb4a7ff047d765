"""What a long run of the cells in parts (:mod:`tests.trust.engine.continued`) has done, in a file.

Steps are steps of the code that took them. Where the code has changed since, a cell begins at
nothing again, and what it did before is told apart: it says nothing of the code there is now.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

RUN = ("kvtier", "connectors", "autoconfig", "tests/trust/engine")
"""Folders whose Python a cell may run."""


def code_of(folders: Iterable[Path]) -> str:
    """A name of the Python in these folders that changes when a file does: not with comments,
    docstrings and layout."""
    told = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    node.value = ast.Constant(None)
            told.update(f"{file.relative_to(folder)}\n{ast.dump(tree)}\n".encode())
    return told.hexdigest()[:16]


def code_here() -> str:
    """The name of what a cell runs in this checkout, vLLM aside."""
    return code_of(ROOT / folder for folder in RUN)


class Record:
    """The file: of each cell, on each vLLM, the ``steps`` that ``code`` took, the ``seed`` of the
    next part, and the ``violations`` of the last. ``before``: steps of other code."""

    def __init__(self, file: Path, vllm: str, code: str) -> None:
        self._file, self._code = file, code
        self._all: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.cells: dict[str, Any] = self._all.setdefault(vllm, {})

    def of(self, name: str) -> dict[str, Any]:
        new = {"code": self._code, "steps": 0, "before": 0, "seed": 1, "violations": []}
        found: dict[str, Any] = self.cells.setdefault(name, new)
        if found.get("code") != self._code:  # also a file of the days when nobody asked
            before = found.get("before", 0) + found["steps"]
            found |= {"code": self._code, "steps": 0, "before": before}
        return found

    def add(self, cell: str, steps: int, seeds: int, violations: list[str]) -> None:
        """Keep what a part of a cell did. One with violations counts for nothing."""
        one = self.of(cell)
        one["violations"] = violations
        if not violations:
            one["steps"] += steps
            one["seed"] += seeds
        aside = self._file.with_name(self._file.name + ".part")
        aside.write_text(json.dumps(self._all, indent=1) + "\n")
        aside.replace(self._file)
