"""Real vLLM, with and without kvtier: the same answers to the last bit, and real hits.

The plain engine has room for everything, so its second answers are hits of vLLM's own prefix cache
of the same length as kvtier's; float32 keeps a split prefill from changing an answer. Where both
runs split prefills alike, logprobs are compared bit by bit, else to 1e-4.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.command import bare, kvtier
from tests.engine_python import engine_vllm, skip_if_broken
from tests.integration.conftest import BOTH_RUNNERS, EVERY_MODE, V1_FIRST
from tests.integration.engine_modes import OLDER, TOLD
from tests.integration.transfer import EVERY_HIT
from tests.nvme_place import flip

pytestmark = pytest.mark.vllm

TIMEOUT_S = 600
DOCUMENT_HIT = 512
CHUNK = 64
DEMO_CHUNK_BYTES = CHUNK * 16 * 1024

MORE = pytest.mark.extended
Run = Callable[..., Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    from kvtier.bench.model import make_model

    folder = tmp_path_factory.mktemp("models")
    return lambda preset: make_model(folder / preset, preset)


@pytest.fixture
def run(runs, mode):
    """``run(scenario, kvtier=True, model="tiny", old=False, processes=False, **config)``: the
    scenario's answers in the test's mode, or its log on failure."""

    def once(name, *, old=False, **more):
        return runs(OLDER if old else mode, name, **more)

    return once


@pytest.fixture(scope="session")
def runs(forks, models, tmp_path_factory):
    """``runs(mode, scenario, kvtier=True, model="tiny", processes=False, **config)``.

    ``processes``: as many as in production, instead of one. ``config`` are kvtier's keys. Runs are
    remembered, because several tests look at one engine's life.
    """
    seen: dict[str, Any] = {}

    def once(mode, name, *, kvtier=True, model="tiny", processes=False, **config):
        call = json.dumps(
            [mode.name, name, kvtier, model, processes, config], sort_keys=True, default=str
        )
        if call not in seen:
            out = tmp_path_factory.mktemp("run") / "answers.json"
            keys = config if kvtier else None
            scenario = f"scenarios {name}"
            seen[call] = start(forks(mode), scenario, out, models(model), keys, processes=processes)
        return seen[call]

    return once


def start(forks, scenario, out, model, config, *, processes=False, more=None):
    """``scenario`` is a module of ``tests.integration`` and a name in it. ``config``: kvtier's
    keys; None: without kvtier. ``more`` goes into its environment. Its log lies beside ``out``.
    Its engines have run in the fork server's mode."""
    module, name = scenario.split()
    processes = (
        processes or "TEST_ENGINE_PYTHON" in os.environ
    )  # that vLLM has not been tried in one
    environment = bare(
        HF_HUB_OFFLINE=1,
        VLLM_CPU_KVCACHE_SPACE=1,
        TEST_FOLDER=out.parent,
        VLLM_ENABLE_V1_MULTIPROCESSING=int(processes),
    )
    if name.endswith(("tensor_parallel", "pipeline_parallel")):  # threads decide the last bits
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    else:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if config is not None:
        # Most tests ask what is served, not how fast it would have been computed.
        settings = {"chunk_tokens": CHUNK, "ram_bytes": "64MiB"} | config
        environment |= {f"KVTIER_{key.upper()}": str(value) for key, value in settings.items()} | {
            "WITH_KVTIER": "1",
            EVERY_HIT: "1",
        }
    log, told = out.with_suffix(".log"), out.with_suffix(".told")
    environment |= {TOLD: str(told)} | dict(more or {})
    status = forks.run(
        f"tests.integration.{module}", [name, str(out), str(model)], environment, log, TIMEOUT_S
    )
    if status:
        return EngineFailed(log.read_text())
    forks.mode.check(told)
    return json.loads(out.read_text())


class EngineFailed(str):
    """The log of an engine that did not get through; comparing it with answers fails and shows
    it."""

    __slots__ = ()


def assert_same(ours, plain, tolerance=0.0):
    assert isinstance(ours, list), str(ours)[-4000:]
    assert isinstance(plain, list), str(plain)[-4000:]
    assert [answer["tokens"] for answer in ours] == [answer["tokens"] for answer in plain]
    for one, other in zip(ours, plain, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=tolerance, rel=0)


def corrupt(folder):
    """Chunks of a tier's folder that do not match their checksums."""
    told = kvtier("check", "--nvme", folder, "--json").stdout
    return sum(int(report["corrupt"]) for report in json.loads(told))


def hits(answers):
    return [answer["cached"] for answer in answers]


class Life(NamedTuple):
    """Answers of an engine, and the NVMe folder that it left."""

    answers: list[dict[str, Any]]
    left: Path


@pytest.fixture(scope="session")
def lives(runs, tmp_path_factory):
    """``lives(mode)``: one for all tests, in as many processes as in production, with RAM for all
    of it. Nobody opens its folder again: they take copies."""

    @cache
    def once(mode):
        folder = tmp_path_factory.mktemp("life") / "nvme"
        disk = {"nvme_path": folder, "nvme_bytes": "64MiB", "ram_bytes": "64MiB"}
        answers = runs(mode, "plain", model="demo", processes=True, **disk)
        assert isinstance(answers, list), str(answers)[-4000:]
        return Life(answers, folder)

    return once


