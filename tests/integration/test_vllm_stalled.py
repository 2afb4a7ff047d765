"""Real vLLM over a tier that stops answering. It has the host to itself, because what a load is
worth depends on how quick the engine is, so it has a file of its own, which runs late."""

import pytest

from kvtier.bench.model import make_model
from tests.integration.conftest import EXTENDED
from tests.integration.test_vllm import CHUNK, DEMO_CHUNK_BYTES, DOCUMENT_HIT, start
from tests.integration.transfer import EVERY_HIT
from tests.redis_server import RedisServer


@EXTENDED
@pytest.mark.vllm
@pytest.mark.alone
@pytest.mark.redis
@pytest.mark.slow
def test_a_stalled_tier_is_left_after_one_deadline_and_used_again_later(
    forks, mode, tmp_path, monkeypatch
):
    model = make_model(tmp_path / "demo", "demo")
    with RedisServer() as server:
        monkeypatch.setenv("TEST_REDIS_PID", str(server.pid))
        config = {
            "redis_url": server.url,
            "redis_bytes": "256MiB",
            "ram_bytes": 8 * DEMO_CHUNK_BYTES,
        }
        phases = start(
            forks(mode),
            "scenarios stalled",
            tmp_path / "answers.json",
            model,
            config,
            processes=True,
            more={EVERY_HIT: "0"},
        )
    assert isinstance(phases, dict), str(phases)[-4000:]
    plain = phases["before"]["answers"][:3]
    for phase in phases.values():
        for index, answer in enumerate(phase["answers"]):
            assert answer["tokens"] == plain[index % 3]["tokens"]
    before, stalled, after = (phases[name]["counts"] for name in ("before", "stalled", "after"))
    assert before["loaded_redis"] > 0
    assert (
        stalled.get("declined_deadline", 0) - before.get("declined_deadline", 0)
        <= DOCUMENT_HIT // CHUNK
    )
    assert stalled["declined_slower"] > before.get("declined_slower", 0), (
        "it was asked for, and known to be slow"
    )
    assert after["loaded_redis"] > stalled["loaded_redis"]
