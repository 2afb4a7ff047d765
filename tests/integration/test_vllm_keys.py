"""Real vLLM engines whose weights are replaced while they run: what was kept before is never
served. And engines in which kvtier keeps nothing. Each is compared with itself without kvtier."""

import itertools

import pytest

from kvtier.bench.model import make_model
from tests.integration.conftest import in_modes
from tests.integration.engine_modes import V1
from tests.integration.test_vllm import DOCUMENT_HIT, assert_same, hits, start
from tests.integration.tiny_models import make_family

pytestmark = [pytest.mark.vllm, in_modes(V1)]


@pytest.fixture
def run(forks, mode, tmp_path):
    """``run(scenario, model, kvtier=True)``: its answers. All runs have one NVMe
    folder."""
    numbers = itertools.count()
    disk = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}

    def once(name, model, *, kvtier=True):
        out = tmp_path / f"run{next(numbers)}" / "answers.json"
        out.parent.mkdir()
        answers = start(forks(mode), f"key_scenarios {name}", out, model, disk if kvtier else None)
        assert not isinstance(answers, str), str(answers)[-4000:]
        return answers

    return once


@pytest.fixture
def first(tmp_path):
    return make_model(tmp_path / "first", "tiny", seed=0)


def differ(one, other):
    return all(left["tokens"] != right["tokens"] for left, right in zip(one, other, strict=True))


def test_weights_replaced_under_a_running_engine_are_never_answered_with_old_kv(run, first):
    ours, plain = run("written", first), run("written", first, kvtier=False)
    assert differ(plain["before"][:3], plain["after"][:3]), (
        "the weights make no difference, so nothing was tested"
    )
    assert_same(ours["before"], plain["before"])
    assert_same(ours["after"], plain["after"], tolerance=1e-4)
    assert hits(ours["after"])[6:] == [DOCUMENT_HIT] * 3, "the cache goes on with the new weights"
    restarted = run("short", first)
    assert_same(restarted[:3], ours["before"][3:])
    assert hits(restarted) == [DOCUMENT_HIT] * 6, "what the old weights computed is there for them"


@pytest.mark.extended
def test_mla_on_a_cpu_is_left_alone_where_vllm_has_turned_prefixes_off(run, tmp_path):
    model = make_model(tmp_path / "mla", "mla")
    ours, plain = run("prefix_caching", model), run("prefix_caching", model, kvtier=False)
    if plain["prefix_caching"]:
        pytest.skip("this CPU has AMX: vLLM allows MLA's prefixes here")
    assert ours["prefix_caching"] is False
    assert_same(ours["answers"], plain["answers"])
    assert not any(hits(ours["answers"]))
    assert_left_alone(tmp_path, "MLA on this CPU")


def assert_left_alone(folder, why):
    """The log of the first engine says so once."""
    (log,) = folder.glob("run0/answers.log")
    said = log.read_text()
    assert said.count(f"{why}: kvtier keeps and serves nothing in this engine") == 1


def test_a_prefix_lm_whose_prompts_begin_alike_is_answered_as_without_kvtier(run, tmp_path):
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 4, "H_cycles": 2, "L_cycles": 1}
    model = make_family(tmp_path / "prefix_lm", "hrm_text", embedding_scale=1.0, **sizes)
    apart, served = run("prefix_lm", model)
    assert_same(served, apart, tolerance=0.0)
    assert not any(hits(served))
    assert_left_alone(tmp_path, "(a prefix LM)")


def test_an_embedding_model_that_pools_all_tokens_answers_the_same_prompt_again(
    run, first, tmp_path
):
    once, twice, thrice = run("mean_pooling", first)
    assert once == twice == thrice
    assert_left_alone(tmp_path, "LlamaForCausalLM as it is used here")
