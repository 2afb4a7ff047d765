"""Real vLLM in each of its modes: what kvtier loads gives the same tokens and logprobs, to the last
bit, as a hit of the same engine's own prefix cache. In RAM, and after a restart from NVMe.

Every test also says what shows that its mode was in force, and fails when nothing was loaded. Each
runs by both of vLLM's model runners, with and without async scheduling, where vLLM lets it.
"""

import itertools
from pathlib import Path

import pytest

from kvtier.bench.model import PRESETS, kv_token_bytes, make_model
from tests.engine_python import skip_if_broken
from tests.integration.conftest import EVERY_MODE, EXTENDED, in_modes
from tests.integration.engine_modes import V1, V2, V2_ASYNC
from tests.integration.test_vllm import CHUNK, DOCUMENT_HIT, assert_same, hits, start
from tests.integration.tiny_models import make_seeing

pytestmark = pytest.mark.vllm

CHUNKS = DOCUMENT_HIT // CHUNK


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "mla", "mla")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture
def run(forks, mode, tmp_path):
    """``run(scenario, model, **environment)``: what it tells. All engines of a test have one NVMe
    folder."""
    numbers = itertools.count()
    disk = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}

    def once(name, model, *, module="mode_scenarios", processes=False, **more):
        out = tmp_path / f"run{next(numbers)}" / "answers.json"
        out.parent.mkdir()
        told = start(
            forks(mode), f"{module} {name}", out, model, disk, processes=processes, more=more
        )
        assert isinstance(told, dict), str(told)[-4000:]
        return told

    return once


def assert_as_own(told, hit=DOCUMENT_HIT, prompts=1, tolerance=0.0):
    """What only kvtier had is what vLLM's own prefix cache gave, from hits of the same length."""
    cold, own, warm = (told["loaded"][index].get("loaded_ram", 0) for index in range(3))
    assert cold == own, "the engine's own hit was its own"
    assert warm - own == prompts * hit // CHUNK
    assert hits(told["own"]) == hits(told["warm"]) == [hit] * len(told["own"])
    assert_same(told["warm"], told["own"], tolerance)
    assert_same(told["cold"], told["own"], tolerance=1e-4)


def assert_restarted(again, told, chunks=CHUNKS, tolerance=0.0):
    """What another engine answers first comes from NVMe, and is what the first engine's own cache
    gave."""
    assert again["loaded"][0].get("loaded_nvme", 0) >= chunks
    assert hits(again["cold"]) == hits(told["own"])
    assert_same(again["cold"], told["own"], tolerance)


@EXTENDED
class TestWays:
    @pytest.fixture(scope="class")
    @classmethod
    def lives(cls, forks, mode, tiny, tmp_path_factory):
        folder = tmp_path_factory.mktemp("ways")
        disk = {"nvme_path": folder / "nvme", "nvme_bytes": "64MiB"}
        told = [
            start(forks(mode), "mode_scenarios ways", folder / f"{life}.json", tiny, disk)
            for life in range(2)
        ]
        for life in told:
            assert isinstance(life, dict), str(life)[-4000:]
        return told

    def test_chunked_prefill(self, lives):
        told, again = (life["in pieces"] for life in lives)
        assert_as_own(told)
        assert_restarted(again, told)
        assert told["plans"][:2] == [[16], [15]], (
            "what is left of the prompt is computed in two steps"
        )

    def test_several_answers_to_one_prompt(self, lives):
        told, again = (life["several"] for life in lives)
        assert len(told["warm"]) == 3
        assert max(len(step) for step in told["plans"]) == 3, "three requests in a step"
        warm = told["loaded"][2]["loaded_ram"] - told["loaded"][1]["loaded_ram"]
        assert warm == CHUNKS, "loaded once, for the three of them"
        assert_same(told["warm"], told["own"])
        assert_same(again["cold"], told["own"])

    def test_beam_search(self, lives):
        told, again = (life["beams"] for life in lives)
        assert len({tuple(beam["tokens"]) for beam in told["own"]}) == 3
        assert told["loaded"][2]["loaded_ram"] - told["loaded"][1]["loaded_ram"] == CHUNKS
        assert_same(told["warm"], told["own"])
        assert_same(again["cold"], told["own"])

    def test_structured_output(self, lives):
        told, again = (life["structured"] for life in lives)
        assert_as_own(told)
        assert_restarted(again, told)
        assert told["own"][0]["text"] in ("yes", "no", "perhaps")

    def test_prompt_logprobs(self, lives):
        told, again = (life["prompt logprobs"] for life in lives)
        for one in (told["cold"], told["own"], told["warm"], again["cold"]):
            assert hits(one)[1] == 0
            assert len(one[1]["prompt_logprobs"]) == DOCUMENT_HIT + 31
            assert one[1]["prompt_logprobs"] == told["own"][1]["prompt_logprobs"]
        assert hits(told["warm"])[0] == DOCUMENT_HIT
        assert_same(told["warm"], told["own"])
        assert_same(again["cold"], told["own"])
        assert told["loaded"][2]["loaded_ram"] - told["loaded"][1]["loaded_ram"] == CHUNKS


