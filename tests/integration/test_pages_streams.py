"""Event streams as the pages set them up, word by word, with vLLM's own publisher; and what a
server says of an engine that it cannot follow, or of a tier that is well again."""

import json
import re
from contextlib import ExitStack

import pytest

from kvtier.bench.processes.servers import free_port
from tests.admin_server import administered
from tests.child_process import wait_for
from tests.conftest import ROOT
from tests.redis_server import RedisServer
from tests.server_process import attached, run, save, short_folder

vllm = pytest.importorskip("vllm.config.kv_events")
kv_events = pytest.importorskip("vllm.distributed.kv_events")
PAGE = (ROOT / "deploy/routing/README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder():
    with short_folder() as folder:
        yield folder


def published(config):
    return kv_events.EventPublisherFactory.create(vllm.KVEventsConfig(**config))


def trouble(server):
    told: list[str] = json.loads(server.ask("GET", "/healthz", token=None).text)["trouble"]
    return told


@pytest.mark.parametrize("block", [one for one in BLOCKS if "KVTIER_ADMIN_ENGINES" in one])
def test_engines_are_followed_as_the_page_says(folder, block):
    block = block.replace("/run/kvtier", str(folder))
    (asked,) = re.findall(r"KVTIER_ADMIN_ENGINES='([^']*)'", block)
    configs = [json.loads(one) for one in re.findall(r"--kv-events-config \\?\s*'([^']*)'", block)]
    with ExitStack() as engines, administered(admin_engines=asked) as server:
        for config in configs:
            engines.callback(published(config).shutdown)
        for number in range(1, len(configs) + 1):
            name = f"engine-{number}"
            wait_for(
                lambda name=name: server.metric("kvtier_engine_followed", engine=name) == 1,
                f"{name} is followed",
            )


def test_an_engine_that_listens_nowhere_is_an_error_in_words_until_it_does(folder):
    """vLLM connects to an address without a *."""
    port, replay = free_port(), free_port()
    config = {"enable_kv_cache_events": True, "publisher": "zmq"}
    named = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    asked = f"engine-1=tcp://127.0.0.1:{port}?replay={replay}"
    with administered(admin_engines=asked) as server:
        engine = published(config | named)
        try:
            wait_for(lambda: bool(trouble(server)), "it is told")
        finally:
            engine.shutdown()
        (told,) = trouble(server)
        assert f"engine-1: its KV events cannot be followed at tcp://127.0.0.1:{port}" in told
        assert "vLLM listens only at ipc:// endpoints" in told
        assert server.said().count("ERROR kvtier.admin.engines") == 1
        assert str(port) in server.cli("stats", "--admin", server.url).stdout
        engine = published(config | {"endpoint": f"tcp://*:{port}"})
        try:
            wait_for(lambda: not trouble(server), "it is well")
        finally:
            engine.shutdown()


def test_a_tier_that_is_well_again_is_noticed_on_an_idle_server():
    with RedisServer() as redis, administered(redis_url=redis.url, redis_bytes="8MiB") as server:
        with attached(server.access()) as client:
            redis.stop()
            for number in range(8):
                save(client, run(number, 1))
            wait_for(lambda: any("redis" in one for one in trouble(server)), "Redis is gone")
        redis.start()
        wait_for(lambda: not trouble(server), "Redis is back")
