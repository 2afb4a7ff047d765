"""SGLang's real HiCache (in an environment of its own) over kvtier servers: sglang_cases.py, in one
process, because SGLang's import takes ten seconds."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from kvtier.tiers.nvme.check import check, tier_folders
from tests.child_process import wait_for
from tests.command import ROOT, bare, ran

PYTHON = ROOT / ".venv-peers" / "sglang-0.5.23" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.parents[1] / "ready").exists(), reason="sglang is not installed: make peers"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that differ in weights alone, older than the engine's process."""
    folder = tmp_path_factory.mktemp("models")
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "none"}')
        (folder / name / "model.safetensors").write_text(name)
    made = time.time()
    wait_for(lambda: time.time() > made + 0.1, "the files are older")
    return folder


@pytest.mark.parametrize(
    ("which", "cases"),
    [("not extended", 41), pytest.param("extended", 2, marks=pytest.mark.extended)],
)
def test_every_case_holds_under_sglangs_own_controllers(models, which, cases):
    words = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-m", which]
    words += ["tests/integration/sglang_cases.py"]
    done = ran([str(PYTHON), *words], bare(SGLANG_CASES_MODELS=models))
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed, done.stdout[-9000:] + done.stderr[-3000:]
    assert int(passed[1]) >= cases


STAND_IN = """
import sys, types
if sys.orig_argv[1:3] == ["-m", "sglang.launch_server"]:
    from tests.integration import sglang_cpu
    sys.modules["sglang.srt.entrypoints.http_server"] = sglang_cpu
"""
PAGE = ROOT / "kvtier/extensions/sglang/README.md"


@pytest.mark.extended
def test_the_pages_own_command_starts_a_bounce_beside_the_engine(tmp_path):
    """SGLang's own program reads the command that launch made, up to where a GPU is needed."""
    line = "kvtier launch -- python -m sglang.launch_server --model-path MODEL"
    assert f"KVTIER_AUTO=true {line}\n" in PAGE.read_text()
    model = make_model(tmp_path / "model", "demo")
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    words = line.replace("MODEL", str(model)).replace("python", str(PYTHON)).split()
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "KVTIER_AUTO": "true"}
    env |= {"KVTIER_NVME_PATH": tmp_path / "nvme", "KVTIER_NVME_BYTES": "4GiB"}
    done = ran([str(PYTHON), "-m", *words, "--device", "cpu"], bare(**env))
    told = json.loads(done.stdout.strip().split("\n")[-1])
    assert "2 GiB as a bounce for NVMe" in done.stderr
    assert 0.9 * (2 << 30) < told["ram_bytes"] <= 2 << 30
    assert (told["stored"], told["read"], told["equal"]) == (1000, 125, True)
    # It has killed its children and itself, and what was on the way to NVMe is there.
    (tier,) = map(check, tier_folders(tmp_path / "nvme"))
    assert (done.returncode, tier.good, tier.closed) == (128 + signal.SIGKILL, 1000, True)
    assert not Path(told["server"].removeprefix("unix://")).parent.exists()