@EXTENDED
def test_without_vllms_prefix_caching_every_hit_is_loaded(run, tiny):
    """The scenario asserts that it is off. vLLM's own hit is that of an engine that has it on."""
    told, own = run("no_prefix_caching", tiny)["answers"], run("one_prompt", tiny)["answers"]
    assert [loaded.get("loaded_ram", 0) for loaded in told["loaded"]] == [0, CHUNKS, 2 * CHUNKS]
    for answers in (told["own"], told["warm"], own["cold"]):
        assert hits(answers) == [DOCUMENT_HIT]
        assert_same(answers, own["own"])
    assert own["loaded"][0]["loaded_nvme"] == CHUNKS, (
        "with the cache on it is the same engine to kvtier"
    )


@EXTENDED
def test_quantised_kv_is_kept_as_it_is(run, tiny):
    if "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's KV of eight bits on CPUs needs AVX-512 or AMX")
    told, again = (run("quantised", tiny)["answers"] for _ in range(2))
    assert_as_own(told)
    assert_restarted(again, told)


@EVERY_MODE
def test_preempted_requests_resume_from_what_kvtier_kept(run, tiny):
    roomy, tight = (run("preemption", tiny, TEST_BLOCKS=blocks) for blocks in ("1024", "21"))
    assert_as_own(roomy, hit=256, prompts=2)
    assert roomy["preemptions"] == 0
    assert tight["preemptions"] > 0
    assert max(tight["resumed"]) >= CHUNK, "a request that was preempted was loaded when it resumed"
    for round_ in ("cold", "own", "warm"):
        assert_same(tight[round_], roomy["own"])


@EVERY_MODE
def test_speculation_by_eagle_saves_what_was_accepted(run, tiny):
    skip_if_broken("speculative")
    assert_saves_what_was_accepted(run, tiny, "eagle")


@in_modes(extended=(V2, V1))
def test_speculation_by_ngram_saves_what_was_accepted(run, tiny):
    """vLLM itself turns async scheduling off for it."""
    skip_if_broken("speculative")
    assert_saves_what_was_accepted(run, tiny, "ngram")


@EXTENDED
def test_structured_output_of_drafted_tokens(run, tiny):
    skip_if_broken("speculative")
    told, again = run("structured_drafts", tiny), run("structured_drafts", tiny)
    assert_as_own(told["answers"])
    assert_restarted(again["answers"], told["answers"])
    assert told["letter"] in told["free"]
    assert told["letter"] not in told["answers"]["own"][0]["text"]
    assert 0 < told["tokens"]["accepted"] < told["tokens"]["draft"]


def assert_saves_what_was_accepted(run, model, how):
    """A prompt, and a next turn that is hit as far as a chunk was made of accepted tokens."""
    told, again = run(how, model), run(how, model)
    assert_as_own(told["answers"])
    assert_restarted(again["answers"], told["answers"])
    turn = told["turn"]
    assert hits(turn["own"]) == hits(turn["warm"]) == [DOCUMENT_HIT + CHUNK]
    assert turn["loaded"][2]["loaded_ram"] - turn["loaded"][1]["loaded_ram"] == CHUNKS + 1
    assert_same(turn["warm"], turn["own"])
    assert 0 < told["tokens"]["accepted"] < told["tokens"]["draft"]


