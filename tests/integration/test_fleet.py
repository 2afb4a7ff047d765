"""The multi-turn benchmark on real vLLM engines and HAProxy: an engine dies, and its conversations
stay warm."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

SESSIONS, TURNS = 4, 4
SHAPE = f"""--sessions {SESSIONS} --turns {TURNS} --kill-after-turn 2 --first-length 512
    --turn-length 64 --output-len 8 --think-seconds 0.2 --dtype float32 --block-size 32
    --chunk-tokens 64 --require-same-tokens --load-every-hit""".split()


def test_conversations_of_an_engine_that_dies_stay_warm(tiny, tmp_path):
    if shutil.which("haproxy") is None:
        pytest.skip("there is no haproxy")
    command = [sys.executable, "-m", "kvtier.bench.multi_turn", "--model", str(tiny), *SHAPE]
    command += ["--output-dir", str(tmp_path)]
    command += ["--arms", "round-robin,sticky+kvtier,cache-aware+kvtier"]
    environment = os.environ | {"KVTIER_SERVER_TIMEOUT_MS": "5000"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    arms: dict[str, Any] = json.loads((tmp_path / "multi_turn.json").read_text())["arms"]
    for arm in arms.values():
        assert (arm["turns"], arm["failed_turns"]) == (SESSIONS * TURNS, 0), "no turn ended"
    without, sticky, aware = arms.values()
    for arm in (sticky, aware):
        assert arm["killed"]["moved_conversations"] == SESSIONS // 2, "the dead engine's"
        assert arm["killed"]["moved_cached_share"] > 0.75, "they come from the server"
    assert without["killed"]["moved_cached_share"] < 0.25, "the GPU cache is too small"
    assert sticky["hit_tokens"]["ram"] > 0 == without["hit_tokens"]["ram"]
    assert sticky["cached_tokens_later_turns"] > 2 * without["cached_tokens_later_turns"]
    assert aware["engines_per_conversation"] <= 1.5, "only the dead engine's have a second one"
    assert aware["cached_tokens_later_turns"] >= 0.95 * sticky["cached_tokens_later_turns"]
