"""Documents from other prompts on two ranks of a real vLLM, whose forward pass is one of both: each
waits for the other in it. They begin it together, or none does.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.child_process import wait_for
from tests.integration.spans_server import BLOCK, Served, gap
from tests.integration.test_spans import EXACT, asking, model, plain, prompt, spans, warm

__all__ = ["model", "plain"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ORDER = [3, 1, 0, 2]
FIRST = 5


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory, faults):
    words = ["--tensor-parallel-size", "2"]
    words += ["--worker-extension-cls", "tests.integration.spans_faults.Faults"]
    settings = {"TEST_FAULTS": str(faults), "KVTIER_SPANS": "on", "OMP_NUM_THREADS": "1"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    server = Served(model, tmp_path_factory.mktemp("ranks"), *words, **settings)
    with server:
        yield server


def left(faults, what):
    return {file.name for file in faults.glob(f"{what}-*")}


def test_a_rank_that_copies_late_is_waited_for_before_the_pass(ranks, plain, faults):
    warm(ranks, 50, ORDER)
    made = prompt(50, ORDER)
    for file in faults.iterdir():
        file.unlink()
    (faults / "slow").touch()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ranks.ask, made.tokens, **asking(made, FIRST))
        wait_for(lambda: left(faults, "copied") == {"copied-0"}, "one rank copied")
        other = prompt(51, ORDER)
        exact = ranks.ask(other.tokens)
        assert gap(exact, plain.full(other.tokens)) < EXACT
        assert not left(faults, "began")
        assert not asked.done()
        (faults / "slow").unlink()
        answer = asked.result(60)
    assert left(faults, "began") == {"began-0", "began-1"}
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert spans(answer)["reused"] == end - FIRST * len(made.ranges[2:])
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, FIRST)) < EXACT


@pytest.mark.parametrize("first", [0, FIRST])
def test_when_one_rank_cannot_copy_the_answer_is_exact(ranks, plain, faults, first):
    seed = 70 + first
    warm(ranks, seed, ORDER)
    made = prompt(seed, ORDER)
    for file in faults.iterdir():
        file.unlink()
    (faults / "torn").touch()
    answer = ranks.ask(made.tokens, **asking(made, first))
    (faults / "torn").unlink()
    assert spans(answer) == {"reused": 0, "declined": "failed", "missing": []}
    assert gap(answer, plain.full(made.tokens)) < EXACT
    assert not left(faults, "began")
    ranks.forget()
