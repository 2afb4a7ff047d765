"""``python -m tests.trust [--slice | --full] [--out FILE] [--compare FILE]``: every suite, one
table, one results file.

Exit status 1 when a promise was broken or a mutant survived, or when a figure is not that of
``--compare FILE``, an earlier results file. ``--slice`` is for every change and leaves out what
needs a real engine (``python -m tests.trust.stuck``, five minutes). ``--full`` is for a release.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.bench.report import Row, write_results
from tests.conftest import vllm_versions
from tests.trust import compared, corruption, fuzzed


@dataclass
class Finding:
    """What one suite did and saw. ``faults``: how many it injected."""

    suite: str
    cases: int = 0
    unit: str = ""
    seeds: int = 0
    faults: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of everything."""

    seeds: int
    nvme_bits: int
    redis_bits: int
    object_bits: int
    frames: int
    kills: int
    cuts: int
    engine_steps: int
    """Of each cell."""
    mutants: tuple[str, ...]
    """More words for the run of the mutants."""


_SIMULATED_FROM = (0, 32)
"""The first vLLM whose scheduler the simulated engines know."""
SLICE = Extent(2_500, 7_000, 4_000, 4_000, 50_000, 240, 4_000, 600, ("--every", "10"))
STUCK_TESTS = (
    "tests/trust/test_stuck.py",
    "tests/fault/test_nvme_disks.py",
    "tests/fault/test_redis_faults.py",
    "tests/fault/test_object_faults.py",
    "tests/fault/test_hostile_clients.py",
)
FULL = Extent(100_000, 100_000, 50_000, 50_000, 1_000_000, 5_000, 100_000, 20_000, ("--full",))


def _told(suite, unit, module, *words, cases, faults, broken):
    """A suite in a process of its own, with the names that its figures have there."""
    told = asked(f"tests.{module}", *words)
    figures = told[cases], unit, told.get("seeds", 1), told[faults], told[broken]
    return Finding(suite, *figures, detail=told)


def simulation(extent):
    """Store, Directory, leases, lanes and tiers under a scheduler of faults and deaths."""
    told = asked("tests.trust.simulation", "--seeds", str(extent.seeds))
    deaths = sum(told["events"].get(name, 0) for name in ("crashes", "power cuts", "engines died"))
    faults = deaths + sum(told["injected"].values())
    detail = {"events": told["events"], "injected": told["injected"]}
    figures = told["steps"], "steps", told["seeds"], faults, told["violations"]
    return Finding("simulation", *figures, detail=detail)


def _damaged(where, tally):
    figures = tally.cases, "damaged chunks", 1, tally.bits, tally.violations
    return Finding(f"corruption: {where}", *figures)


def corrupt_nvme(extent):
    with tempfile.TemporaryDirectory(prefix="kvtier-trust-") as folder:
        return _damaged("NVMe", corruption.nvme(Path(folder), extent.nvme_bits))


def corrupt_redis(extent):
    if shutil.which("redis-server") is None:
        return Finding("corruption: Redis", detail={"skipped": "there is no redis-server"})
    return _damaged("Redis", corruption.redis(extent.redis_bits))


def corrupt_objects(extent):
    return _damaged("objects", corruption.objects(extent.object_bits))


def kills(extent):
    """kill -9 of servers and engines under load."""
    if shutil.which("redis-server") is None:
        return Finding("kill -9", detail={"skipped": "there is no redis-server"})
    return _told("kill -9", "restarts", "trust.crash", "--kills", str(extent.kills),
                 cases="restarts", faults="kills", broken="violations")  # fmt: skip


def cuts(extent):
    """Power cuts on what the NVMe tier has written."""
    return _told("power cuts", "images", "trust.power", "--cuts", str(extent.cuts),
                 cases="cuts", faults="sectors", broken="violations")  # fmt: skip


