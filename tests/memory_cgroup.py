"""A real memory cgroup for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PLACES = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """An inner group of one that is limited to so many bytes. A process enters it through its
    ``cgroup.procs``. Skips the test where none can be made."""
    outer, name = _made()
    inner = outer / "inner"
    try:
        if name == "memory.max":
            (outer / "cgroup.subtree_control").write_text("+memory")
        (outer / name).write_text(str(limit))
        inner.mkdir()
        yield inner
    finally:
        for group in (inner, outer):
            if group.is_dir():
                group.rmdir()


def entering(group: Path, command: list[str]) -> list[str]:
    """The same command, which enters the group first."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def _made() -> tuple[Path, str]:
    for place, name in _PLACES:
        outer = Path(place) / f"kvtier-test-{os.getpid()}"
        try:
            outer.mkdir()
        except OSError:
            continue
        if (outer / name).exists():
            return outer, name
        outer.rmdir()
    pytest.skip("no writable memory cgroup here")
