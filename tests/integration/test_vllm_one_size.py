"""Two engines of one model, each from a shell of its own with the pages' lines, share a server,
Redis or a bucket."""

import json
import re
import shlex

import pytest

from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT
from tests.child_process import wait_for
from tests.conftest import ROOT
from tests.integration.scenarios import document
from tests.integration.test_vllm_launch import ENGINE, HIT, QUIET, Launched
from tests.memory_bucket import beside
from tests.redis_server import RedisServer
from tests.s3_server import URL, S3Server, operated
from tests.server_process import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def variables(*words):
    (line,) = (one for block in BLOCKS for one in block.splitlines() if one.startswith(words))
    return dict(re.findall(r"\b(KVTIER_\w+)=(\S+)", line.partition("#")[0]))


MORE = (pytest.param(one, marks=pytest.mark.extended) for one in ("server", "bucket"))


@pytest.fixture(params=["Redis", *MORE])
def shared(request):
    own = {"KVTIER_RAM_BYTES": "64MiB", "KVTIER_LOAD_TIMEOUT_MS": "20000"}
    tiers = (ROOT / "deploy/TIERS.md").read_text()
    match request.param:
        case "server":
            assert list(variables("KVTIER_SERVER=")) == ["KVTIER_SERVER"]
            with serving(ram_bytes="64MiB") as server:
                yield {"KVTIER_SERVER": f"unix://{server.socket}"}, lambda: 0
                assert "other chunk size" not in server.said()
        case "Redis":
            assert "`KVTIER_REDIS_URL` switches it on" in tiers and "or `unix:///path` for" in tiers
            with RedisServer(maxmemory="64mb") as redis, redis.admin() as admin:
                yield (
                    own | {"KVTIER_REDIS_URL": redis.url},
                    lambda: len(admin.keys("kvtier:*{" + 80 * "?" + "}")),
                )
        case _:
            assert "export KVTIER_OBJECT_URL=s3://bucket/prefix KVTIER_OBJECT_BYTES=2TiB" in tiers
            with S3Server() as bucket, operated(bucket.environment):
                given = {"KVTIER_OBJECT_URL": URL, "KVTIER_OBJECT_BYTES": "64MiB"}
                yield (
                    own | bucket.environment | given,
                    lambda: sum(1 for _ in beside().listed("cache")),
                )


def test_an_engine_with_the_switch_and_one_without_it_hit_what_the_other_saved(
    tiny, tmp_path, monkeypatch, shared
):
    for name in ("KVTIER_CHUNK_TOKENS", "KVTIER_AUTO", "KVTIER_SERVER"):
        monkeypatch.delenv(name, raising=False)
    args = shlex.split(ENGINE)
    always = TRANSFER | {"kv_connector_extra_config": {LOAD_EVERY_HIT: True}}
    args += ["--kv-transfer-config", json.dumps(always)]
    switch, (there, held) = variables("export KVTIER_AUTO="), shared
    assert switch == {"KVTIER_AUTO": "true"}
    disk = {"KVTIER_NVME_PATH": str(tmp_path / "nvme"), "KVTIER_NVME_BYTES": "64MiB"}
    is_server = "KVTIER_SERVER" in there
    switch |= {} if is_server else disk
    shells = {"736": QUIET | switch | there, "640": QUIET | there}
    logs = {length: tmp_path / f"{length}.log" for length in shells}
    one, other = (
        Launched("true", str(tiny), [*args, "--max-model-len", length], env, logs[length])
        for length, env in shells.items()
    )
    with one, other:
        for seed, (first, second) in enumerate(((one, other), (other, one))):
            computed, cached = first.answer(document(seed))
            assert cached == 0
            if not is_server:
                wait_for(lambda: held() >= (seed + 1) * HIT // 256, "the chunks are shared")  # noqa: B023
            assert second.answer(document(seed)) == (computed, HIT)
    for log in logs.values():
        said = log.read_text()
        assert "configuration: chunk_tokens=256 (default), " in said
        assert "other chunk size" not in said
