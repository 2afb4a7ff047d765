"""Real engines under vLLM's own OffloadingConnector with kvtier's server below its RAM, by the
entry in ``secondary_tiers`` that the page gives, and with vLLM's ``fs`` tier as the control."""

import itertools
import json
import shutil

import pytest

from kvtier.bench.model import make_model
from tests.integration.conftest import in_modes
from tests.integration.engine_modes import V1, V2_ASYNC
from tests.integration.test_vllm import DOCUMENT_HIT, assert_same, hits, start
from tests.integration.tier_scenarios import TIER
from tests.server_process import serving
from tests.unit.extensions.vllm_tier.tiering import OURS, PATIENT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def run(forks, mode, tmp_path):
    """``run(model, tier)``: answers of a new engine. Without a tier: those of vLLM alone."""
    numbers = itertools.count()

    def once(model, tier=None):
        out = tmp_path / f"run{next(numbers)}" / "answers.json"
        out.parent.mkdir()
        more = {TIER: json.dumps(tier)}
        answers = start(forks(mode), "tier_scenarios once", out, model, None, more=more)
        assert not isinstance(answers, str), str(answers)[-6000:]
        return answers

    return once


@in_modes(V1, V2_ASYNC)
@pytest.mark.parametrize("preset", ["tiny", "gptoss"])
def test_a_second_engine_hits_what_the_first_one_left_and_answers_as_without(run, preset, tmp_path):
    model = make_model(tmp_path / "model", preset)
    plain = run(model)
    with serving(ram_bytes="64MiB", nvme_path=tmp_path / "nvme", nvme_bytes="64MiB") as server:
        ours = OURS | {"server": str(server.address)} | PATIENT
        first, second = run(model, ours), run(model, ours)
    assert_same(first, plain)
    assert_same(second, plain)
    assert hits(first) == [0] * 3
    assert hits(second) == [DOCUMENT_HIT] * 3


@in_modes(V1)
def test_weights_replaced_under_one_name_are_a_miss_where_files_alone_answer_wrongly(run, tmp_path):
    model = make_model(tmp_path / "model", "tiny", seed=0)
    with serving(ram_bytes="64MiB") as server:
        ours = OURS | {"server": str(server.address)} | PATIENT
        theirs = {"type": "fs", "root_dir": str(tmp_path / "fs")}
        run(model, ours)
        run(model, theirs)
        shutil.rmtree(model)
        make_model(model, "tiny", seed=1)
        plain, kept, wrong = run(model), run(model, ours), run(model, theirs)
    assert_same(kept, plain)
    assert hits(kept) == [0] * 3
    assert hits(wrong) == [DOCUMENT_HIT] * 3
    assert all(one["tokens"] != other["tokens"] for one, other in zip(wrong, plain, strict=True))
