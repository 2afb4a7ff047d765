"""Documents on a real vLLM: what ``kvtier warm`` makes a hit, and what the stable order does."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import generated_text, make_model
from kvtier.bench.servers import VllmServer
from kvtier.cli.launch import TRANSFER
from kvtier.spans import compose, homes
from tests.conftest import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNK = 64
ANCHOR = "<s><|system|> " + generated_text(40, seed=1)
DOCUMENTS = [generated_text(150, seed=seed) for seed in range(2, 5)]
UNCACHED = {"kv_transfer_params": {"kvtier.cache": False}}
SALT = {"cache_salt": "tenant"}


class Served(VllmServer):
    """A real engine with kvtier in it."""

    def __init__(self, model: Path, folder: Path) -> None:
        args = [
            *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048"),
            *("--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "512"),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(TRANSFER)),
        ]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "KVTIER_RAM_BYTES": "64MiB",
            "KVTIER_CHUNK_TOKENS": str(CHUNK),
            "KVTIER_TAKE_HITS": "always",
        }
        super().__init__(str(model), args, env, folder / "server.log")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        url = self.base_url + path
        request = urllib.request.Request(url, data, headers)  # noqa: S310 - a server of ours
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
            said = reply.read().decode()
        return json.loads(said) if said.startswith(("{", "[")) else said

    def forget_own(self) -> None:
        """From here on only kvtier has what was computed."""
        assert self.post("/reset_prefix_cache", {})["success"]

    def tokenize(self, text: str) -> list[int]:
        body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
        return list(self.post("/tokenize", body)["tokens"])

    def ask(self, tokens: list[int], **more: Any) -> tuple[int, list[int], list[float]]:
        """Cached tokens, then the answer's tokens and their logprobs."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0}
        body |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True}
        reply = self.post("/v1/completions", body | more)
        details = reply["usage"]["prompt_tokens_details"] or {}
        (choice,) = reply["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        return details.get("cached_tokens", 0), choice["token_ids"], logprobs


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("warm")
    server = Served(make_model(folder / "tiny", "tiny"), folder)
    with server:
        yield server


def warm(served: Served, folder: Path, *words: str) -> str:
    (folder / "anchor").write_text(ANCHOR)
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    (folder / "documents").write_text("\n".join(lines))
    command = [sys.executable, "-m", "kvtier", "warm", "--base-url", served.base_url, *words]
    command += ["--anchor", str(folder / "anchor"), "--documents", str(folder / "documents")]
    command += ["--chunk-tokens", str(CHUNK)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prompts(served: Served, seed: int) -> list[Any]:
    """Each begins with another document; the question of each was never asked."""
    question = generated_text(20, seed=seed)
    turned = [DOCUMENTS[turn:] + DOCUMENTS[:turn] for turn in range(len(DOCUMENTS))]
    return [compose(served.tokenize, ANCHOR, documents, question) for documents in turned]


def test_a_warmed_document_is_a_hit_where_it_comes_first(served: Served, tmp_path: Path) -> None:
    """The hit is all whole chunks of the anchor and that document. The answer is the computed."""
    assert f"{len(DOCUMENTS)} homes" in warm(served, tmp_path)
    served.forget_own()
    for prompt in prompts(served, seed=5):
        cold, *computed = served.ask(prompt.tokens, **UNCACHED)
        assert cold == 0
        served.forget_own()
        cached, *answer = served.ask(prompt.tokens)
        assert cached == prompt.ranges[1].end // CHUNK * CHUNK
        assert answer[0] == computed[0]
        assert answer[1] == pytest.approx(computed[1], abs=1e-4)
        served.forget_own()


def test_a_home_is_kept_to_its_last_token(served: Served, tmp_path: Path) -> None:
    """So the document's last chunk is there too, with the filler behind it."""
    warm(served, tmp_path)
    served.forget_own()
    anchor = served.tokenize(ANCHOR)
    for home in homes(anchor, [served.tokenize(text) for text in DOCUMENTS], CHUNK):
        assert served.ask([*home.tokens, 9])[0] == len(home.tokens)
        served.forget_own()


def test_homes_are_warm_for_their_own_salt_only(served: Served, tmp_path: Path) -> None:
    served.post("/reset_prefix_cache?reset_external=true", {})
    warm(served, tmp_path, "--cache-salt", SALT["cache_salt"])
    served.forget_own()
    prompt = prompts(served, seed=6)[0]
    assert served.ask(prompt.tokens)[0] == 0
    assert served.ask(prompt.tokens, **SALT)[0] == prompt.ranges[1].end // CHUNK * CHUNK


def test_the_same_documents_in_another_order_are_a_hit_in_the_stable_order(served: Served) -> None:
    served.post("/reset_prefix_cache?reset_external=true", {})

    def asked(documents: list[str], seed: int) -> tuple[int, int]:
        """Cached tokens, and where the documents end."""
        question = generated_text(20, seed=seed)
        prompt = compose(served.tokenize, ANCHOR, documents, question, "stable")
        cached = served.ask(prompt.tokens)[0]
        served.forget_own()
        return cached, prompt.ranges[-1].end

    assert asked(DOCUMENTS, 7)[0] == 0
    cached, end = asked(DOCUMENTS[::-1], 8)
    assert cached == end // CHUNK * CHUNK
