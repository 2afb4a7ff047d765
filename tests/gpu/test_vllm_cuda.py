"""A real vLLM on a CUDA device, as it runs there by default: Model Runner V2 with async scheduling.
What kvtier loads gives the tokens and logprobs that vLLM's own prefix cache gives, to the bit.

The scenarios are those of the tests on CPUs, by each attention backend of :data:`BACKENDS`.
``TEST_ENGINE_ARGUMENTS`` (JSON) is what every engine gets beside theirs, where the vLLM here lacks
a kernel that it would choose.
"""

import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from kvtier.bench.model import make_model
from tests.integration.engine_modes import PLUGIN, ROOT, TOLD, V2_ASYNC
from tests.integration.scenarios import ARGUMENTS
from tests.integration.transfer import EVERY_HIT

logger = logging.getLogger(__name__)
LIMIT_S = 240
HIT, CHUNK = 512, 64
BACKENDS = {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "float32"}
"""Attention backends, each with a type that it computes in. The first is vLLM's choice."""
ROUNDING = 0.05
"""Of a logprob in bfloat16, where other requests shared a step."""
WITHOUT_FLASHINFER = importlib.util.find_spec("flashinfer") is None
PREFILL = {"gdn_prefill_backend": "triton"} if WITHOUT_FLASHINFER else {}
"""Of states: vLLM's choice needs FlashInfer on some GPUs."""


def _without_vllm():
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "no vLLM for CUDA is installed"
    return "the vLLM that is installed is one for CPUs" if "cpu" in version else ""


WITHOUT = _without_vllm()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT or "vLLM is there"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Engines:
    """Runs scenarios, each in a process of its own, whose output lies in ``folder``."""

    def __init__(self, folder, backend):
        self.folder, self._backend, self._runs = folder, backend, 0

    def run(self, scenario, model, config, arguments=None, **more):
        """``scenario``: a module of ``tests.integration`` and a name in it. ``config``: kvtier's
        keys; None: without kvtier. ``arguments``: more of the engine's. What the scenario tells."""
        self._runs += 1
        place = self.folder / f"run{self._runs}"
        place.mkdir()
        out, log, told = (place / name for name in ("answers.json", "log", "told"))
        given: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
        given |= {"attention_backend": self._backend, "dtype": BACKENDS[self._backend]}
        given |= json.loads(os.environ.get(ARGUMENTS, "{}")) | (arguments or {})
        kept = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
        environment = kept | {
            "PYTHONPATH": os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]),
            TOLD: str(told),
            ARGUMENTS: json.dumps(given),
            "TEST_FOLDER": str(place),
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if WITHOUT_FLASHINFER:  # vLLM 0.32 imports it for its sampler without a look
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if config is not None:
            environment |= {f"KVTIER_{key.upper()}": str(value) for key, value in config.items()}
            environment |= {"WITH_KVTIER": "1", EVERY_HIT: "1"}
        words = [sys.executable, "-m", "tests.gpu.cuda_scenarios", *scenario.split()]
        with log.open("w") as file:
            status = subprocess.run(
                [*words, str(out), str(model)],
                check=False,
                cwd=ROOT,
                env=environment | more,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            ).returncode
        assert not status, f"{scenario}: {status}\n{log.read_text()[-6000:]}"
        V2_ASYNC.check(told)
        found = json.loads(out.read_text())
        assert found["backends"] == [self._backend]
        if config is not None:
            assert {one["rows"] for one in found["copiers"]} == {"KernelRows"}
            assert sum(one["loaded"] for one in found["copiers"]), "nothing was loaded"
        logger.info("%s: %s", scenario, json.dumps({"kvtier": config is not None} | _short(found)))
        told_here = found["told"] if isinstance(found["told"], dict) else {"all": found["told"]}
        return told_here | {"replays": found["replays"]}


def _short(found):
    """What is worth reading of a run that went well."""
    names = ("facts", "drafted", "tokens", "preemptions")
    answers = found["told"] if isinstance(found["told"], dict) else {}
    told = {name: answers.get(name) for name in names}
    return {name: value for name, value in told.items() if value} | {"copiers": found["copiers"]}


@pytest.fixture(params=BACKENDS)
def engines(request, tmp_path):
    return Engines(tmp_path, request.param)


def model(folder, preset):
    return make_model(folder / "models" / preset, preset)


RAM = {"chunk_tokens": CHUNK, "ram_bytes": "64MiB"}


def part(answers, name):
    return [answer[name] for answer in answers]


def assert_same(some, others):
    """To the bit."""
    for name in ("tokens", "logprobs"):
        assert part(some, name) == part(others, name)


def assert_as_own(told, hit=HIT):
    """What only kvtier had is what vLLM's own prefix cache gave, from a hit of the same length."""
    assert_same(told["warm"], told["own"])
    assert part(told["warm"], "cached") == part(told["own"], "cached")
    if hit:
        assert part(told["warm"], "cached") == [hit] * len(told["warm"])
    own, warm = (told["loaded"][index].get("loaded_ram", 0) for index in (1, 2))
    assert warm > own


