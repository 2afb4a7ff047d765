"""Every vLLM that is here calls kvtier's hooks as kvtier understands them: its own scheduler and
worker lifecycle, a stand-in for the model. Also 0.33, which has no build for CPUs (``make
vllm-next`` sets it up)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from kvtier.connectors.vllm import versions
from tests.command import bare, ran
from tests.conftest import vllm_versions
from tests.engine_python import engine_python
from tests.integration.engine_modes import OLDER
from tests.integration.transfer import EVERY_HIT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
HERE: dict[str, Path | None] = (
    {"of TEST_ENGINE_PYTHON": None} if "TEST_ENGINE_PYTHON" in os.environ else vllm_versions()
)


@pytest.mark.parametrize("version", sorted(HERE))
def test_a_save_and_a_load_through_vllms_own_scheduler(version: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", "tiny")
    env = bare(HF_HUB_OFFLINE=1, VLLM_CPU_KVCACHE_SPACE=1)
    env |= {"KVTIER_CHUNK_TOKENS": "64", "KVTIER_RAM_BYTES": "4MiB", EVERY_HIT: "1"}
    env |= OLDER.environment(HERE[version])
    command = [engine_python(), "-m", "tests.integration.hooks", str(model)]
    done = ran(command, env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["vllm"].startswith(version) or HERE[version] is None
    assert "not tested" not in versions.verdict(said["vllm"])
    assert said["differences"] == []
    assert said["cached"] == [0, 128, 0]
    assert said["checked"] > 128, "no KV was compared"
    ours = {name: count for name, count in said["counts"].items() if "|" not in name}
    assert ours == {"missed_cold": 4, "loaded_ram": 2}, (
        "what vLLM's metrics are told of hits and misses"
    )
    assert "counter|loads|ram" in said["counts"], "and of the store"
