"""Models with several KV cache groups on a real vLLM, with and without kvtier: windows, local
attention, states. Equal answers, real hits, from RAM and after a restart from NVMe, and as much KV
memory as without kvtier."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvtier.bench.model import make_model
from tests.engine_python import engine_vllm
from tests.integration.conftest import EXTENDED, in_modes
from tests.integration.engine_modes import V1, V1_ASYNC, V2, V2_ASYNC
from tests.integration.group_scenarios import AGAIN
from tests.integration.scenarios import document
from tests.integration.test_vllm import assert_same, corrupt, hits, start
from tests.integration.tiny_models import make_mtp
from tests.s3_server import S3Server, operated

Run = Callable[..., Any]
KINDS = {
    "swa": ["FullAttentionSpec", "SlidingWindowSpec"],
    "gptoss": ["FullAttentionSpec", "SlidingWindowSpec"],
    "window": ["SlidingWindowSpec"],
    "llama4": ["ChunkedLocalAttentionSpec", "FullAttentionSpec"],
    "qwen3next": ["FullAttentionSpec", "MambaSpec"],
}
LESS = pytest.mark.extended
MODES = (V2_ASYNC, V1, V1_ASYNC, V2)


def cells(*models, cheap=()):
    """Each model in each mode. ``make test-all`` has ``cheap`` ones: not the model with a state
    on V2, whose copies of states take seconds a prompt in Triton's interpreter."""
    found = [(model, mode) for model in models for mode in MODES]
    return pytest.mark.parametrize(
        ("model", "mode"),
        [pytest.param(*one, marks=() if one in cheap else LESS) for one in found],
        indirect=["mode"],
        ids=[f"{model}-{mode.name.replace(' ', '-')}" for model, mode in found],
    )


CHEAP = (("swa", V2_ASYNC), ("qwen3next", V1))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not engine_vllm().startswith("0.32."), reason="groups are kept from vLLM 0.32 on"
    ),
]


class Lives:
    def __init__(self, forks, factory):
        self._forks, self._factory, self._seen = forks, factory, dict[Any, Any]()
        self._models = factory.mktemp("models")

    def __call__(self, mode, model, scenario="life", *, kvtier=True, **config):
        call = mode, model, scenario, kvtier, *sorted(config.items())
        drafting = scenario == "asked_again_drafting"
        if call not in self._seen:
            out = self._factory.mktemp("run") / "answers.json"
            keys: dict[str, Any] | None = {"ram_bytes": "256MiB"} | config if kvtier else None
            if keys is not None and model == "qwen3next":
                # vLLM makes blocks as long as a state is large: 640 tokens, or 384, by the host
                plain = self(mode, model, scenario if drafting else "life", kvtier=False)
                keys |= {"chunk_tokens": plain["facts"]["block"]}
            made = make_model(self._models / model, model)
            if drafting:
                made = self._with_drafts(made)
            parallel = scenario == "tensor_parallel"
            told = start(
                self._forks(mode),
                f"group_scenarios {scenario}",
                out,
                made,
                keys,
                processes=parallel,
            )
            assert isinstance(told, dict), str(told)[-4000:]
            self._seen[call] = told
        return self._seen[call]

    def _with_drafts(self, made):
        """The model with a layer that guesses what it answers to the document that is asked."""
        place = self._models / "drafting" / made.name
        if not place.exists():
            make_mtp(place, made, [document(*AGAIN)], 24)
        return place


@pytest.fixture(scope="session")
def all_lives(forks, tmp_path_factory):
    return Lives(forks, tmp_path_factory)


@pytest.fixture
def lives(all_lives, mode):
    return partial(all_lives, mode)


def assert_equal(ours, plain, model):
    for part in ("first", "again"):
        assert_same(ours[part], plain[part], tolerance=1e-4 if model == "swa" else 0.0)
    assert [answer["tokens"] for answer in ours["longer"]] == [
        answer["tokens"] for answer in plain["longer"]
    ]


def whole_hit(told):
    """Tokens of the longest hit of a document of a scenario: in whole blocks, and a token is
    computed."""
    block, tokens = int(told["facts"]["block"]), int(told["facts"]["document"])
    return (tokens - 1) // block * block


@cells(*KINDS, cheap=CHEAP)
def test_every_group_comes_back_from_ram_and_answers_are_equal(lives, model):
    ours, plain = lives(model), lives(model, kvtier=False)
    for told in (ours, plain):
        assert told["facts"]["kinds"] == KINDS[model], "the groups under test are in force"
        assert told["facts"]["hybrid"]
    assert_equal(ours, plain, model)
    whole = whole_hit(ours)
    assert hits(ours["first"]) == [0, 0, 0]
    assert hits(ours["again"]) == [whole] * 3 == hits(plain["again"])
    assert ours["counts"]["loaded_ram"] > 0
    assert not any(name.startswith("missed_corrupt") for name in ours["counts"])


