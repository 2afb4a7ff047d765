"""Programs as an operator starts them, where nothing of kvtier is set."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ("KVTIER_", "LMCACHE", "OPTION_")
"""How variables begin that set something of it."""


def bare(**more):
    """This process's environment without them, and with ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return kept | {name: str(value) for name, value in more.items()}


def ran(command, env=None, cwd=ROOT):
    env = bare() if env is None else env
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def kvtier(*words, env=None, cwd=ROOT, python=sys.executable):
    """Run the command, with ``env`` set. Whatever it is asked, nobody sees a traceback."""
    given = bare(**{"PYTHONPATH": ROOT} | dict(env or {}))
    done = ran([python, "-m", "kvtier", *map(str, words)], given, cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done
