"""deploy/disaggregated: a prefill engine and a decode engine of real vLLM with real NIXL between
them, kvtier on both over one server, and vLLM's router in front."""

import json
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.bench.processes.companion import companion
from kvtier.bench.processes.engine import cache_args, connector_args, shared_args, transfer
from kvtier.bench.processes.servers import answers, free_port
from tests.conftest import ROOT
from tests.integration.conftest import EVERY_MODE
from tests.integration.engine_modes import TOLD
from tests.integration.http_engine import HttpEngine, body_of, complete
from tests.integration.scenarios import CHUNK, document
from tests.server_process import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

DEPLOY = ROOT / "deploy/disaggregated"
ANSWER = 2 * CHUNK + 12
START_S = 600.0


def peer(name):
    """The folder of the programs of a peer's environment."""
    places = sorted(ROOT.glob(f".venv-peers/{name}-*/ready"))
    if not places:
        pytest.skip(f"{name} is not installed (make peers)")
    return str(places[-1].parent / "bin")


def connectors():
    """The file of deploy/, with what its page says for CPUs. A model this small may be computed
    sooner than it is loaded."""
    made: dict[str, Any] = json.loads((DEPLOY / "connectors.json").read_text())
    nixl, ours = made["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], ours["kv_connector"]) == ("NixlConnector", "KVTierConnector")
    nixl["kv_buffer_device"] = "cpu"
    ours.update(transfer(load_every_hit=True))
    return made


class Engine(HttpEngine):
    """A server with NIXL and kvtier over ``cache``, started by ``launch`` as the page says. Without
    a ``cache`` it is plain vLLM. Once it has started, it has run in ``mode``."""

    def __init__(self, model, log, mode, cache=None):
        self._mode, self._told = mode, log.with_suffix(".told")
        python = f"{peer('nixl')}/python"
        args = [*shared_args("tiny", "float32", 32), *cache_args(2048, 128), "--enforce-eager"]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",
            TOLD: str(self._told),
            **mode.environment(),
        }
        if cache is not None:
            args += connector_args(connectors())
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            env["KVTIER_SERVER"] = str(cache.address)
            env["KVTIER_SERVER_TIMEOUT_MS"] = "5000"
            env["KVTIER_CHUNK_TOKENS"] = str(CHUNK)
        super().__init__(str(model), args, env, log, START_S, python)
        if cache is not None:
            self._command[:1] = [python, "-m", "kvtier", "launch", "--", python]

    def start(self):
        super().start()
        self._mode.check(self._told)

    def cached_from(self, source):
        """Prompt tokens that came from there, as vLLM counts them."""
        return self.metric("vllm:prompt_tokens_cached_by_source_total", source=source)


@contextmanager
def routed(prefill, decode, folder):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {
        "ROUTER_HOST": "127.0.0.1",
        "ROUTER_PORT": str(port),
        "ROUTER_METRICS_PORT": str(free_port()),
        "PREFILL_1": f"127.0.0.1:{prefill.port}",
        "DECODE_1": f"127.0.0.1:{decode.port}",
        "PATH": f"{peer('vllm-router')}:/usr/bin:/bin",
    }
    command = ["sh", str(DEPLOY / "vllm-router.sh")]
    with companion(command, env, lambda: answers(f"{url}/health"), folder / "router.log", 60.0):
        yield url


def ask(url, prompt):
    return list(complete(url, body_of(prompt, max_tokens=ANSWER))["tokens"])


@EVERY_MODE
def test_the_prefill_engine_hits_what_the_decode_engine_answered(mode, tiny, tmp_path):
    """Nothing is left in vLLM's own caches for the second turn, so that its hits are kvtier's."""
    prompt = document(1)
    with serving(ram_bytes="256MiB") as cache:
        prefill = Engine(tiny, tmp_path / "prefill.log", mode, cache)
        decode = Engine(tiny, tmp_path / "decode.log", mode, cache)
        with prefill, decode, routed(prefill, decode, tmp_path) as url:
            first = ask(url, prompt)
            assert prefill.cached_from("host") == 0
            assert decode.cached_from("p2p") == len(prompt)
            for engine in (prefill, decode):
                engine.forget()
            second = ask(url, turn := prompt + first + document(2, 40))
            whole = (len(prompt) + ANSWER) // CHUNK * CHUNK
            assert whole >= len(prompt) + CHUNK, "the hit holds a part of the answer"
            assert prefill.cached_from("host") == whole
            assert decode.cached_from("p2p") == len(prompt) + len(turn)
            assert decode.cached_from("host") == 0, "kvtier leaves such a prompt to NIXL"
    with Engine(tiny, tmp_path / "plain.log", mode) as plain:
        assert ask(plain.base_url, prompt) == first
        assert ask(plain.base_url, turn) == second
