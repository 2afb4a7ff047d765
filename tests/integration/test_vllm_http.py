"""Real vLLM behind its OpenAI server: requests that are aborted and caches that are reset during
loads and answers, adapters that are loaded on request, and data-parallel ranks: one of them idle,
or both on a server that launch starts for them.

Answers are compared with those of the same engine's own prefix cache. The test delays the end of a
load.
"""

import http.client
import json
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from kvtier.bench.processes.engine import cache_args, shared_args, transfer
from tests.admin_server import administered, spilled
from tests.child_process import wait_for
from tests.integration.conftest import EVERY_MODE, in_modes
from tests.integration.engine_modes import TOLD, V1, V2_ASYNC
from tests.integration.http_engine import HttpEngine, body_of, post
from tests.integration.scenarios import document
from tests.integration.test_vllm import CHUNK, DOCUMENT_HIT
from tests.integration.tiny_models import make_experts, make_lora
from tests.server_process import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

CHUNKS = DOCUMENT_HIT // CHUNK
TRANSFER = transfer(load_every_hit=True)
START_S = 600.0


class Server(HttpEngine):
    """:mod:`tests.integration.mode_server` on a model, with kvtier. Its tiers are its own, or those
    of a server (``cache``). ``settings``: configuration keys. Once it has started, its engines have
    run in ``mode``."""

    def __init__(self, model, folder, *more, mode=V2_ASYNC, cache=None, **settings):
        self.folder, self._mode = folder, mode
        args = [*shared_args("tiny", "float32", 32), *cache_args(2048, 512, TRANSFER)]
        args += ["--enforce-eager", "--seed", "0", "--shutdown-timeout", "10", *more]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "TEST_FOLDER": str(folder),
            "KVTIER_CHUNK_TOKENS": str(CHUNK),
            TOLD: str(folder / "told"),
            **mode.environment(),
        }
        env |= {f"KVTIER_{name.upper()}": value for name, value in settings.items()}
        if cache is not None:
            env |= {"KVTIER_SERVER": str(cache.address), "KVTIER_SERVER_TIMEOUT_MS": "5000"}
        else:
            nvme = {"KVTIER_NVME_PATH": str(folder / "nvme"), "KVTIER_NVME_BYTES": "64MiB"}
            env |= {"KVTIER_RAM_BYTES": "64MiB"} | nvme
        super().__init__(str(model), args, env, folder / "server.log", START_S)
        self._command[:3] = [sys.executable, "-m", "tests.integration.mode_server"]

    def start(self):
        super().start()
        self._mode.check(self.folder / "told")

    def ask(self, seed, model="tiny", rank=None):
        headers = {} if rank is None else {"X_data_parallel_rank": str(rank)}
        return self.complete(document(seed), headers, model=model)

    @contextmanager
    def begun(self, seed, **more):
        """A request whose answer is a stream. Its connection is closed at the end, whether the
        answer was read or not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = body_of(document(seed), stream=True, **more)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        try:
            yield connection
        finally:
            connection.close()

    def loaded(self, **labels):
        return self.metric("vllm:kvtier_loaded_chunks_total", **labels)

    def loads(self):
        file = self.folder / "loads"
        return file.stat().st_size if file.exists() else 0

    @contextmanager
    def shut(self):
        """Loads do not end before the end of this, or :meth:`open`."""
        (self.folder / "shut").touch()
        try:
            yield
        finally:
            self.open()

    def open(self):
        (self.folder / "shut").unlink(missing_ok=True)


def streamed(connection):
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            yield from (token for choice in event["choices"] for token in choice["token_ids"] or ())


def same(one, other):
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


@EVERY_MODE
class TestOneServer:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tiny, mode, tmp_path_factory):
        server = Server(tiny, tmp_path_factory.mktemp("server"), mode=mode)
        with server:
            yield server

    def kept(self, server, seed):
        assert server.ask(seed)["cached"] == 0
        own = server.ask(seed)
        assert own["cached"] == DOCUMENT_HIT
        server.forget()
        return own

    def test_a_request_aborted_while_it_loads_leaves_nothing_behind(self, server):
        own, loads = self.kept(server, 0), server.loads()
        with server.shut():
            with server.begun(0):
                wait_for(lambda: server.loads() > loads, "a load begins")
                wait_for(lambda: server.metric("vllm:num_requests_waiting") == 1, "it waits")
            wait_for(lambda: server.metric("vllm:num_requests_waiting") == 0, "it is aborted")
            assert not server.reset(), "its blocks are held until the load is through"
        server.forget()
        loaded = server.loaded()
        again = server.ask(0)
        assert same(again, own)
        assert again["cached"] == DOCUMENT_HIT
        assert server.loaded() - loaded == CHUNKS

    def test_a_reset_preempts_what_runs_and_it_resumes_from_kvtier(self, server, mode):
        """With async scheduling and a connector that loads vLLM frees blocks a step late, and says
        with status 500 that its own cache is not empty; the requests are preempted, and resume from
        that."""
        long = {"max_tokens": 400}
        with server.begun(1, **long) as connection:
            undisturbed = list(streamed(connection))
        server.forget()
        loaded, preempted = server.loaded(), server.metric("vllm:num_preemptions_total")
        with server.begun(1, **long) as connection:
            answer = streamed(connection)
            first = next(answer)
            assert not server.reset(), "it runs"
            if mode.asynchronous:
                with pytest.raises(urllib.error.HTTPError, match="500"):
                    server.reset(reset_running_requests=True)
            else:
                assert server.reset(reset_running_requests=True)
            rest = list(answer)
        assert server.metric("vllm:num_preemptions_total") > preempted
        lives = 1 if mode.asynchronous else 2
        assert server.loaded() - loaded >= lives * CHUNKS, "at its beginning, and when it resumed"
        assert [first, *rest] == undisturbed

    def test_a_reset_of_kvtier_too_forgets_all(self, server):
        own = self.kept(server, 2)
        assert server.reset(reset_external=True)
        assert server.ask(2)["cached"] == 0, "kvtier has forgotten it"
        server.forget()
        loaded = server.loaded()
        again = server.ask(2)
        assert same(again, own)
        assert server.loaded() - loaded == CHUNKS, "and keeps it anew"

    def test_resets_during_a_load_never_touch_what_is_loaded(self, server):
        """vLLM refuses to preempt a request that loads. A reset of kvtier forgets the chunks, and
        lets the load end."""
        own, loads = self.kept(server, 3), server.loads()
        with server.shut(), server.begun(3) as connection:
            wait_for(lambda: server.loads() > loads, "a load begins")
            with pytest.raises(urllib.error.HTTPError, match="500"):
                server.reset(reset_running_requests=True)
            assert not server.reset(reset_external=True), "vLLM's own blocks are held"
            server.open()
            tokens = list(streamed(connection))
        assert tokens == own["tokens"]
        assert same(server.ask(3), own)
        server.forget()


@EVERY_MODE
def test_adapters_loaded_while_the_server_runs_are_known_by_what_they_are(tiny, mode, tmp_path):
    folders = [make_lora(tmp_path / f"adapter{seed}", tiny, seed=seed) for seed in (1, 2)]

    def load(name, folder):
        post(
            f"{server.base_url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        )

    adapters = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
    server = Server(tiny, tmp_path, *adapters, mode=mode)
    with server:
        base = server.ask(0)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.ask(0, model="first")
        load("first", folders[0])
        cold, own = server.ask(0, model="first"), server.ask(0, model="first")
        assert (cold["cached"], own["cached"]) == (0, DOCUMENT_HIT)
        assert own["tokens"] != base["tokens"], "the adapter makes no difference"
        server.forget()
        loaded = server.loaded()
        warm = server.ask(0, model="first")
        assert same(warm, own)
        assert server.loaded() - loaded == CHUNKS
        server.restart()
        load("renamed", folders[0])
        load("first", folders[1])
        renamed, other = server.ask(0, model="renamed"), server.ask(0, model="first")
        assert same(renamed, own)
        assert (renamed["cached"], other["cached"]) == (DOCUMENT_HIT, 0)
        assert server.loaded(place="nvme") == CHUNKS
        assert other["tokens"] not in (own["tokens"], base["tokens"])


@EVERY_MODE
def test_data_parallel_engines_of_a_dense_model_share_a_server(tiny, mode, tmp_path):
    with serving(ram_bytes="64MiB") as cache:
        server = Server(tiny, tmp_path, "--data-parallel-size", "2", mode=mode, cache=cache)
        with server:
            check_engines_that_share(server)
        assert not (tmp_path / "dummies").exists(), "the engines take no steps together"


@in_modes(extended=(V1,))
def test_two_ranks_over_a_server_go_on_through_its_crash_and_hit_its_disk(tiny, mode, tmp_path):
    with administered(ram_bytes="64MiB", nvme_bytes="64MiB") as cache:
        ranks = ("--tensor-parallel-size", "2")
        server = Server(tiny, tmp_path, *ranks, mode=mode, cache=cache)
        with server:
            told = [server.ask(0)]
            spilled(cache, CHUNKS)
            server.forget()
            told.append(server.ask(0))
            server.forget()
            cache.kill()
            told.append(server.ask(0))
            server.forget()
            cache.start()
            wait_for(lambda: "attached to the server" in server.log.read_text(), "attached again")
            told.append(server.ask(0))
    assert [one["cached"] for one in told] == [0, DOCUMENT_HIT, 0, DOCUMENT_HIT]
    assert all(one["tokens"] == told[0]["tokens"] for one in told)


def answer_from_kvtier(server, seed, rank):
    """What a rank answers that has computed it, forgotten it, and loaded it. The other rank is
    idle."""
    idle = str(1 - rank)
    idle_before = server.metric("vllm:prompt_tokens_total", engine=idle)
    cold, own = server.ask(seed, rank=rank), server.ask(seed, rank=rank)
    assert (cold["cached"], own["cached"]) == (0, DOCUMENT_HIT)
    server.forget()
    check_load(server, seed, rank, own)
    assert server.metric("vllm:prompt_tokens_total", engine=idle) == idle_before, (
        "the other was idle"
    )
    return own


def check_load(server, seed, rank, own):
    loaded = server.loaded(engine=str(rank))
    warm = server.ask(seed, rank=rank)
    assert same(warm, own)
    assert warm["cached"] == DOCUMENT_HIT
    assert server.loaded(engine=str(rank)) - loaded == CHUNKS


def check_engines_that_share(server):
    owns = [answer_from_kvtier(server, rank, rank) for rank in (0, 1)]
    for rank in (0, 1):
        check_load(server, 1 - rank, rank, owns[1 - rank])


@EVERY_MODE
def test_data_parallel_ranks_of_which_one_is_idle(mode, tmp_path):
    model = make_experts(tmp_path / "experts")
    server = Server(model, tmp_path, "--data-parallel-size", "2", mode=mode)
    with server:
        _, own = (answer_from_kvtier(server, rank, rank) for rank in (0, 1))
        assert (tmp_path / "dummies").stat().st_size > 0, "and took steps"
        server.restart()
        again = server.ask(1, rank=1)
        assert same(again, own)
        assert server.loaded(place="nvme", engine="1") == CHUNKS


def test_with_the_one_switch_the_ranks_share_a_server_and_plan_no_tier_themselves(tiny, tmp_path):
    server = Server(tiny, tmp_path, "--data-parallel-size", "2")
    at = server._command.index("--kv-transfer-config")
    del server._command[at : at + 2]
    module = "vllm.entrypoints.openai.api_server"
    launch = [sys.executable, "-m", "kvtier", "launch", "--", sys.executable, "-m", module]
    server._command[:3] = launch
    server._env |= {"KVTIER_ADMIN": "off", "KVTIER_SERVER_TIMEOUT_MS": "5000", "KVTIER_AUTO": "1"}
    with server:
        for seed in range(4):
            cold, warm = (server.ask(seed, rank=rank) for rank in range(2))
            assert (cold["cached"], warm["cached"]) == (0, DOCUMENT_HIT)
            assert warm["tokens"] == cold["tokens"]
    said = server.log.read_text()
    assert said.count("auto-config: ram_bytes 64 MiB (yours; the plan ") == 1
    assert said.count("auto-config: the tiers are the server's (unix://") == 2
