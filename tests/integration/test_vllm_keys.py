"""Real vLLM engines over one NVMe folder that look alike to kvtier and compute other KV for the
same tokens: they never meet. And engines that change while they run: what was kept before is never
served.

Each is compared with the same engine without kvtier.
"""

import itertools
import shutil
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from tests.integration.conftest import in_modes
from tests.integration.engine_modes import V1
from tests.integration.test_vllm import DOCUMENT_HIT, assert_same, hits, start
from tests.integration.tiny_models import make_family

pytestmark = [pytest.mark.vllm, in_modes(V1)]

WEIGHTS = ".safetensors"


@pytest.fixture
def run(forks, mode, tmp_path):
    """``run(scenario, model, kvtier=True, **environment)``: its answers. All runs have one NVMe
    folder."""
    numbers = itertools.count()
    disk = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}

    def once(name, model, *, kvtier=True, **more):
        out = tmp_path / f"run{next(numbers)}" / "answers.json"
        out.parent.mkdir()
        answers = start(
            forks(mode), f"key_scenarios {name}", out, model, disk if kvtier else None, more=more
        )
        assert not isinstance(answers, str), str(answers)[-4000:]
        return answers

    return once


@pytest.fixture
def first(tmp_path):
    return make_model(tmp_path / "first", "tiny", seed=0)


@pytest.fixture
def second(tmp_path):
    return make_model(tmp_path / "second", "tiny", seed=1)


def without_weights(model, into):
    """A copy of the model's folder as vLLM's object-storage streamer makes it: no file of
    weights."""
    return Path(
        shutil.copytree(
            model, into, ignore=lambda _, names: [name for name in names if WEIGHTS in name]
        )
    )


def differ(one, other):
    return all(left["tokens"] != right["tokens"] for left, right in zip(one, other, strict=True))


def test_a_place_whose_content_was_replaced_is_another_checkpoint(run, first, second, tmp_path):
    folder, place = without_weights(first, tmp_path / "folder"), tmp_path / "place"
    shutil.copytree(first, place)
    run("streamed", folder, TEST_WEIGHTS=str(place))
    shutil.copytree(second, place, dirs_exist_ok=True)
    two = run("streamed", folder, TEST_WEIGHTS=str(place))
    assert_same(two, run("streamed", folder, kvtier=False, TEST_WEIGHTS=str(second)))
    assert hits(two)[:3] == [0, 0, 0]


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
