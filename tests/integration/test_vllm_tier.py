"""Real engines under vLLM's own OffloadingConnector with kvtier's server below its RAM, by the
entry in ``secondary_tiers`` that the page gives, and with vLLM's ``fs`` tier as the control."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct

import pytest

from kvtier.bench.model import make_model
from tests.child_process import wait_for
from tests.conftest import ROOT
from tests.integration.conftest import in_modes
from tests.integration.engine_modes import V1, V2_ASYNC
from tests.integration.scenarios import document
from tests.integration.test_vllm import DOCUMENT_HIT, assert_same, hits, start
from tests.integration.test_vllm_launch import ENGINE, HIT, QUIET, Launched
from tests.integration.tier_scenarios import TIER
from tests.server_process import serving
from tests.unit.extensions.vllm_tier.tiering import COUNTER, OURS, PATIENT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def run(forks, mode, tmp_path):
    """``run(model, tier, scenario)``: a new engine's answers. No tier: those of vLLM alone."""
    numbers = itertools.count()

    def once(model, tier=None, scenario="once"):
        out = tmp_path / f"run{next(numbers)}" / "answers.json"
        out.parent.mkdir()
        more = {TIER: json.dumps(tier)}
        answers = start(forks(mode), f"tier_scenarios {scenario}", out, model, None, more=more)
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


@in_modes(extended=(V1, V2_ASYNC))
def test_states_come_back_with_the_attention_before_them(run, tmp_path):
    """Blocks are as long as a state is large: 640 tokens, or 384, by the host."""
    model = make_model(tmp_path / "qwen3next", "qwen3next")
    plain = run(model, scenario="stateful")
    with serving(ram_bytes="64MiB") as server:
        ours = OURS | {"server": str(server.address)} | PATIENT
        first, second = (run(model, ours, "stateful") for _ in range(2))
    assert_same(first, plain)
    assert_same(second, plain)
    assert hits(first) == [0] * 3
    assert hits(second) in ([1280] * 3, [1152] * 3)


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


ON_CPU = """
def register():
    from kvtier.bench.compare.peers.offloading_cpu import TieringOnCPU
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    OffloadingSpecFactory._registry["TieringOffloadingSpec"] = lambda: TieringOnCPU
"""


class Tiered(Launched):
    """``kvtier launch --tier -- vllm serve MODEL``: the command of the page. vLLM's worker for its
    ``TieringOffloadingSpec`` refuses CPUs, so a plug-in of vLLM's gives that name to the bench's
    subclass, in which nothing but the worker is another. vLLM's pool has room for two documents,
    the server for four."""

    def __init__(self, folder, model):
        site = folder / "site"
        told = site / "tiering_on_cpu-1.dist-info"
        told.mkdir(parents=True)
        (site / "tiering_on_cpu.py").write_text(ON_CPU)
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: tiering-on-cpu\nVersion: 1\n")
        (told / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ntiering_on_cpu = tiering_on_cpu:register\n"
        )
        env = {"PYTHONPATH": f"{site}:{ROOT}", "KVTIER_RAM_BYTES": "4MiB"}
        env |= {f"KVTIER_{key.upper()}": str(value) for key, value in PATIENT.items()}
        args = shlex.split(f"{ENGINE} --max-model-len 736 --num-gpu-blocks-override 24")
        super().__init__("true", model, args, QUIET | env, folder / "engine.log", "--tier")

    def chunks(self, outcome):
        """As an engine says that has just made a step."""
        self.answer([1, 2, 3])
        return self.metric(f"{COUNTER}_total", outcome=outcome)

    def server(self):
        """The process that listens where launch's entry says."""
        (path,) = set(re.findall(r"at the kvtier server unix://(\S+)", self.log.read_text()))
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(path)
            told = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return struct.unpack("3i", told)[0]


@pytest.mark.usefixtures("nothing_set")
def test_launchs_tier_serves_vllm_and_a_killed_server_costs_hits_alone(tiny, tmp_path):
    engine = Tiered(tmp_path, str(tiny))
    documents = [document(seed) for seed in range(3)]
    with engine:
        cold = []
        for number, prompt in enumerate(documents, 1):
            cold.append(engine.answer(prompt))
            wait_for(lambda n=number: engine.chunks("stored") == n * HIT / 256, "it is stored")
        warm = engine.answer(documents[0])
        loaded = engine.chunks("loaded")
        os.kill(engine.server(), signal.SIGKILL)
        after = [engine.answer(prompt) for prompt in (*documents[1:], documents[0])]

        def is_used_again():
            again = [engine.answer(prompt)[0] for prompt in documents]
            assert again == [tokens for tokens, _ in cold]
            return engine.chunks("loaded") > loaded

        wait_for(is_used_again, "launch has started another server, and the engine hits it")
    assert [hit for _, hit in cold] == [0, 0, 0]
    assert (warm, loaded) == ((cold[0][0], HIT), HIT / 256)
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in (*cold[1:], cold[0])]
    assert after[0][1] == 0, "it was the server's alone"
