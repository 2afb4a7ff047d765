"""A real vLLM whose host is new: RAM and NVMe are empty, and the page's bucket is warm."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.bench.model import make_model
from kvtier.bench.processes.servers import VllmServer
from tests.child_process import wait_for
from tests.engine_python import engine_python, engine_vllm
from tests.integration.scenarios import document
from tests.memory_bucket import beside
from tests.s3_server import S3Server, operated

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
CHUNK = 128
CHUNKS = 12
HIT = CHUNKS * CHUNK
START_S = 300.0


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with S3Server() as server, operated(server.environment):
        yield server


def readmes_export() -> str:
    """The line by which the page gives an engine a bucket."""
    (line,) = re.findall(
        r"^export KVTIER_OBJECT_URL=s3://.*$", read("deploy/TIERS.md"), re.MULTILINE
    )
    return str(line)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


class Host(VllmServer):
    """A host that has nothing but ``folder``, which is new: ``kvtier launch -- vllm serve``."""

    def __init__(self, model: Path, folder: Path, bucket: S3Server) -> None:
        folder.mkdir()
        args = ["--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "2048"]
        args += ["--block-size", "32", "--num-gpu-blocks-override", "128", "--enforce-eager"]
        args += ["--enable-prompt-tokens-details", "--shutdown-timeout", "10", "--seed", "0"]
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
        super().__init__(str(model), args, env, folder / "log", START_S)
        python = engine_python()
        vllm = str(Path(python).parent / "vllm")
        launch = [python, "-m", "kvtier", "launch", "--", vllm, "serve", str(model)]
        begin = ["bash", "-c", f'{readmes_export()}\nexec "$@"', "bash"]
        self._command = [*begin, *launch, "--host", "127.0.0.1", *args]

    def asked(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"}
        url = f"{self.base_url}{path}"
        request = urllib.request.Request(url, data, headers)  # noqa: S310 - a server of ours
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
            return str(reply.read().decode())

    def answer(self, prompt: list[int]) -> tuple[Any, int]:
        """(token ids and their logprobs, cached prompt tokens)."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        reply = json.loads(self.asked("/v1/completions", body))
        choice = reply["choices"][0]
        cached = (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return (choice["token_ids"], choice["logprobs"]["token_logprobs"]), cached

    def counted(self, name: str, label: str, value: str) -> float:
        families = text_string_to_metric_families(self.asked("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        (one,) = [
            each.value for each in samples if each.name == name and each.labels[label] == value
        ]
        return one


@pytest.mark.skipif(not engine_vllm().startswith("0.32."), reason="hits by source: vLLM 0.32")
def test_an_engine_on_an_empty_host_starts_warm_from_the_bucket(bucket, tmp_path) -> None:
    model, prompt = make_model(tmp_path / "demo", "demo"), document(1, HIT + 1)
    objects = beside()
    one = Host(model, tmp_path / "one", bucket)
    with one:
        _, cold = one.answer(prompt)
        before, own = one.answer(prompt)
        wait_for(lambda: len(list(objects.listed("prefix"))) == CHUNKS, "all is in the bucket")
    assert (cold, own) == (0, HIT)
    other = Host(model, tmp_path / "other", bucket)
    with other:
        after, hit = other.answer(prompt)
        seeds = iter(range(100, 200))

        def told() -> bool:
            other.answer(document(next(seeds), CHUNK // 2))  # an engine tells when it takes a step
            return other.counted("kvtier_hit_tokens_total", "tier", "object") > 0

        wait_for(told, "the engine has told")
        by_tier = {
            tier: other.counted("kvtier_hit_tokens_total", "tier", tier)
            for tier in ("ram", "nvme", "object")
        }
        by_source = {
            source: other.counted("vllm:prompt_tokens_cached_by_source_total", "source", source)
            for source in ("device", "host", "disk", "p2p", "external_unspecified")
        }
    assert hit == HIT
    assert after == before, "to the last bit, as after a hit of the engine's own cache"
    assert by_tier == {"ram": 0, "nvme": 0, "object": HIT}
    assert by_source == {"device": 0, "host": 0, "disk": 0, "p2p": 0, "external_unspecified": HIT}
