"""Long Doc QA on real vLLM servers, small: the whole command, its arms, its files, and the servers
it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from tests.conftest import ROOT

DOCUMENTS, TOKENS = 4, 512
ASKED = DOCUMENTS * 2 * TOKENS
SHAPE = f"""--num-documents {DOCUMENTS} --document-length {TOKENS} --question-length 32
    --output-len 8 --repeat-count 2 --max-inflight-requests 2 --dtype float32 --block-size 32
    --chunk-tokens 64 --settle-seconds 1 --require-same-tokens --load-every-hit""".split()


def run(*command):
    words = (sys.executable, "-m", *command)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alive(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(mark).encode() in environment and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


@pytest.mark.vllm
@pytest.mark.slow
def test_arms_answer_as_none_and_hit_where_they_should(tmp_path):
    model, folder = tmp_path / "tiny", tmp_path / "out"
    run("kvtier.bench.model", str(model), "--preset", "tiny")
    words = ["--model", str(model), "--output-dir", str(folder)]
    words += ["--arms", "none,kvtier-nvme-restart", *SHAPE]
    assert "All arms gave the same greedy tokens as none" in run("kvtier.bench.long_doc_qa", *words)
    told = json.loads((folder / "long_doc_qa.json").read_text())
    assert told["engines"] == "Model Runner V1, synchronous scheduling", "as vLLM has it on CPUs"
    arms: dict[str, dict[str, Any]] = told["arms"]
    assert all(arm["prompt_tokens"] == ASKED + DOCUMENTS * 2 * 32 for arm in arms.values())
    assert {path.suffix for path in folder.glob("long_doc_qa.*")} == {".json", ".png"}
    assert not list(folder.glob("servers/*/nvme")), "the arms' NVMe folders are gone"
    assert alive(folder) == []
    assert not any(arms["none"]["hit_tokens"].values()), "else nothing is measured"
    hits = arms["kvtier-nvme-restart"]["hit_tokens"]
    assert {tier: tokens for tier, tokens in hits.items() if tokens} == {
        "nvme": ASKED // 2,  # first from disk
        "ram": ASKED // 2,
    }


@pytest.mark.vllm
def test_a_model_is_the_same_again_and_made_once(tmp_path):
    one, other = make_model(tmp_path / "one", "tiny"), make_model(tmp_path / "other", "tiny")
    made = (one / "model.safetensors").stat()
    assert make_model(one, "tiny") == one and (one / "model.safetensors").stat() == made
    for name in ("model.safetensors", "tokenizer.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_folder_with_other_things_is_never_overwritten(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="not made by this command"):
        make_model(tmp_path, "tiny")
    assert (tmp_path / "mine").read_text() == "precious"