@pytest.fixture
def first(lives, mode, tmp_path):
    """That life, with a copy of its folder for this test."""
    answers, folder = lives(mode)
    return Life(answers, Path(shutil.copytree(folder, tmp_path / "left")))


@BOTH_RUNNERS
def test_second_round_is_served_from_ram_and_bit_equal(run, first):
    plain = run("plain", kvtier=False, model="demo")
    assert_same(first.answers, plain)
    assert hits(first.answers) == [0] * 3 + [DOCUMENT_HIT] * 3 == hits(plain)


@V1_FIRST
def test_an_answer_of_latent_attention_goes_on_after_a_hit_as_it_did_before(run):
    skip_if_broken("mla")
    answers = run("continued", model="mla")
    assert isinstance(answers, list), str(answers)[-4000:]
    for first, second in (answers[:2], answers[2:]):
        assert second["cached"] == DOCUMENT_HIT
        assert second["tokens"] == first["tokens"][1:]
        assert second["logprobs"] == first["logprobs"][1:]


class TestOlderVllm:
    """What decides about a version, on the oldest that every change is tested with. The rest is the
    same code on both; ``make test-engines`` runs all of it there too."""

    def test_older_vllm_is_served_alike(self, run, disk):
        ours, plain = (
            run("plain", old=True, **disk, ram_bytes="64MiB"),
            run("plain", old=True, kvtier=False),
        )
        assert_same(ours, plain)
        assert hits(ours) == hits(plain) == [0, 0, 0, DOCUMENT_HIT, DOCUMENT_HIT, DOCUMENT_HIT]
        again = run("plain", old=True, **disk, ram_bytes="65MiB")
        assert_same(again[:3], ours[3:])
        assert hits(again) == [DOCUMENT_HIT] * 6, "it was restarted"

    def test_older_vllm_recomputes_failed_loads(self, run):
        assert_failed_loads_are_recomputed(
            run("load_failure", old=True), run("plain", old=True, kvtier=False)
        )


@pytest.fixture
def disk(tmp_path):
    return {"nvme_path": tmp_path / "nvme", "nvme_bytes": "64MiB"}


@BOTH_RUNNERS
def test_a_restarted_engine_is_warm_from_nvme(run, first):
    again = run("plain", model="demo", nvme_path=first.left, nvme_bytes="64MiB")
    assert isinstance(again, list), str(again)[-4000:]
    assert hits(again) == [DOCUMENT_HIT] * 6
    assert_same(again[:3], first.answers[3:])


@EVERY_MODE
def test_a_prefix_eight_times_larger_than_ram_comes_back_whole_after_a_restart(run, disk):
    first = run("in_parts", **disk, chunk_tokens=32, ram_bytes="16MiB")
    again = run("in_parts", **disk, chunk_tokens=32, ram_bytes="256KiB")
    assert hits(again["answers"]) == [32 * 32] * 2
    assert again["parts"] == 2 * (31 * "." + "!"), "a part a chunk, and the end with the last"
    assert not first["parts"], "what fits comes at once"
    assert_same(again["answers"], first["answers"][1:] * 2)


@pytest.mark.core
@EVERY_MODE
def test_a_damaged_disk_costs_hits_and_no_answer(run, first):
    """The last byte of every chunk is wrong: found before vLLM is promised any of it."""
    slots = first.left / "slots.kvtier"
    for end in range(DEMO_CHUNK_BYTES, slots.stat().st_size + 1, DEMO_CHUNK_BYTES):
        flip(slots, end - 1)
    bad = corrupt(slots.parent)
    assert bad >= 12
    again = run("plain", model="demo", nvme_path=first.left, nvme_bytes="64MiB")
    assert hits(again)[:3] == [0] * 3, "a bad chunk is found before vLLM is promised it"
    assert_same(again, first.answers, tolerance=1e-4)  # other hits, other rounding
    assert hits(again)[3:] != [0] * 3, "what was computed instead is kept again"
    assert corrupt(slots.parent) <= bad - 3, "what was found is dropped"


@EVERY_MODE
@pytest.mark.parametrize("scenario", ["bare_name", pytest.param("several_connectors", marks=MORE)])
def test_engine_settings_and_the_bare_name(run, scenario):
    ours = run(scenario)
    assert_same(ours, run("plain", kvtier=False))
    assert hits(ours)[3:] == [DOCUMENT_HIT] * 3


@EVERY_MODE
def test_aborted_requests_leave_nothing_behind(run):
    ours = run("abort")
    assert_same(ours, run("plain", kvtier=False))
    assert hits(ours)[3:] == [DOCUMENT_HIT] * 3


