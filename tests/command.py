"""Programs as an operator starts them, where nothing of kvtier is set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ("KVTIER_", "LMCACHE", "OPTION_")
"""How variables begin that set something of it."""


def bare(**more: object) -> dict[str, str]:
    """This process's environment without them, and with ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return kept | {name: str(value) for name, value in more.items()}


def ran(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    env = bare() if env is None else env
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def kvtier(
    *words: object,
    env: Mapping[str, object] | None = None,
    cwd: Path = ROOT,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run the command, with ``env`` set. Whatever it is asked, nobody sees a traceback."""
    given = bare(**{"PYTHONPATH": ROOT} | dict(env or {}))
    done = ran([python, "-m", "kvtier", *map(str, words)], given, cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done
