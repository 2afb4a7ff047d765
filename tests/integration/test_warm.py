"""Documents on a real vLLM: what ``kvtier warm`` makes a hit."""

import json

import pytest

from kvtier.bench.model import generated_text
from kvtier.spans import compose
from tests.command import kvtier
from tests.integration.spans_server import CHUNK, UNCACHED, Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ANCHOR = "<s><|system|> " + generated_text(40, seed=1)
DOCUMENTS = [generated_text(150, seed=seed) for seed in range(2, 5)]


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    server = Served(tiny, folder)
    with server:
        yield server


def warm(served, folder, *words):
    (folder / "anchor").write_text(ANCHOR)
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    (folder / "documents").write_text("\n".join(lines))
    command = ["warm", "--base-url", served.base_url, "--chunk-tokens", CHUNK, *words]
    done = kvtier(*command, "--anchor", folder / "anchor", "--documents", folder / "documents")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_warmed_document_is_a_hit_where_it_comes_first(served, tmp_path):
    assert f"{len(DOCUMENTS)} homes" in warm(served, tmp_path)
    served.forget()
    question = generated_text(20, seed=5)
    for turn in range(len(DOCUMENTS)):
        turned = DOCUMENTS[turn:] + DOCUMENTS[:turn]
        prompt = compose(served.tokenize, ANCHOR, turned, question)
        computed = served.ask(prompt.tokens, **UNCACHED)
        assert computed.cached == 0
        served.forget()
        answer = served.ask(prompt.tokens)
        assert answer.cached == prompt.ranges[1].end // CHUNK * CHUNK
        assert answer.tokens == computed.tokens
        assert answer.first == pytest.approx(computed.first, abs=1e-4)
        served.forget()
