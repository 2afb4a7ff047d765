"""Documents from other prompts for a model with latent attention (MLA), on a real vLLM: the rotated
key of each token is moved, and the latent stays as it is.

vLLM's CPU platform turns prefix caching off for such models. The server of these tests leaves it
on. Every answer is compared with the model in plain torch.
"""

import pytest

from kvtier.bench.model import make_model
from tests.integration.spans_server import LatentPlain, LatentServed, gap
from tests.integration.test_spans import EXACT, asking, prompt, spans, warm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

BLOCK = 16
"""vLLM's kernel has no other."""
ORDER = [3, 1, 0, 2]


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
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert answer.cached == end
    told = spans(answer)
    assert told["missing"] == missing
    assert told["reused"] + told["computed"] == len(made.tokens)
    assert (told["reused"] == end) == (first == 0)
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, first, missing)) < EXACT
    assert gap(answer, full) > 20 * EXACT, "or nothing would be shown by this"
    assert gap(served.ask(made.tokens), full) < EXACT
    assert "Using CPU_MLA backend" in served.log.read_text()
