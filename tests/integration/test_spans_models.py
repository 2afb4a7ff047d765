"""Documents from other prompts for models of other families, each on a real vLLM. Every blended
answer is compared with plain torch. Of latent attention (MLA) the rotated key of each token is
moved, and the latent stays as it is: vLLM's CPU platform turns prefix caching off for such models,
and these tests' server leaves it on."""

import pytest

from kvtier.bench.model import make_model
from tests.integration.spans_server import BLOCK, LatentPlain, LatentServed, Plain, Served, gap
from tests.integration.test_spans import EXACT, asking, prompt, spans, warm
from tests.integration.tiny_models import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ORDER = [3, 1, 0, 2]
FIRST = 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"rope_parameters": LLAMA3}),
    ],
    ids=["mistral", "qwen2", "qwen3", "llama3 scaling"],
)
def test_a_model_of_another_family_is_moved_as_plain_torch_does(tmp_path, family, more):
    made_model = make_family(tmp_path / "tiny", family, **more)
    plain, made = Plain(made_model), prompt(90, ORDER)
    end = made.ranges[-1].end // BLOCK * BLOCK
    served = Served(made_model, tmp_path, KVTIER_SPANS="on")
    with served:
        warm(served, 90, ORDER)
        for first in (0, FIRST):
            answer = served.ask(made.tokens, **asking(made, first))
            assert spans(answer)["reused"] == end - first * len(made.ranges[2:])
            assert gap(answer, plain.blended(made.tokens, made.ranges, end, first)) < EXACT
            assert gap(answer, plain.full(made.tokens)) > 20 * EXACT


LATENT_BLOCK = 16
"""vLLM's kernel has no other."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two ranks"])
def latent(request, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("models") / "mla", "mla")
    words = ["--tensor-parallel-size", str(request.param)]
    settings = {"KVTIER_SPANS": "on", "OMP_NUM_THREADS": "1"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    server = LatentServed(model, tmp_path_factory.mktemp("server"), *words, **settings)
    with server:
        yield server, LatentPlain(model)


@pytest.mark.parametrize(("first", "missing"), [(0, []), (1, []), (16, []), (5, [3])])
def test_a_blended_answer_is_what_plain_torch_makes_of_the_same_latents(latent, first, missing):
    seed = 500 + first
    served, plain = latent
    warm(served, seed, [one for at, one in enumerate(ORDER, 1) if at not in missing])
    made = prompt(seed, ORDER)
    full = plain.full(made.tokens)
    answer = served.ask(made.tokens, **asking(made, first))
    end = made.ranges[-1].end // LATENT_BLOCK * LATENT_BLOCK
    assert answer.cached == end
    told = spans(answer)
    assert told["missing"] == missing
    assert told["reused"] + told["computed"] == len(made.tokens)
    assert (told["reused"] == end) == (first == 0)
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, first, missing)) < EXACT
    assert gap(answer, full) > 20 * EXACT, "or nothing would be shown by this"
    assert gap(served.ask(made.tokens), full) < EXACT
    assert "Using CPU_MLA backend" in served.log.read_text()
