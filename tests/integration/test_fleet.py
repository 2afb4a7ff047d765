"""The multi-turn benchmark on real vLLM engines and routers: an engine dies, and its conversations
stay warm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from tests.conftest import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

SESSIONS, TURNS, KILLED_AFTER = 4, 4, 2
SHAPE = [
    *("--sessions", str(SESSIONS), "--turns", str(TURNS), "--kill-after-turn", str(KILLED_AFTER)),
    *(
        "--first-length",
        "512",
        "--turn-length",
        "64",
        "--output-len",
        "8",
        "--think-seconds",
        "0.2",
    ),
    *("--dtype", "float32", "--block-size", "32", "--chunk-tokens", "64", "--require-same-tokens"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


def measured(model: Path, folder: Path, *words: str, path: str = "") -> dict[str, Any]:
    """The whole command: each arm's entry. A model this small may be computed sooner than loaded:
    whether hits are right is tested, not whether they pay."""
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    environment["KVTIER_SERVER_TIMEOUT_MS"] = "5000"
    command = [
        sys.executable,
        "-m",
        "kvtier.bench.multi_turn",
        "--model",
        str(model),
        "--output-dir",
        str(folder),
        "--load-every-hit",
    ]
    done = subprocess.run(
        [*command, *SHAPE, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    arms: dict[str, Any] = json.loads((folder / "multi_turn.json").read_text())["arms"]
    for arm in arms.values():
        assert (arm["turns"], arm["failed_turns"]) == (SESSIONS * TURNS, 0), (
            "an engine's death ends no turn"
        )
    return arms


def test_sticky_over_haproxy_stays_warm_when_an_engine_dies(model: Path, tmp_path: Path) -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("there is no haproxy")
    arms = measured(model, tmp_path, "--arms", "round-robin,sticky+kvtier")
    without, shared = arms["round-robin"], arms["sticky+kvtier"]
    assert shared["killed"]["moved_conversations"] == SESSIONS // 2, (
        "half of them were the dead engine's"
    )
    assert shared["killed"]["moved_cached_share"] > 0.75, (
        "what the dead engine computed comes from the server"
    )
    assert without["killed"]["moved_cached_share"] < 0.25, (
        "the GPU cache must be too small, else nothing is measured"
    )
    assert shared["hit_tokens"]["ram"] > 0 == without["hit_tokens"]["ram"]
    assert shared["cached_tokens_later_turns"] > 2 * without["cached_tokens_later_turns"]


def test_cache_aware_is_no_worse_than_sticky_when_an_engine_dies(
    model: Path, tmp_path: Path
) -> None:
    """The clients of the cache-aware arm do not say which conversation they go on with."""
    if shutil.which("haproxy") is None:
        pytest.skip("there is no haproxy")
    arms = measured(model, tmp_path, "--arms", "sticky+kvtier,cache-aware+kvtier")
    sticky, aware = arms["sticky+kvtier"], arms["cache-aware+kvtier"]
    assert aware["engines_per_conversation"] <= 1.5, "only the dead engine's have a second one"
    assert aware["killed"]["moved_conversations"] == SESSIONS // 2
    assert aware["killed"]["moved_cached_share"] > 0.75
    assert aware["killed"]["moved_cached_share"] >= sticky["killed"]["moved_cached_share"] - 0.05
    assert aware["cached_tokens_later_turns"] >= 0.95 * sticky["cached_tokens_later_turns"]


def test_sticky_over_vllm_router_stays_warm_when_an_engine_dies(
    model: Path, tmp_path: Path
) -> None:
    places = sorted(ROOT.glob(".venv-peers/vllm-router-*/bin"))
    if not places:
        pytest.skip("vllm-router is not installed (make peers)")
    arms = measured(
        model,
        tmp_path,
        "--arms",
        "sticky+kvtier",
        "--router",
        "sh deploy/routing/vllm-router.sh",
        path=str(places[0]),
    )
    (arm,) = arms.values()
    assert arm["cached_tokens_later_turns"] > 0.75 * arm["prompt_tokens_later_turns"]


def test_a_cookie_is_enough(model: Path, tmp_path: Path) -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("there is no haproxy")
    (arm,) = measured(model, tmp_path, "--arms", "sticky+kvtier", "--session-by", "cookie").values()
    assert arm["killed"]["moved_conversations"] == SESSIONS // 2
    assert arm["killed"]["moved_cached_share"] > 0.75