def stuck_parts(extent):
    """Tiers, servers and whole stores whose backends, disks, clients or descriptors fail them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *STUCK_TESTS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    violations = failed or (
        [] if done.returncode == 0 else [f"pytest ended with status {done.returncode}"]
    )
    cases = int(passed[1]) if passed else 0
    return Finding("stuck parts", cases, "tests", 0, cases + len(failed), violations)


def stuck(extent):
    """A real engine whose Redis is paused, slow, dead or flapping."""
    return _told("stuck, real engine", "questions", "trust.stuck",
                 cases="questions", faults="faults", broken="missed")  # fmt: skip


def engines(extent):
    """vLLM's own schedulers with both halves of the connector, over a fake model whose KV is
    checked at every read. Also those of the newest vLLM, where ``make vllm-next`` has brought it,
    in a quarter of the steps."""
    if importlib.util.find_spec("vllm") is None:
        return Finding("engines", detail={"skipped": "vLLM is not installed"})
    finding, jobs = Finding("engines", unit="steps"), str(os.cpu_count() or 1)
    for version, place in vllm_versions().items():
        if tuple(map(int, version.split(".")[:2])) < _SIMULATED_FROM:
            continue
        steps = extent.engine_steps if place is None else extent.engine_steps // 4
        words = ("--steps", str(steps), "--jobs", jobs)
        told = asked("tests.trust.engine", *words, first=place)
        assert told["vllm"].startswith(version), f"{told['vllm']} instead of {version}"
        finding.cases += told["steps"]
        finding.seeds += told["seeds"]
        finding.faults += told.get("faults", 0)
        finding.violations += [f"vLLM {version}: {text}" for text in told["violations"]]
        finding.detail[version] = told
    return finding


def wire(extent):
    """Frames at random against a live server."""
    words = "--frames", str(extent.frames), "--seed", "1"
    return _told("wire fuzz", "frames", "stress.fuzz_wire", *words,
                 cases="frames", faults="refused", broken="bugs")  # fmt: skip


def parsers(extent):
    """Anything at all to whatever reads what others wrote, and how much of that code it reached."""
    told = asked("tests.trust.fuzzed")
    figures = told["tests"], "properties", 0, told["tests"], fuzzed.violations(told)
    return Finding("fuzz", *figures, detail=told)


def defects(extent):
    """Mutants of the product, each of which a suite must notice."""
    told = asked("tests.trust.mutants", "--jobs", "2", *extent.mutants)
    violations = [f"survived: {name}" for name in told["survivors"]]
    figures = told["mutants"], "defects", 0, told["mutants"], violations
    return Finding("mutants", *figures, detail=told)


SUITES: dict[str, Callable[[Extent], Finding]] = {
    "simulation": simulation,
    "engines": engines,
    "kills": kills,
    "cuts": cuts,
    "nvme": corrupt_nvme,
    "redis": corrupt_redis,
    "objects": corrupt_objects,
    "wire": wire,
    "fuzz": parsers,
    "parts": stuck_parts,
    "mutants": defects,
    "stuck": stuck,
}
NOT_IN_A_SLICE = {"stuck"}


def asked(module, *words, first=None):
    """The last line a suite in a process of its own prints: one object of JSON. ``first``: a folder
    whose modules are imported before all others."""
    command = [sys.executable, "-m", module, *words]
    env = os.environ | ({} if first is None else {"PYTHONPATH": str(first)})
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    try:
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"{module} ended with status {done.returncode} and no result") from None
    return told


def table(findings):
    """For people."""
    head = ("suite", "cases", "", "seeds", "faults", "violations", "seconds")
    lines = ["{:20} {:>12} {:15} {:>8} {:>10} {:>11} {:>8}".format(*head)]
    for each in findings:
        row = f"{each.suite:20} {each.cases:12,} {each.unit:15} {each.seeds:8,} {each.faults:10,} "
        row += f"{len(each.violations):11} {each.seconds:8.1f}"
        skipped = each.detail.get("skipped")
        lines.append(f"{row}   skipped: {skipped}" if skipped else row)
    lines += [f"  {each.suite}: {text}" for each in findings for text in each.violations[:20]]
    return "\n".join(lines)


def rows(findings):
    """For the results file."""
    return [
        row
        for each in findings
        for row in (
            Row(f"{each.suite}: cases", each.cases, each.unit),
            Row(f"{each.suite}: faults injected", each.faults, "faults"),
            Row(f"{each.suite}: violations", len(each.violations), "violations", limit=0),
        )
    ]


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--slice", action="store_true", help="minutes (the default)")
    size.add_argument("--full", action="store_true", help="an hour or so")
    parser.add_argument("--only", nargs="*", choices=SUITES)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument(
        "--compare", type=Path, help="results file that must have the same figures (those that can)"
    )
    given = parser.parse_args()
    logging.getLogger("kvtier").setLevel(logging.CRITICAL + 1)
    findings = []
    for name in given.only or [name for name in SUITES if given.full or name not in NOT_IN_A_SLICE]:
        begun = time.monotonic()
        try:
            findings.append(SUITES[name](FULL if given.full else SLICE))
        except RuntimeError as error:
            findings.append(Finding(name, violations=[str(error)]))
        findings[-1].seconds = round(time.monotonic() - begun, 1)
        sys.stderr.write(f"{findings[-1].suite}: {len(findings[-1].violations)} violations\n")
    sys.stdout.write(table(findings) + "\n")
    suites = [asdict(each) for each in findings]
    other = compared.differences(suites, given.compare) if given.compare else []
    sys.stderr.writelines(f"{line}\n" for line in other)
    if given.out:
        write_results(given.out, "trust", rows(findings), suites=suites)
    return bool(other) or any(each.violations for each in findings)


if __name__ == "__main__":
    sys.exit(main())
