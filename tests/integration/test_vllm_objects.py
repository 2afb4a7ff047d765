"""A real vLLM whose host is new: RAM and NVMe are empty, and the page's bucket is warm."""

import re
import shlex
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from tests.child_process import wait_for
from tests.engine_python import engine_vllm
from tests.integration.scenarios import document
from tests.integration.test_vllm_launch import Launched
from tests.memory_bucket import beside
from tests.s3_server import S3Server, operated

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
CHUNK = 128
CHUNKS = 12
HIT = CHUNKS * CHUNK


@pytest.fixture(scope="module")
def bucket():
    with S3Server() as server, operated(server.environment):
        yield server


def readmes_export():
    """The line by which the page gives an engine a bucket."""
    (line,) = re.findall(
        r"^export KVTIER_OBJECT_URL=s3://.*$", (ROOT / "deploy/TIERS.md").read_text(), re.MULTILINE
    )
    return str(line).partition("#")[0].strip()


class Host(Launched):
    """A host that has nothing but ``folder``, which is new."""

    def __init__(self, model, folder, bucket):
        folder.mkdir()
        args = shlex.split(
            """--served-model-name tiny --dtype float32 --max-model-len 2048 --block-size 32
            --num-gpu-blocks-override 128 --enforce-eager --enable-prompt-tokens-details
            --shutdown-timeout 10 --seed 0"""
        )
        env = bucket.environment | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",  # the thread count decides the last bits of a sum
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "KVTIER_CHUNK_TOKENS": str(CHUNK),
            "KVTIER_LOAD_TIMEOUT_MS": "20000",  # tests share the machine
            "KVTIER_RAM_BYTES": "128MiB",
            "KVTIER_NVME_PATH": str(folder / "nvme"),
            "KVTIER_NVME_BYTES": "128MiB",
        }
        super().__init__(readmes_export(), str(model), args, env, folder / "log")


@pytest.mark.skipif(not engine_vllm().startswith("0.32."), reason="hits by source: vLLM 0.32")
def test_an_engine_on_an_empty_host_starts_warm_from_the_bucket(bucket, tmp_path):
    model, prompt = make_model(tmp_path / "demo", "demo"), document(1, HIT + 1)
    objects = beside()
    one = Host(model, tmp_path / "one", bucket)
    with one:
        cold, own = one.complete(prompt), one.complete(prompt)
        wait_for(lambda: len(list(objects.listed("prefix"))) == CHUNKS, "all is in the bucket")
    assert (cold["cached"], own["cached"]) == (0, HIT)
    other = Host(model, tmp_path / "other", bucket)
    with other:
        warm = other.complete(prompt)
        seeds = iter(range(100, 200))

        def told():
            other.complete(document(next(seeds), CHUNK // 2))  # a step tells
            return other.metric("kvtier_hit_tokens_total", tier="object") > 0

        wait_for(told, "the engine has told")
        by_tier = {
            tier: other.metric("kvtier_hit_tokens_total", tier=tier)
            for tier in ("ram", "nvme", "object")
        }
        by_source = {
            source: other.metric("vllm:prompt_tokens_cached_by_source_total", source=source)
            for source in ("device", "host", "disk", "p2p", "external_unspecified")
        }
    assert warm["cached"] == HIT
    for name in ("tokens", "logprobs"):
        assert warm[name] == own[name], "to the last bit, as after a hit of the engine's own cache"
    assert by_tier == {"ram": 0, "nvme": 0, "object": HIT}
    assert by_source == {"device": 0, "host": 0, "disk": 0, "p2p": 0, "external_unspecified": HIT}
