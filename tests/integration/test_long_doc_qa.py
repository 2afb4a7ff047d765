"""Long Doc QA on real vLLM servers, small: the whole command, its arms, its files, and the servers
it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.long_doc_qa.arms import installed
from kvtier.bench.model import make_model
from kvtier.bench.processes.servers import ServerError, VllmServer
from kvtier.bench.requests.client import connect

ROOT = Path(__file__).parents[2]
DOCUMENTS, TOKENS = 4, 512
ASKED = DOCUMENTS * 2 * TOKENS
SHAPE = [
    *(
        "--num-documents",
        str(DOCUMENTS),
        "--document-length",
        str(TOKENS),
        "--question-length",
        "32",
    ),
    *(
        "--output-len",
        "8",
        "--repeat-count",
        "2",
        "--max-inflight-requests",
        "2",
        "--dtype",
        "float32",
    ),
    *(
        "--block-size",
        "32",
        "--chunk-tokens",
        "64",
        "--settle-seconds",
        "1",
        "--require-same-tokens",
    ),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *command)
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    done = run("kvtier.bench.model", str(folder), "--preset", "tiny")
    assert done.returncode == 0, done.stderr
    return folder


def hits_of_arms(model: Path, folder: Path, *words: str) -> dict[str, dict[str, int]]:
    """The whole command: for each arm the tokens of its hits by tier. It leaves files, and neither
    processes nor folders."""
    done = run(
        "kvtier.bench.long_doc_qa",
        "--model",
        str(model),
        "--output-dir",
        str(folder),
        "--load-every-hit",
        *SHAPE,
        *words,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All arms gave the same greedy tokens as none" in done.stdout
    told = json.loads((folder / "long_doc_qa.json").read_text())
    assert told["engines"] == "Model Runner V1, synchronous scheduling", "as vLLM has it on CPUs"
    arms: dict[str, dict[str, Any]] = told["arms"]
    assert all(arm["prompt_tokens"] == ASKED + DOCUMENTS * 2 * 32 for arm in arms.values())
    assert {path.suffix for path in folder.glob("long_doc_qa.*")} == {".json", ".csv", ".png"}
    assert not list(folder.glob("servers/*/nvme")), "the arms' NVMe folders are gone"
    assert alive(folder) == []
    return {
        name: {tier: tokens for tier, tokens in arm["hit_tokens"].items() if tokens}
        for name, arm in arms.items()
    }


def alive(mark: Path) -> list[int]:
    """Processes whose environment names this folder."""
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
def test_arms_answer_as_none_and_hit_where_they_should(model: Path, tmp_path: Path) -> None:
    """Of the arms that one has all but two engines: a restart, a disk, and hits of both tiers."""
    hits = hits_of_arms(model, tmp_path, "--arms", "none,kvtier-nvme-restart")
    assert hits["none"] == {}, (
        "documents must not fit the small GPU cache, else nothing is measured"
    )
    assert hits["kvtier-nvme-restart"] == {"nvme": ASKED // 2, "ram": ASKED // 2}, (
        "first from disk, then from RAM"
    )


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.extended
def test_every_other_arm_answers_as_none_and_hits_where_it_should(
    model: Path, tmp_path: Path
) -> None:
    others = [arm.name for arm in installed() if arm.name != "kvtier-nvme-restart"]
    hits = hits_of_arms(model, tmp_path, "--arms", ",".join(others))
    assert hits["vllm-prefix-cache"] == {"gpu": ASKED}
    assert hits["kvtier-ram"] == {"ram": ASKED}
    assert hits["kvtier-server"] == {"ram": ASKED}, "what the first engine computed, and no other"
    assert hits["kvtier-nvme"].get("nvme", 0) > ASKED / 2
    assert sum(hits["kvtier-nvme"].values()) == ASKED
    if "kvtier-redis" in hits:
        assert hits["kvtier-redis"].get("redis", 0) > ASKED / 2
        assert sum(hits["kvtier-redis"].values()) == ASKED


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.extended
def test_a_server_is_restarted_and_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    args = [
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "8",
        "--block-size",
        "128",
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "MARK": str(tmp_path)}
    with VllmServer(str(model), args, environment, tmp_path / "log") as server:
        assert len(alive(tmp_path)) > 1, "the engine is a process of its own"
        server.restart()
        client, words = connect(server.base_url, None, 10)
        assert client.vllm and words
        assert (tmp_path / "log").read_text().count("$ env") == 2, "it was started twice"
    assert alive(tmp_path) == []


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.extended
def test_a_cache_too_small_for_the_model_is_refused_with_vllms_own_reason(
    model: Path, tmp_path: Path
) -> None:
    args = [
        "--max-model-len",
        "8192",
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "2",
        "--block-size",
        "128",
    ]
    with (
        pytest.raises(ServerError, match="KV cache"),
        VllmServer(str(model), args, {"VLLM_CPU_KVCACHE_SPACE": "1"}, tmp_path / "log"),
    ):
        pytest.fail("it came up")


@pytest.mark.vllm
def test_a_model_is_the_same_again_and_made_once(model: Path, tmp_path: Path) -> None:
    made = model / "model.safetensors"
    before = made.stat()
    make_model(model, "tiny")
    assert made.stat() == before
    other = tmp_path / "tiny"
    assert run("kvtier.bench.model", str(other), "--preset", "tiny").returncode == 0
    assert (other / "model.safetensors").read_bytes() == made.read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert run("kvtier.bench.model", str(other), "--preset", "tiny", "--seed", "1").returncode == 0
    assert (other / "model.safetensors").read_bytes() != made.read_bytes()


def test_a_folder_with_other_things_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="not made by this command"):
        make_model(tmp_path, "tiny")
    assert (tmp_path / "mine").read_text() == "precious"