@EVERY_MODE
def test_tensor_parallel_ranks(run, mode, tiny):
    assert_ranks(run, tiny, "tensor_parallel", mode.depth())


@in_modes(extended=(V2_ASYNC, V1, V2))
def test_pipeline_stages(run, mode, tiny):
    """Two stages have two batches in flight, and three with async scheduling, which vLLM turns off
    for them on V1."""
    assert_ranks(run, tiny, "pipeline_parallel", mode.depth(2))


def assert_ranks(run, model, ranks, in_flight):
    told, again = run(ranks, model), run(ranks, model)
    assert_as_own(told["one"])
    assert_restarted(again["one"], told["one"])
    assert_as_own(told["several"], prompts=4)
    assert_restarted(again["several"], told["several"], 4 * CHUNKS)
    assert told["most in flight"] == in_flight


@EXTENDED
@pytest.mark.parametrize(
    ("scenario", "ranks"), [("latent", 1), ("latent_tensor_parallel", 2)], ids=["one", "two ranks"]
)
def test_multi_head_latent_attention(run, latent, scenario, ranks):
    """vLLM's CPU platform turns prefix caching off for it, because a hit's last token is computed
    by another kernel than that of a prefill. The scenario turns it on again. A hit of vLLM's own
    and one of kvtier's are then computed by the same kernels.

    Two ranks have the same KV, and a chunk keeps it once. Of several prompts at once each begins
    when its load is through, and these kernels round otherwise in another batch."""
    skip_if_broken("mla")
    told, again = run(scenario, latent), run(scenario, latent)
    assert told["prefix caching"]
    assert told["kept"] == "MLAAttentionSpec"
    assert told["ranks"] == told["replicas"] == ranks
    assert told["chunk bytes"] == CHUNK * kv_token_bytes(PRESETS["mla"], 4)
    assert_as_own(told["one"])
    assert_restarted(again["one"], told["one"])
    assert_as_own(told["several"], prompts=4, tolerance=1e-4)
    assert_restarted(again["several"], told["several"], 4 * CHUNKS, tolerance=1e-4)


@EXTENDED
def test_images_are_part_of_a_prompts_name(run, seeing):
    told, again = run("seeing", seeing), run("seeing", seeing)
    one, other = told["image 0"], told["image 1"]
    assert one["own"][0]["tokens"] != other["own"][0]["tokens"], "the images make no difference"
    assert hits(other["cold"]) == [0]
    assert other["loaded"][0] == one["loaded"][2]
    for name in ("image 0", "image 1"):
        assert_as_own(told[name])
        assert_restarted(again[name], told[name])


@EXTENDED
def test_a_session_that_adds_an_image_later_saves_it_under_that_image(run, seeing):
    told = run("image_later", seeing, module="session_scenarios", processes=True)
    again = run("image_later", seeing, module="session_scenarios", processes=True)
    before_the_image = 3 * CHUNK
    session, own, other = told["session"], told["own"], told["other, own"]
    assert session["cached"] == 0
    assert len(session["tokens"]) == 12, "it answered before the image came, and after"
    assert own["cached"] == told["warm"]["cached"] == DOCUMENT_HIT
    assert_same([told["warm"]], [own])
    assert session["tokens"][4:] == own["tokens"]
    assert own["tokens"] != other["tokens"], "the images make no difference"
    assert told["other, only kvtier"]["cached"] == before_the_image
    assert told["other, only kvtier"]["tokens"] == other["tokens"]
    for one in ("session, own", "session, warm"):
        assert told[one]["cached"] >= before_the_image
        assert_same([told[one]], [told["session, own"]])
    assert told["session, other"]["tokens"][4:] == other["tokens"]
    assert again["session"]["cached"] >= before_the_image, "it was restarted"
    assert_same([again["session"]], [told["session, own"]])
