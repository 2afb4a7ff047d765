"""The Python that runs the engines of tests: this one, or the one that ``TEST_ENGINE_PYTHON`` names, which has another
vLLM (``make test-lmi``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def engine_python() -> str:
    """Path of the interpreter; its environment's programs lie beside it."""
    return str(Path(os.environ.get("TEST_ENGINE_PYTHON") or sys.executable).absolute())
