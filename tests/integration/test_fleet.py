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
from kvtier.bench.processes.engine import cache_args, cpu_env, shared_args, transfer
from kvtier.bench.processes.servers import VllmServer
from kvtier.bench.requests import client
from kvtier.bench.requests.prompts import Ask
from tests.admin_server import administered
from tests.child_process import wait_for
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


def test_lookup_says_what_an_engine_has_in_its_gpu_and_in_ram_until_it_dies(
    model: Path, tmp_path: Path
) -> None:
    """A real engine's own events, also those from before the server followed it."""
    block, at = 32, f"ipc://{tmp_path.parent}/e"
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": at,
        "replay_endpoint": f"{at}r",
    }
    tokens = [token % 200 + 3 for token in range(8 * block + 1)]
    with administered(ram_bytes="8MiB", admin_engines=f"engine-1={at}?replay={at}r") as server:
        words = [*shared_args("tiny", "float32", block), "--enforce-eager"]
        words += cache_args(1024, 64, transfer(load_every_hit=True))
        words += ["--kv-events-config", json.dumps(events)]
        env = {"KVTIER_SERVER": f"unix://{server.socket}", "KVTIER_CHUNK_TOKENS": str(2 * block)}
        with VllmServer(str(model), words, env | cpu_env(1), tmp_path / "engine.log") as engine:
            asker, _ = client.connect(engine.base_url, "tiny", 60)
            client.all_succeeded("ask", asker.run([Ask(0, 0, tokens, 2)], 1, lambda: None))

            def seen() -> dict[str, Any]:
                (found,) = server.lookup(tokens=tokens)["engines"]
                return {one["tier"]: one["tokens"] for one in found["tiers"]}

            wait_for(lambda: seen() == {"gpu": 8 * block, "cpu": 8 * block}, "in both tiers")
            (other,) = server.lookup(tokens=[*tokens[: 3 * block], 1, *tokens])["engines"]
            assert other["tokens"] == 3 * block
            assert server.lookup(tokens=tokens, salt="other")["engines"][0]["tokens"] == 0
            engine.kill()
            wait_for(lambda: not server.lookup(tokens=tokens)["engines"][0]["followed"], "gone")
            assert server.lookup(tokens=tokens)["engines"][0]["tokens"] == 0


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
