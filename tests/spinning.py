"""A busy host: as many processes that spin as there are cores."""

import os
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def spinning():
    """Until the end of the ``with`` block."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
