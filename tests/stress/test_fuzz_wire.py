"""A short run of the fuzzer. The long one is ``python -m tests.stress.fuzz_wire --frames
1000000``."""

from __future__ import annotations

import json
import subprocess
import sys


def test_frames_at_random_break_nothing() -> None:
    command = [sys.executable, "-m", "tests.stress.fuzz_wire", "--frames", "50000", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (
        result["frames"] >= 50_000 and result["refused"] > 100 and result["counts"]["dropped"] > 100
    )