@cells("swa", "qwen3next", "gptoss", cheap=[("swa", V2_ASYNC)])
def test_a_prompt_that_goes_on_is_hit_where_the_answer_before_it_ended(lives, model):
    ours = lives(model)
    first, second = hits(ours["longer"])
    assert first >= whole_hit(ours)
    assert second >= first
    assert ours["longer"][0]["tokens"] == ours["longer"][1]["tokens"]


@cells("swa", "qwen3next")
def test_every_group_comes_back_from_nvme_after_a_restart(lives, model, tmp_path):
    plain, folder = lives(model, kvtier=False), tmp_path / "nvme"
    disk: dict[str, Any] = {"nvme_path": str(folder), "nvme_bytes": "256MiB"}
    lives(model, **disk)
    ours = lives(model, ram_bytes="255MiB", **disk)
    assert hits(ours["first"]) == hits(plain["again"]), "what the engine before has saved"
    assert ours["counts"]["loaded_nvme"] > 0
    assert [one["tokens"] for one in ours["first"]] == [one["tokens"] for one in plain["again"]]
    assert not corrupt(folder)


@cells("swa", "qwen3next")
def test_every_group_comes_back_from_a_bucket_on_an_empty_host(lives, model, tmp_path):
    plain = lives(model, kvtier=False)
    shared: dict[str, Any] = {"object_url": "s3://bucket/groups", "object_bytes": "256MiB"}
    with S3Server() as server, operated(server.environment):
        for host in ("one", "other"):
            shared |= {"nvme_path": str(tmp_path / host), "nvme_bytes": "64MiB"}
            ours = lives(model, **shared)
    assert hits(ours["first"]) == hits(plain["again"]), "what the engine before has saved"
    assert ours["counts"]["loaded_object"] > 0
    assert [one["tokens"] for one in ours["first"]] == [one["tokens"] for one in plain["again"]]
    assert not any(name.startswith("missed_corrupt") for name in ours["counts"])


@cells("qwen3next")
def test_with_a_match_unit_hits_end_within_a_block_and_answers_are_equal(lives, model):
    block = lives(model, kvtier=False)["facts"]["block"]
    ours, plain = (lives(model, "asked_again_in_units", kvtier=one) for one in (True, False))
    blocks = lives(model, "asked_again")
    whole = 899 // block * block
    asked = ("first", "again", "other")
    assert whole < 896
    assert [blocks[one]["cached"] for one in asked] == [0, whole, whole]
    assert [ours[one]["cached"] for one in asked] == [0, 896, whole]
    assert [plain[one]["cached"] for one in asked] == [0, 896, whole]
    assert ours["counts"]["loaded_ram"] > blocks["counts"]["loaded_ram"]
    for one in asked:
        assert_same([ours[one]], [plain[one]])
        assert ours[one]["tokens"] == blocks[one]["tokens"]


@in_modes(extended=(V2_ASYNC, V2))
def test_states_beside_drafts_come_back_and_answers_are_equal(lives):
    """States of accepted tokens alone are right: with drafts and without a hit, from vLLM's own
    cache and from kvtier."""
    ours, plain = (lives("qwen3next", "asked_again_drafting", kvtier=one) for one in (True, False))
    assert ours["facts"]["kinds"] == KINDS["qwen3next"]
    assert min(told["drafted"][1] for told in (ours, plain)) > 0, "no draft was accepted"
    asked = ("first", "again", "other")
    assert [ours[one]["cached"] for one in asked] == [plain[one]["cached"] for one in asked]
    assert ours["again"]["cached"] > 0
    assert ours["counts"]["loaded_ram"] > 0
    for one in asked:
        assert ours[one]["tokens"] == plain[one]["tokens"]


@EXTENDED
def test_two_tensor_ranks_keep_their_parts_of_every_group(lives):
    """Not with a state: there vLLM 0.32 has no prefix-cache hits with two ranks on CPUs, with or
    without kvtier."""
    ours = lives("swa", "tensor_parallel")
    plain = lives("swa", "tensor_parallel", kvtier=False)
    assert_equal(ours, plain, "swa")
    assert hits(ours["again"]) == hits(plain["again"])
    assert ours["counts"]["loaded_ram"] > 0