def test_hits_from_ram_and_after_a_restart_from_nvme(engines):
    """As an engine without kvtier answers, too: cold, and from its own prefix cache."""
    tiny = model(engines.folder, "tiny")
    disk = {"nvme_path": engines.folder / "nvme", "nvme_bytes": "64MiB"}
    plain = engines.run("scenarios plain", tiny, None)
    told = engines.run("scenarios plain", tiny, RAM | disk)
    again = engines.run("mode_scenarios one_prompt", tiny, RAM | disk | {"ram_bytes": "65MiB"})
    assert_same(told["all"], plain["all"])
    assert part(told["all"], "cached") == [0, 0, 0, HIT, HIT, HIT]
    restarted = again["answers"]
    assert restarted["loaded"][0]["loaded_nvme"] >= HIT // CHUNK
    assert_as_own(restarted)
    assert_same(restarted["cold"], restarted["own"])


def test_a_prefix_of_many_times_ram_comes_back_in_parts_after_a_restart(engines):
    """RAM has room for four or eight of its 32 chunks, by the size of a number."""
    tiny, tokens = model(engines.folder, "tiny"), 32 * 32
    disk = {"nvme_path": engines.folder / "nvme", "nvme_bytes": "64MiB", "chunk_tokens": 32}
    first = engines.run("scenarios in_parts", tiny, disk | {"ram_bytes": "16MiB"})
    again = engines.run("scenarios in_parts", tiny, disk | {"ram_bytes": "256KiB"})
    assert part(again["answers"], "cached") == [tokens] * 2
    assert again["parts"] >= 2 * 32, "each chunk is a part"
    assert not first["parts"], "what fits comes at once"
    assert_same(again["answers"], first["answers"][1:] * 2)


@pytest.mark.parametrize("preset", ["tiny", "swa"])
def test_a_hit_is_that_of_vllms_own_prefix_cache(engines, preset):
    """Full attention; windows beside it."""
    made = model(engines.folder, preset)
    assert_as_own(engines.run("mode_scenarios one_prompt", made, RAM)["answers"])


def test_a_preempted_request_resumes_right(engines):
    tiny = model(engines.folder, "tiny")
    told = engines.run("mode_scenarios preemption", tiny, RAM, TEST_BLOCKS="22")
    assert told["preemptions"] > 0
    if told["plans"] == told["own_plans"]:
        assert_as_own(told, None)
        return
    # Loads end when they end: with another request in the same step, products round otherwise.
    logger.info("planned %s, and with loads %s", told["own_plans"], told["plans"])
    assert part(told["warm"], "tokens") == part(told["own"], "tokens")
    for warm, own in zip(told["warm"], told["own"], strict=True):
        assert warm["logprobs"] == pytest.approx(own["logprobs"], abs=ROUNDING)


def test_drafts_by_eagle(engines):
    told = engines.run("mode_scenarios eagle", model(engines.folder, "tiny"), RAM)
    assert told["tokens"]["draft"] > 0
    assert_as_own(told["answers"])


def test_cuda_graphs_are_replayed_beside_copies(engines):
    """While the pool is still being page-locked: capturing must bear it."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}
    told = engines.run(
        "mode_scenarios one_prompt",
        model(engines.folder, "tiny"),
        RAM | {"ram_bytes": "8GiB"},
        {"enforce_eager": False, "compilation_config": graphs},
    )
    assert told["replays"] > 0
    assert_as_own(told["answers"])


@pytest.mark.parametrize("scenario", ["life", "drafts"])
def test_states_come_back_with_and_without_drafts_of_their_own(engines, scenario):
    """Qwen3-Next's states beside full attention, and its MTP layer beside them: the answers are
    those of an engine without kvtier that drafts alike."""
    made = model(engines.folder, "qwen3next")
    if scenario == "drafts":
        from tests.integration.scenarios import document
        from tests.integration.tiny_models import make_mtp

        made = make_mtp(engines.folder / "mtp" / "qwen3next", made, [document(0, 200)], 24)
    ask = partial(
        engines.run,
        f"group_scenarios {scenario}",
        made,
        arguments={"max_num_seqs": 4, "dtype": "bfloat16"} | PREFILL,
    )
    plain = ask(None)
    ours = ask({"ram_bytes": "512MiB", "chunk_tokens": plain["facts"]["block"]})
    assert "MambaSpec" in ours["facts"]["kinds"]
    assert_same(ours["first"], plain["first"])
    assert part(ours["first"], "cached") == [0, 0, 0]
    assert min(part(ours["again"], "cached")) > 0
    assert part(ours["again"], "tokens") == part(plain["again"], "tokens")
    if scenario == "life":
        assert_same(ours["again"], plain["again"])
    else:
        assert min(ours["drafted"][0], plain["drafted"][0]) > 0
