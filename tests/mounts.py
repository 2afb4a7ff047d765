"""Real file systems for tests."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(point, *arguments):
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
