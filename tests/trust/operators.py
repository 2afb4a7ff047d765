"""Mutants that a tool makes: cosmic-ray's operators on the pure modules that decide.

``python -m tests.trust.operators`` (``make mutants``) has cosmic-ray change one operator, number,
condition or keyword at a time in a copy of the package, and run the unit tests of that module
there. What no test notices is printed as a diff, and the table goes to
``bench/results/operators.json``. Hand-made mutants (:mod:`tests.trust.mutants`) say what a user
would lose. These say which part of a decision no test looks at.

The modules are pure (``lint-imports`` holds that), so they have no log and no lock to skip.
"""

import argparse
import compileall
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.bench.report import Row, write_results
from tests.child_process import wait_for
from tests.trust import suite_server
from tests.trust.mutants import PYTEST, ROOT, copy_package
from tests.trust.suite_server import CLIENT

TESTS: Mapping[str, tuple[str, ...]] = {
    "load_policy/choose": ("tests/unit/load_policy",),
    "load_policy/latency": ("tests/unit/load_policy",),
    "load_policy/prefill": ("tests/unit/load_policy",),
    "store/directory": (
        "tests/unit/store/test_directory.py",
        "tests/unit/store/test_directory_check.py",
    ),
    "store/tier_index": (
        "tests/unit/store/test_tier_index.py",
        "tests/unit/store/test_directory.py",
    ),
    "store/quota": ("tests/unit/store/test_quota.py", "tests/unit/store/test_directory.py"),
    "store/slots": ("tests/unit/store/test_slots.py", "tests/unit/store/test_directory.py"),
}
"""Module -> the unit tests that cover it, in a second or two."""
OPERATORS = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Pow_Mul|LShift_RShift)",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)",
    "ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt)",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_(USub_UAdd|Delete_Not)",
    "ZeroIterationForLoop",
)
"""Of cosmic-ray's operators those that stand for slips. The others swap every operator for each
other one, which no test that notices one of them can miss. ``|`` is left out: it stands in
annotations, which do nothing at run time."""
RESULTS = ROOT / "bench/results/operators.json"
_WITHOUT = ("-p", "no:anyio", "-p", "no:xdist")
"""Plugins whose import takes a third of such a suite's time."""
SUITE_S = 60
"""A suite that takes longer has noticed: a loop does not end."""


class Survivor(NamedTuple):
    """A change that no test noticed."""

    definition: str
    operator: str
    was: str
    """The line before."""
    became: str
    """The line after."""


class Figures(NamedTuple):
    """One module's row."""

    mutants: int
    killed: int
    seconds: float
    survivors: list[Survivor]


class CosmicRay:
    """The tool, whose programs are in ``tool``, on one module of the copy in ``place``."""

    def __init__(self, tool, place, module):
        self._tool, self._place = tool, place
        self._environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
        self._session, self._config = f"{Path(module).name}.sqlite", f"{Path(module).name}.toml"
        self._socket = place / f"{Path(module).name}.sock"
        self._words = [*PYTEST[2:], *_WITHOUT, "--hypothesis-seed=0", *TESTS[module]]
        command = shlex.join([sys.executable, "-S", "-c", CLIENT, str(self._socket)])
        kept = "|".join(f"core/{each}$" for each in OPERATORS)
        (place / self._config).write_text(
            f"[cosmic-ray]\nmodule-path = 'kvtier/{module}.py'\ntimeout = {SUITE_S + 30}\n"
            f"excluded-modules = []\ntest-command = {json.dumps(command)}\n"
            "[cosmic-ray.distributor]\nname = 'local'\n"
            f"[cosmic-ray.filters.operators-filter]\nexclude-operators = ['(?!{kept})']\n",
            encoding="utf-8",
        )

    def run(self):
        """Tries every mutant.

        Raises:
            SystemExit: the tests fail without any.
        """
        begun = time.monotonic()
        self._call("cosmic-ray", "init", self._config, self._session)
        self._call("cr-filter-operators", self._session, self._config)
        with self._suite():
            self._call("cosmic-ray", "baseline", self._config)
            self._call("cosmic-ray", "exec", self._config, self._session)
        lines = self._call("cosmic-ray", "dump", self._session).splitlines()
        tried = [
            (item["mutations"][0], result)
            for item, result in map(json.loads, lines)
            if result["worker_outcome"] == "normal"
        ]
        survivors = [
            _survivor(mutation, result["diff"])
            for mutation, result in tried
            if result["test_outcome"] == "survived"
        ]
        seconds = round(time.monotonic() - begun, 1)
        return Figures(len(tried), len(tried) - len(survivors), seconds, sorted(survivors))

    @contextmanager
    def _suite(self):
        """The tests run in forks meanwhile."""
        command = [sys.executable, "-m", suite_server.__name__]
        with (self._place / "suite.log").open("w") as log:
            server = subprocess.Popen(
                [*command, str(self._socket), str(SUITE_S), *self._words],
                cwd=self._place,
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        try:
            wait_for(self._socket.exists, "the suite's server listens")
            yield
        finally:
            server.kill()
            server.wait()

    def _call(self, program, *arguments):
        done = subprocess.run(
            [self._tool / program, *arguments],
            cwd=self._place,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{program} {shlex.join(arguments)}:\n{done.stdout}{done.stderr}")
        return done.stdout


def _survivor(mutation, diff):
    def changed(sign):
        return " ".join(
            line[1:].strip()
            for line in diff.splitlines()
            if line.startswith(sign) and not line.startswith(sign * 3)
        )

    operator = mutation["operator_name"].removeprefix("core/")
    return Survivor(mutation["definition_name"] or "", operator, changed("-"), changed("+"))


def _tried(tool, module):
    with tempfile.TemporaryDirectory(prefix="kvtier-operators-") as folder:
        copy_package(Path(folder))
        compileall.compile_dir(Path(folder) / "kvtier", quiet=2)
        found = CosmicRay(tool, Path(folder), module).run()
    sys.stdout.write("\n".join(_told(module, found)) + "\n")
    sys.stdout.flush()
    return found


def _told(module, found):
    yield f"{module}: {found.killed} of {found.mutants} noticed, {found.seconds} s"
    for each in found.survivors:
        yield f"  {each.definition} ({each.operator})\n    - {each.was}\n    + {each.became}"


def main(given=None):
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", type=Path, required=True, help="where cosmic-ray's programs are")
    parser.add_argument("--only", nargs="*", choices=TESTS, default=list(TESTS))
    parser.add_argument("--jobs", type=int, default=2, help="modules at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(given)
    with ThreadPoolExecutor(chosen.jobs) as threads:
        found = threads.map(lambda module: _tried(chosen.tool.absolute(), module), chosen.only)
        table = dict(zip(chosen.only, found, strict=True))
    rows = [
        Row(f"{module}: mutants noticed", row.killed, "mutants", limit=row.mutants)
        for module, row in table.items()
    ]
    survivors = {
        module: [each._asdict() for each in row.survivors] for module, row in table.items()
    }
    write_results(chosen.out, "operators", rows, survivors=survivors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
