"""Documents from other prompts on engines of other kinds: models of other families, with adapters,
and beside another connector. Each is a real vLLM.

Every blended answer is compared with plain torch.
"""

import json

import pytest

from tests.integration.spans_server import BLOCK, Plain, Served, gap
from tests.integration.test_spans import EXACT, asking, model, prompt, spans, warm
from tests.integration.tiny_models import make_family, make_lora
from tests.integration.transfer import transfer

__all__ = ["model"]

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
DECLINED = "vllm:kvtier_unblended_requests_total"


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


def test_homes_of_an_adapter_serve_requests_with_that_adapter_only(model, tmp_path):
    folders = {
        name: make_lora(tmp_path / name, model, seed)
        for seed, name in enumerate(("one", "other"), 1)
    }
    words = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"]
    words += [f"{name}={folder}" for name, folder in folders.items()]
    plains = {name: Plain(model, folder) for name, folder in folders.items()}
    plains["tiny"] = Plain(model)
    served = Served(model, tmp_path, *words, KVTIER_SPANS="on")
    with served:
        for seed, name in enumerate(plains, 30):
            warm(served, seed, [3, 1, 0], model=name)
        for seed, owner in enumerate(plains, 30):
            made = prompt(seed, [3, 1, 0])
            end = made.ranges[-1].end // BLOCK * BLOCK
            for name, plain in plains.items():
                answer = served.ask(made.tokens, **asking(made, model=name))
                if name == owner:
                    assert spans(answer)["reused"] == end
                    expected = plain.blended(made.tokens, made.ranges, end)
                    assert gap(answer, plain.full(made.tokens)) > 20 * EXACT
                else:
                    told = {"reused": 0, "declined": "missing", "missing": [1, 2, 3]}
                    assert spans(answer) == told
                    expected = plain.full(made.tokens)
                assert gap(answer, expected) < EXACT
        expect_nothing_in_place(served, plains["one"], model="one")


def test_beside_another_connector_documents_are_moved_and_none_is_computed_in_place(
    model, tmp_path
):
    other = transfer(
        kv_connector="PrefilledElsewhere", kv_connector_module_path="tests.trust.engine.beside"
    )
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [other, transfer()]},
    }
    words = ["--kv-transfer-config", json.dumps(both)]
    served = Served(model, tmp_path, *words, KVTIER_SPANS="on")
    with served:
        expect_nothing_in_place(served, Plain(model))


def expect_nothing_in_place(served, plain, **more):
    """Blending ends at a document without a home, and first tokens are not computed in place."""
    warm(served, 34, [0, 1, 3], **more)
    made = prompt(34, [0, 1, 2, 3])
    answer = served.ask(made.tokens, **asking(made, **more))
    reused = made.ranges[2].end // BLOCK * BLOCK
    assert spans(answer)["reused"] == answer.cached == reused
    assert gap(answer, plain.blended(made.tokens, made.ranges[:3], reused)) < EXACT
    before = served.metric(DECLINED, reason="unsupported")
    answer = served.ask(made.tokens, **asking(made, FIRST, **more))
    assert spans(answer) == {"reused": 0, "declined": "unsupported", "missing": []}
    assert gap(answer, plain.full(made.tokens)) < EXACT
    assert served.metric(DECLINED, reason="unsupported") == before + 1
