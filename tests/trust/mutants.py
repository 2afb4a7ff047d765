"""Mutants: small defects of the rooms that decide about trust, each of which a suite must
notice.

``python -m tests.trust.mutants`` applies one after the other to a copy of the package (never to the
tree), runs the suites of its room there until one fails, and prints which suite noticed. Survivors
are the suites' blind spots. The table is ``tests/trust/mutants.txt``, which says how it is written.
``--every 10`` takes every tenth of each room.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.trust.patterns import planted

ROOT = Path(__file__).parents[2]
COPIED = (
    "kvtier",
    "connectors",
    "autoconfig",
    "bench",
    "tests",
    "deploy",
    "pyproject.toml",
    "README.md",
    ".github",
)
PEERS = ROOT / ".venv-peers"
"""Programs that suites start, such as an S3 server. They are linked, not copied."""
SUITE_S, TEST_S, WAIT_S = 240, 60, 30
"""Bounds of a suite, of a test, and of a wait in it (:data:`tests.child_process.DEADLINE_S`)."""

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={TEST_S}")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A small defect.

    In the definition ``where`` the piece of code ``pattern`` stands exactly once and becomes
    ``replacement`` (:mod:`tests.trust.patterns`). ``breaks`` says what that does to a user.
    """

    where: str
    pattern: str
    replacement: str
    breaks: str


@dataclass(frozen=True, slots=True)
class Room:
    """Mutants that face the same suites.

    ``suites`` maps a suite's name to the arguments for Python. They run in this order until one
    fails. The suites in ``slow`` run in ``make trust TRUST=--full`` only.
    """

    suites: Mapping[str, tuple[str, ...]]
    mutants: tuple[Mutant, ...]
    slow: tuple[str, ...] = ()


def _room(section):
    """The name of a section of the table, and its room."""
    name, *lines = section.splitlines()
    suites: dict[str, tuple[str, ...]] = {}
    mutants, slow, place = [], [], ""
    for line in lines:
        if line.startswith("    "):
            where, breaks = place.split(": ", 1)
            pattern, replacement = line[4:].replace("\N{RETURN SYMBOL}", "\n").split(" ==> ")
            mutants.append(Mutant(where, pattern, replacement, breaks))
        elif suite := re.match(r"(slow: )?([\w ]+) = (.*)", line):
            words = tuple(shlex.split(suite[3]))
            suites[suite[2]] = words if words[0] == "-m" else (*PYTEST, *words)
            slow += [suite[2]] if suite[1] else []
        else:
            place = line
    return name.rstrip("]"), Room(suites, tuple(mutants), tuple(slow))


_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
ROOMS = dict(_room(section) for section in _TABLE.split("\n[")[1:])
MUTANTS = tuple(mutant for room in ROOMS.values() for mutant in room.mutants)


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    killer: str
    """The suite that noticed. Empty if none did."""
    seconds: float


def defective(mutant, place=ROOT):
    """The file of the package in ``place`` that has the mutant, and its text then.

    Raises:
        DoesNotFitError: see :func:`planted`.
    """
    package = place / "kvtier"
    file, text = planted(package, mutant.where, mutant.pattern, mutant.replacement)
    return package / file, text


def copy_package(into):
    """Copies the package as it lies in the tree. Links stay links."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
            shutil.copytree(source, into / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(source, into / name)
    if PEERS.exists():
        (into / PEERS.name).symlink_to(PEERS.resolve())


def failure(arguments, place):
    """Why this suite fails in ``place``: the end of what it prints. Empty if it passes. A suite
    that hangs fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "",  # what is not changed is compiled once
        "TESTS_DEADLINE_S": str(WAIT_S),
    }
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SUITE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {SUITE_S} s"
    return (done.stdout + done.stderr)[-4_000:] or "no output" if done.returncode else ""


def suites_of(room, *, full):
    """The suites that face a room's mutants."""
    return {name: words for name, words in room.suites.items() if full or name not in room.slow}


def try_mutant(mutant, place, suites):
    """Applies a mutant to the copy, runs the suites until one fails, and takes the mutant back."""
    file, text = defective(mutant, place)
    sound, begun = file.read_text(encoding="utf-8"), time.monotonic()
    _write(file, text)
    try:
        killer = next((name for name, words in suites.items() if failure(words, place)), "")
    finally:
        _write(file, sound)
    return Verdict(mutant, killer, round(time.monotonic() - begun, 1))


def _write(file, text):
    """Replace a module without its compiled form, which names its length and second only."""
    file.write_text(text, encoding="utf-8")
    Path(cache_from_source(file)).unlink(missing_ok=True)


def _room_verdicts(name, only, every, *, full):
    chosen = [
        each
        for each in ROOMS[name].mutants[::every]
        if only in f"{name} {each.where} {each.breaks}"
    ]
    if not chosen:
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-mutants-") as folder:
        place, suites = Path(folder), suites_of(ROOMS[name], full=full)
        copy_package(place)
        for suite, words in suites.items():
            if why := failure(words, place):
                raise SystemExit(f"{name}: {suite} fails without any mutant:\n{why}")
        for mutant in chosen:
            verdict = try_mutant(mutant, place, suites)
            fate = f"noticed by {verdict.killer}" if verdict.killer else "SURVIVED"
            sys.stdout.write(
                f"{fate:24} {verdict.seconds:6.1f} s  {mutant.where}: {mutant.breaks}\n"
            )
            sys.stdout.flush()
            yield verdict


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--room",
        nargs="*",
        choices=ROOMS,
        default=list(ROOMS),
        help="only the mutants of these rooms",
    )
    parser.add_argument(
        "--only", default="", help="only mutants whose room, definition or effect contains this"
    )
    parser.add_argument(
        "--every", type=int, default=1, help="take one in so many mutants of each room"
    )
    parser.add_argument("--full", action="store_true", help="with the slow suites too")
    parser.add_argument("--jobs", type=int, default=1, help="rooms at a time")
    given = parser.parse_args()
    with ThreadPoolExecutor(given.jobs) as threads:
        found = threads.map(
            lambda name: list(_room_verdicts(name, given.only, given.every, full=given.full)),
            given.room,
        )
        verdicts = [verdict for each in found for verdict in each]
    sys.stdout.write(json.dumps(score(verdicts)) + "\n")
    return any(not verdict.killer for verdict in verdicts)


def score(verdicts):
    killers = Counter(verdict.killer for verdict in verdicts if verdict.killer)
    survivors = [
        f"{verdict.mutant.where}: {verdict.mutant.breaks}"
        for verdict in verdicts
        if not verdict.killer
    ]
    return {
        "mutants": len(verdicts),
        "killed": len(verdicts) - len(survivors),
        "by": killers,
        "survivors": survivors,
    }


if __name__ == "__main__":
    sys.exit(main())
