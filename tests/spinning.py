"""A busy host: as many processes that spin as there are cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spinning() -> Iterator[None]:
    """Until the end of the ``with`` block."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