@V1_FIRST
def test_lora_adapters_never_share(run):
    ours, plain = run("lora"), run("lora", kvtier=False)
    assert isinstance(ours, dict), str(ours)[-4000:]
    assert len({tuple(answer["tokens"]) for answer in plain["first"]}) == 3, (
        "the adapters make no difference"
    )
    for which in ("first", "second"):
        assert_same(ours[which], plain[which], tolerance=1e-4)
    assert hits(ours["first"]) == [0, 0, 0]
    assert hits(ours["second"]) == [DOCUMENT_HIT] * 3
    assert ours["counts"]["missed_adapter"] == 2 * DOCUMENT_HIT // CHUNK, (
        "the same tokens under two more adapters"
    )


@V1_FIRST
class TestFeatures:
    @pytest.fixture
    def ours(self, run):
        answers = run("features")
        assert isinstance(answers, dict), str(answers)[-4000:]
        return answers

    @pytest.fixture
    def plain(self, run):
        return run("features", kvtier=False)

    def test_batch(self, ours, plain):
        assert_same(ours["batch"], plain["batch"], tolerance=1e-4)
        assert hits(ours["batch"]) == [DOCUMENT_HIT] * 6

    def test_salts_never_share(self, ours, plain):
        for name in ("salt_a", "salt_b", "salt_a_again"):
            assert_same(ours[name], plain[name], tolerance=1e-4)
        assert [hits(ours[name]) for name in ("salt_a", "salt_b", "salt_a_again")] == [
            [0],
            [0],
            [DOCUMENT_HIT],
        ]

    def test_a_request_that_keeps_kvtier_out_is_not_kept_and_not_served(self, ours, plain):
        assert_same(ours["apart"], plain["apart"], tolerance=1e-4)
        assert hits(ours["apart"]) == [0, 0, 0]

    def test_misses_are_told_by_reason_in_vllms_metrics(self, ours):
        skip_if_broken("every count")
        chunks = DOCUMENT_HIT // CHUNK
        missed = {
            name: count for name, count in ours["counts"].items() if name.startswith("missed")
        }
        assert missed == {"missed_cold": 6 * chunks, "missed_salt": 2 * chunks}

    def test_prompt_logprobs_are_computed_not_loaded(self, ours, plain):
        (one,), (other,) = ours["prompt_logprobs"], plain["prompt_logprobs"]
        assert one["cached"] == 0
        assert one["prompt_logprobs"][1:] == pytest.approx(other["prompt_logprobs"][1:], abs=1e-4)
        assert len(one["prompt_logprobs"]) == DOCUMENT_HIT + 1

    def test_next_turn_hits_the_answer_too(self, ours, plain):
        assert_same(ours["turns"], plain["turns"], tolerance=1e-4)
        prompt_and_answer = DOCUMENT_HIT + 1 + 2 * CHUNK + 8
        assert hits(ours["turns"])[1] == prompt_and_answer // CHUNK * CHUNK


@BOTH_RUNNERS
def test_failed_loads_are_recomputed_and_never_poison_the_cache(run):
    assert_failed_loads_are_recomputed(
        run("load_failure", processes=True), run("plain", kvtier=False)
    )


def assert_failed_loads_are_recomputed(ours, plain):
    """In four rounds every third load fails after it wrote garbage: all answers stay what they
    were."""
    assert isinstance(ours, dict), str(ours)[-4000:]
    for start in range(0, 12, 3):
        answers = ours["answers"][start : start + 3]
        assert [answer["tokens"] for answer in answers] == [
            answer["tokens"] for answer in plain[:3]
        ]
    assert hits(ours["answers"]).count(DOCUMENT_HIT) >= 3
    assert ours["failures"] >= 3, "no load failed, so nothing was tested"


@EVERY_MODE
def test_as_on_a_gpu_copies_run_beside_the_engines_steps(run, disk):
    ours = run("device", model="demo", ram_bytes="9MiB", **disk)
    assert isinstance(ours, dict), str(ours)[-4000:]
    plain = run("plain", kvtier=False, model="demo")
    assert_same(ours["answers"], [*plain, *plain[3:]])
    assert hits(ours["answers"])[3:] == [DOCUMENT_HIT] * 6
    assert ours["chunks"] >= 6 * DOCUMENT_HIT // CHUNK, "every load went by the streams"


@pytest.mark.skipif(
    engine_vllm().startswith("0.32."), reason="it keeps windows as they are: test_vllm_groups.py"
)
def test_sliding_window_beside_full_attention_works(run):
    ours = run("plain", model="swa")
    assert_same(ours, run("plain", kvtier=False, model="swa"), tolerance=1e-4)
    assert hits(ours)[3:] == [DOCUMENT_HIT] * 3


@V1_FIRST
def test_recurrent_models_without_prefix_caching_are_refused_by_name(run):
    log = run("refused", model="mamba")
    assert isinstance(log, EngineFailed)
    if engine_vllm().startswith(
        "0.23."
    ):  # which ends in words of its own before it asks the connector
        assert (
            "ValueError: Hybrid KV cache manager is disabled but failed to convert the KV "
            "cache specs" in log
        )
    else:
        assert "LayoutError: Lfm2ForCausalLM keeps a recurrent state" in log
