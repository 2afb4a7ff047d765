"""What the fuzz tests reach: ``python -m tests.trust.fuzzed`` runs them under coverage, with
branches.

They feed anything to the parts that read what somebody else may have written: configuration, frames
of the wire and what a session is asked, the NVMe tier's files, headers in Redis and replies of its
protocol, sealed chunks. A parser that they do not get through is not fuzzed, so a part below
:data:`LEAST_PERCENT` is a violation, as a test that fails.

Prints one object of JSON on its last line: ``tests``, ``failed``, and percent of lines and branches
by part.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FUZZ_TESTS = (
    "tests/property/test_config_fuzz.py",
    "tests/property/test_wire_fuzz.py",
    "tests/property/test_stored_forms.py",
    "tests/property/test_redis_wire.py",
    "tests/unit/config/test_redis_url.py",
)
PARTS = (
    "kvtier/config/load.py",
    "kvtier/config/values.py",
    "kvtier/tiers/redis/url.py",
    "kvtier/protocol/wire.py",
    "kvtier/server/session.py",
    "kvtier/server/stream.py",
    "kvtier/tiers/nvme/index.py",
    "kvtier/tiers/nvme/files.py",
    "kvtier/tiers/redis/layout.py",
    "kvtier/tiers/redis/wire.py",
    "kvtier/tiers/sealed.py",
)
LEAST_PERCENT = 70.0
"""What is left are the halves that write, and that open connections."""


def fuzzed():
    """Run the tests. Returns what they reached."""
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzzed-") as folder:
        data, told = f"--data-file={folder}/data", Path(folder) / "told.json"
        coverage = [sys.executable, "-m", "coverage"]
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *FUZZ_TESTS]
        command = [*coverage, "run", "--branch", "--source=kvtier", data, *tests]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        subprocess.run([*coverage, "json", "-q", data, "-o", str(told)], check=True)
        files = json.loads(told.read_text())["files"]
    passed = re.search(r"(\d+) passed", run.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    reached = {part: files[part] for part in PARTS if part in files}
    percent = {part: round(one["summary"]["percent_covered"], 1) for part, one in reached.items()}
    return {
        "tests": int(passed[1]) if passed else 0,
        "failed": failed
        or ([] if run.returncode == 0 else [f"pytest ended with status {run.returncode}"]),
        "percent": dict.fromkeys(PARTS, 0.0) | percent,
    }


def violations(told):
    """Tests that failed, and parts that were hardly reached."""
    low = [
        f"{part}: {percent} % reached"
        for part, percent in told["percent"].items()
        if percent < LEAST_PERCENT
    ]
    return [*told["failed"], *low]


if __name__ == "__main__":
    found = fuzzed()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.exit(bool(violations(found)))
