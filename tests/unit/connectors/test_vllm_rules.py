"""vLLM's own Scheduler: what kvtier saves of a request, and when."""

from collections import Counter

import pytest

from tests.unit.real_scheduler import BLOCK, CHUNK

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 3 * CHUNK + 5))


def saves(output):
    return [job.blocks for job in output.kv_connector_metadata.saves]


def test_answers_are_kept_once_their_tokens_are_computed(core):
    """The newest token's KV is in no block yet: a chunk that it ends is saved a step later."""
    core.add(core.request("one", PROMPT[: 2 * CHUNK - 2], max_tokens=5))
    told = [saves(core.step()) for _ in range(5)]
    assert [bool(one) for one in told] == [True, False, True, False, False]
    assert core.hit(core.request("two", [*PROMPT[: 2 * CHUNK - 2], 7, 7, 7])) == 2 * CHUNK
    assert core.hit(core.request("three", [*PROMPT[: 2 * CHUNK - 2], 7, 8, 7])) == CHUNK


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_preempted_request_is_saved_from_its_new_blocks(core, v2):
    """Also where the runner is told of a resumed request as of a new one."""
    core.scheduler.use_v2_model_runner = v2
    half = core.connector._scheduler
    core.scheduler.max_num_scheduled_tokens = CHUNK + BLOCK
    core.add(core.request("one", PROMPT[:], max_tokens=9))
    core.step()
    (running,) = core.scheduler.running
    half._prompts["one"].progress.states = [(0, 1, 4 * CHUNK)]
    core.scheduler.running.remove(running)
    core.scheduler._preempt_request(running, 0.0)
    assert core.scheduler.reset_prefix_cache()
    core.scheduler.max_num_scheduled_tokens = 1024
    half.clear()
    hold = core.scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    output = core.step()
    told = output.scheduled_cached_reqs
    assert hold and told.resumed_req_ids == (set() if v2 else {"one"})
    (blocks,) = output.scheduled_new_reqs[0].block_ids if v2 else told.new_block_ids[0]
    assert saves(output) == [blocks[: 3 * CHUNK // BLOCK]]
    assert not half._prompts["one"].progress.states, "states of the blocks that it had"


@pytest.mark.parametrize("done", [2, 1])
def test_a_key_enters_the_store_when_every_rank_wrote_its_part_and_is_offered_again_if_not(
    core, done
):
    from kvtier.connectors.vllm.metadata import StepReport

    half = core.connector._scheduler
    half._jobs._parts = ((0, True), (4096, True))
    core.add(core.request("one", PROMPT[:], max_tokens=9))
    (job,) = core.scheduler.schedule().kv_connector_metadata.saves
    half.report(StepReport(done=Counter({job.number: 1})))
    assert core.hit(core.request("two", PROMPT[:])) == 0
    last = StepReport()
    (last.done if done == 2 else last.failed)[job.number] += 1
    half.report(last)
    assert core.hit(core.request("three", PROMPT[:])) == (3 * CHUNK if done == 2 else 0)
    assert half._prompts["one"].progress.saved == (3 if done == 2 else 0)
