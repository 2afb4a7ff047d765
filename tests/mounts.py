"""Real file systems for tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    """``mount ARGUMENTS POINT`` until the end of the block. Skips the test where that is not
    allowed."""
    point.mkdir()
    done = subprocess.run(
        ["mount", *arguments, str(point)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
