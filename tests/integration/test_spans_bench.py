"""The benchmark of spans on real vLLM servers, small: every arm answers as full prefill does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from tests.conftest import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

SHAPE = [
    *("--pool", "4", "--documents", "3", "--requests", "8", "--rounds", "2", "--output-len", "8"),
    *("--anchor-length", "64", "--document-length", "128", "--dtype", "float32"),
    *("--block-size", "32", "--chunk-tokens", "32", "--require-same-tokens"),
    "--load-every-hit",  # a model this small may be computed sooner than loaded
]


def test_exact_arms_answer_as_full_prefill_and_the_stable_order_computes_less(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path / "tiny", "tiny")
    command = [sys.executable, "-m", "kvtier.bench.spans", "--model", str(model), *SHAPE]
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    arms = json.loads((tmp_path / "spans.json").read_text())["arms"]
    computed = {name: arm.get("computed_tokens") for name, arm in arms.items()}
    asked = arms["none"]["prompt_tokens"]
    assert computed["none"] == asked, "nothing is cached in the reference"
    assert computed["kvtier+stable"] < computed["kvtier"] < asked
    # The last token is always computed, so vLLM's own blocks may end one chunk earlier or later.
    assert computed["kvtier"] == pytest.approx(computed["vllm-prefix-cache"], rel=0.05)
    assert arms["kvtier"]["hit_tokens"]["ram"] > 0
    blended = arms["spans-k0"], arms["spans-k16"]
    assert [arm["computed_in_place_tokens"] for arm in blended] == [0, 16 * 2 * 16]
    assert all(arm["warm_up_s"] > 0 and arm["failed_requests"] == 0 for arm in blended)
    assert blended[0]["computed_tokens"] < blended[1]["computed_tokens"] < computed["kvtier"]
    for name, arm in arms.items():
        if name not in ("none", "lmcache-blend", "spans-k0", "spans-k16"):
            agreed = arm["as_full_prefill"]
            assert agreed["same_answer"] == agreed["compared"] == 16
