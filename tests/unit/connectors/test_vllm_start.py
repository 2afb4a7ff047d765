"""vLLM's own Scheduler: an engine's start tries its tiers, and ends for what can never work."""

import logging

import pytest

from kvtier.core.errors import KVTierError
from tests.unit.real_scheduler import Core

pytestmark = pytest.mark.vllm


@pytest.fixture
def warned(caplog):
    """Where vLLM has set up logging, kvtier's lines go to its handlers alone."""
    caplog.set_level(logging.WARNING, "kvtier.connectors.vllm")
    logging.getLogger("kvtier.connectors.vllm").addHandler(caplog.handler)
    return caplog


@pytest.mark.parametrize(
    ("path", "size", "said"),
    [("/proc/x", "1GiB", "nvme_path=/proc/x"), ("{here}/kv", "1000TiB", "lower nvme_bytes below")],
)
def test_an_engine_does_not_start_with_a_folder_that_can_never_work(
    scheduled_model, tmp_path, monkeypatch, path, size, said
):
    monkeypatch.setenv("KVTIER_NVME_PATH", path.format(here=tmp_path))
    monkeypatch.setenv("KVTIER_NVME_BYTES", size)
    with pytest.raises(KVTierError, match=said):
        Core(scheduled_model)


def test_an_engine_says_what_is_away_and_serves(scheduled_model, monkeypatch, warned):
    monkeypatch.setenv("KVTIER_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("KVTIER_REDIS_BYTES", "1GiB")
    core = Core(scheduled_model)
    assert "redis 127.0.0.1:1 cannot be reached" in warned.text
    core.add(core.request("one", list(range(100, 200))))
    core.run("one")
    core.connector.shutdown()


def test_an_engine_says_that_its_server_is_missing_and_serves(
    scheduled_model, tmp_path, monkeypatch, warned
):
    monkeypatch.setenv("KVTIER_SERVER", f"unix://{tmp_path}/none.sock")
    core = Core(scheduled_model)
    assert f"{tmp_path}/none.sock" in warned.text and "until it can be reached" in warned.text
    core.connector.shutdown()
