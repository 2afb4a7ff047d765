"""Real vLLM with KV events switched on: a subscriber of vLLM's own event stream sees what kvtier
or its server holds in each tier, block by block. NVIDIA Dynamo's indexer is such a subscriber."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from tests.integration.conftest import Forks, in_modes
from tests.integration.dynamo import DynamoIndexer
from tests.integration.engine_modes import V1, Mode
from tests.integration.scenarios import document
from tests.integration.test_vllm import DOCUMENT_HIT, start
from tests.server_process import serving, short_folder

pytestmark = [pytest.mark.vllm, in_modes(V1)]

BLOCKS = DOCUMENT_HIT // 32
"""Of one prompt."""


RAM = "600KiB"
"""Less room than one prompt's blocks and the next one's take."""


def scenario(forks: Forks, mode: Mode, folder: Path, name: str, model: Path, **more: Any) -> Any:
    out = folder / name / "answers.json"
    out.parent.mkdir(parents=True)
    environment = more.pop("environment", {})
    name = name.partition("-")[0]
    told = start(forks(mode), f"event_scenarios {name}", out, model, more, more=environment)
    assert isinstance(told, dict), str(told)[-4000:]
    return told


def check_followed(told: dict[str, Any]) -> None:
    for moment in ("saved", "after promotion"):
        assert told[moment]["agree"], told[moment]
    assert 0 < told["saved"]["seen"]["ram"] < 5 * BLOCKS, "RAM has less room than was saved"
    assert told["saved"]["seen"]["nvme"] > told["saved"]["seen"]["ram"]
    assert told["described"] >= told["saved"]["seen"]["nvme"]
    assert told["as vLLM says"], "hashes, tokens and parents are those of vLLM's own events"
    assert told["odd"] == [0, 0], "nothing is announced twice, or withdrawn unannounced"


def check_named_again(told: dict[str, Any]) -> None:
    assert told["before"] == {"ram": 0, "nvme": 0}, "tokens are not stored: no prompt named it yet"
    assert told["named"]["agree"], told["named"]
    assert 0 < told["named"]["seen"]["nvme"] <= BLOCKS
    assert told["cleared"]["agree"], told["cleared"]
    assert told["cleared"]["seen"] == {"ram": 0, "nvme": 0}


@pytest.mark.slow
def test_a_subscriber_sees_what_every_tier_holds(forks: Forks, mode: Mode, tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", "tiny")
    disk: dict[str, Any] = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}
    check_followed(scenario(forks, mode, tmp_path, "followed", model, ram_bytes=RAM, **disk))
    check_named_again(scenario(forks, mode, tmp_path, "restarted", model, **disk))


@pytest.mark.slow
def test_a_subscriber_sees_what_a_server_holds(forks: Forks, mode: Mode, tmp_path: Path) -> None:
    """The second engine announces what the first one saved, once a prompt has named it."""
    model = make_model(tmp_path / "tiny", "tiny")
    with serving(ram_bytes=RAM, nvme_path=tmp_path / "nvme", nvme_bytes="64MiB") as server:
        at: dict[str, Any] = {"server": server.address, "server_timeout_ms": 5000}
        check_followed(scenario(forks, mode, tmp_path, "followed", model, **at))
        check_named_again(scenario(forks, mode, tmp_path, "restarted", model, **at))


@pytest.mark.slow
@pytest.mark.extended
def test_a_server_publishes_for_engines_that_publish_nothing(
    forks: Forks, mode: Mode, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "tiny", "tiny")
    with short_folder() as folder:
        stream = f"ipc://{folder}/events"
        disk: dict[str, Any] = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}
        with serving(ram_bytes=RAM, server_events=stream, **disk) as server:
            at: dict[str, Any] = {"server": server.address, "server_timeout_ms": 5000}
            at["environment"] = {"SERVER_STREAM": stream}
            told = scenario(forks, mode, tmp_path, "followed", model, **at)
            for moment in ("saved", "after promotion"):
                assert told[moment]["agree"], told[moment]
            assert told["odd"] == [0, 0] and told["described"] > 0


@pytest.mark.slow
def test_dynamo_finds_the_worker_with_the_longest_prefix(
    forks: Forks, mode: Mode, tmp_path: Path
) -> None:
    """Neither worker has it in its own cache any more. The first keeps its tiers itself, and the
    second has a server."""
    model = make_model(tmp_path / "tiny", "tiny")
    own = {"ram_bytes": "2MiB", "nvme_path": tmp_path / "own", "nvme_bytes": "64MiB"}
    half = DOCUMENT_HIT // 2
    with (
        DynamoIndexer(tmp_path) as dynamo,
        serving(ram_bytes=2 << 20, nvme_path=tmp_path / "nvme", nvme_bytes="64MiB") as server,
    ):
        at: dict[str, Any] = {"server": server.address, "server_timeout_ms": 5000}
        for worker, tokens, config in ((1, half, own), (2, DOCUMENT_HIT, at)):
            environment = {
                "INDEXER": dynamo.indexer.url,
                "WORKER": str(worker),
                "DOCUMENT_TOKENS": str(tokens + 1),
            }
            told = scenario(
                forks, mode, tmp_path, f"indexed-{worker}", model, environment=environment, **config
            )
            assert told["settled"], told
            found = told["found"]
            assert (found["gpu"], found["disk"]) == (0, tokens), found
            assert found["cpu"] < tokens, "RAM alone does not have it any more"
        matched = {
            worker: scores["longest_matched"]
            for worker, scores in dynamo.indexer.scores(document(0)).items()
        }
        assert matched == {1: half, 2: DOCUMENT_HIT}
