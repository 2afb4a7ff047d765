"""Model classes of vLLM: SPECS.md says what becomes of them. ``python -m tests.trust.engine
--sweep`` asks all, and ``--family all`` simulates engines of more."""

import json
import subprocess
import sys

import pytest

from tests import marked_tables

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ASKED = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV41ForCausalLM",
    "Glm5NextForCausalLM",
    "KimiLinearForCausalLM",
    "NemotronHForCausalLM",
    "Mamba2ForCausalLM",
    "HrmTextForCausalLM",
)


def _run(*words, module="families"):
    command = [sys.executable, "-m", f"tests.trust.engine.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _listed():
    """Architecture -> what becomes of it, and its specs; how many more are only counted."""
    found, counted = dict[str, tuple[str, list[str]]](), 0
    for specs, verdict, count, names in marked_tables.rows("connectors/vllm/SPECS.md", "classes"):
        if names == "-":
            counted += int(count)
            continue
        each = names.split(", ")
        assert len(each) == int(count)
        kinds = [kind.replace("`", "") for kind in specs.split(", ") if "`" in kind]
        found |= dict.fromkeys(each, (verdict, kinds))
    return found, counted


def test_model_classes_are_treated_as_their_table_says():
    told = _run("--sweep", "--only", f"^({'|'.join(ASKED)})$")
    listed, _ = _listed()
    assert {one["architecture"] for one in told} == set(ASKED)
    for one in told:
        full = "served", ["FullAttentionSpec"]
        assert (one["verdict"], one["kinds"]) == listed.get(one["architecture"], full)
        assert one["verdict"] == "served" or one["why"]


def test_every_architecture_of_the_registry_is_in_the_table():
    from vllm.model_executor.models import registry

    every = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    listed, counted = _listed()
    assert listed.keys() <= every and len(listed) + counted == len(every)


def test_an_engine_of_a_model_class_answers_what_the_model_says():
    """Nemotron's states are left at the ends of blocks, some within a prefill step, and its
    configuration has an infinite number. Qwen's lie beside drafts, which are right at random."""
    asked = "Nemotron 3", "Qwen3-Next with MTP"
    told = _run("--family", *asked, "--steps", "100")
    assert not told["violations"]
    for family in asked:
        cells = [counts for name, counts in told["cells"].items() if family in name]
        assert cells, f"no cell of {family}"
        for counts in cells:
            assert counts["tokens from ram"]
            assert "MTP" not in family or counts["states of drafts"]


@pytest.mark.extended
def test_hits_within_blocks_bring_and_cost_what_their_table_says():
    told = _run("--steps", "100", module="within")
    assert not told["violations"] and told["counts"]["hits within a block"]
    by = {(unit, what): row for unit, what, *row in told["rows"]}
    for what, *numbers in marked_tables.rows("connectors/vllm/SPECS.md", "within"):
        (tokens, hit, slots), (_, finer, more) = by[None, what], by[16, what]
        said = [int(number.replace(",", "")) for number in numbers]
        assert said == [tokens, hit, finer, slots, more]
