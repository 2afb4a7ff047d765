"""Real vLLM with KV events switched on: a subscriber of vLLM's own event stream sees what kvtier
holds in each tier, block by block, as a router does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from tests.integration.conftest import Forks
from tests.integration.test_vllm import DOCUMENT_HIT, start

pytestmark = pytest.mark.vllm

BLOCKS = DOCUMENT_HIT // 32
"""Of one prompt."""


@pytest.mark.slow
def test_a_subscriber_sees_what_every_tier_holds(forks: Forks, tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", "tiny")
    disk: dict[str, Any] = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}

    def run(name: str, **config: Any) -> Any:
        out = tmp_path / name / "answers.json"
        out.parent.mkdir()
        told = start(forks(False), f"event_scenarios {name}", out, model, disk | config)
        assert isinstance(told, dict), str(told)[-4000:]
        return told

    told = run("followed", ram_bytes="600KiB")
    for moment in ("saved", "after promotion"):
        assert told[moment]["agree"], told[moment]
    assert 0 < told["saved"]["seen"]["ram"] < 5 * BLOCKS, "RAM has less room than was saved"
    assert told["saved"]["seen"]["nvme"] > told["saved"]["seen"]["ram"]
    assert told["described"] >= told["saved"]["seen"]["nvme"]
    assert told["as vLLM says"], "hashes, tokens and parents are those of vLLM's own events"
    assert told["odd"] == [0, 0], "nothing is announced twice, or withdrawn unannounced"

    again = run("restarted")
    assert again["before"] == {"ram": 0, "nvme": 0}, "tokens are not stored: no prompt named it yet"
    assert again["named"]["agree"], again["named"]
    assert 0 < again["named"]["seen"]["nvme"] <= BLOCKS
    assert again["cleared"]["agree"], again["cleared"]
    assert again["cleared"]["seen"] == {"ram": 0, "nvme": 0}
