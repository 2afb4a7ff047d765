"""SGLang's real HiCache (in an environment of its own) over kvtier servers: sglang_cases.py, in one
process, because SGLang's import takes ten seconds."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.child_process import wait_for
from tests.command import bare

ROOT = Path(__file__).parents[2]
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
    [("not extended", 40), pytest.param("extended", 2, marks=pytest.mark.extended)],
)
def test_every_case_holds_under_sglangs_own_controllers(models, which, cases):
    words = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [str(PYTHON), *words, "tests/integration/sglang_cases.py"], cwd=ROOT,
        env=bare(SGLANG_CASES_MODELS=models), capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed, done.stdout[-9000:] + done.stderr[-3000:]
    assert int(passed[1]) >= cases


def test_all_arguments_that_do_not_decide_are_sglangs():
    code = (
        "from tests.integration import sglang_cpu\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "from kvtier.extensions.sglang.engine_identity import DOES_NOT\n"
        "print(sorted(set(DOES_NOT) - set(ServerArgs.__struct_fields__)))"
    )
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-c", code], cwd=ROOT, env=bare(), capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2] == "[]", done.stdout
