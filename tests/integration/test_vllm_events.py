"""A real vLLM with KV events switched on: a subscriber of vLLM's own event stream sees what kvtier
holds in each tier, block by block."""

import pytest

from tests.integration.conftest import in_modes
from tests.integration.engine_modes import V1
from tests.integration.test_vllm import DOCUMENT_HIT, start

BLOCKS = DOCUMENT_HIT // 32
"""Of one prompt."""
RAM = "600KiB"
"""Less room than one prompt's blocks and the next one's take."""


@pytest.mark.vllm
@pytest.mark.slow
@in_modes(V1)
def test_a_subscriber_sees_what_every_tier_holds(forks, mode, tiny, tmp_path):
    def life(name, **more):
        out = tmp_path / f"{name}.json"
        disk = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}
        told = start(forks(mode), f"event_scenarios {name}", out, tiny, disk | more)
        assert isinstance(told, dict), str(told)[-4000:]
        return told

    told = life("followed", ram_bytes=RAM)
    for moment in ("saved", "after promotion"):
        assert told[moment]["agree"], told[moment]
    assert 0 < told["saved"]["seen"]["ram"] < 5 * BLOCKS, "RAM has less room than was saved"
    assert told["described"] >= told["saved"]["seen"]["nvme"] > told["saved"]["seen"]["ram"]
    assert told["as vLLM says"], "hashes, tokens and parents are those of vLLM's own events"
    assert told["odd"] == [0, 0], "nothing is announced twice, or withdrawn unannounced"
    told = life("restarted")
    assert told["before"] == {"ram": 0, "nvme": 0}, "tokens are not stored: no prompt named it yet"
    assert told["named"]["agree"] and 0 < told["named"]["seen"]["nvme"] <= BLOCKS, told["named"]
    assert told["cleared"]["agree"] and told["cleared"]["seen"] == {"ram": 0, "nvme": 0}, told
