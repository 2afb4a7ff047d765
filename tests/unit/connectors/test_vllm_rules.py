"""vLLM's own Scheduler: what kvtier saves of a request, and when."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.unit.real_scheduler import BLOCK, CHUNK

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 3 * CHUNK + 5))


def saves(output):
    return [job.blocks for job in output.kv_connector_metadata.saves]


def forget_locally(core):
    """vLLM's own cache no longer has anything, so that the next hit is kvtier's."""
    assert core.scheduler.reset_prefix_cache()


def test_whole_chunks_are_saved_by_the_step_that_computes_their_last_token(core):
    core.scheduler.max_num_scheduled_tokens = 2 * CHUNK - 1
    core.add(core.request("one", PROMPT[:]))
    one, two = core.step(), core.step()
    blocks = one.scheduled_new_reqs[0].block_ids[0] + two.scheduled_cached_reqs.new_block_ids[0][0]
    per_chunk = CHUNK // BLOCK
    assert saves(one) == [blocks[:per_chunk]]
    assert saves(two) == [blocks[per_chunk : 3 * per_chunk]]


def test_answers_are_kept_once_their_tokens_are_computed(core):
    """The newest token's KV is in no block yet: a chunk that it ends is saved a step later."""
    core.add(core.request("one", PROMPT[: 2 * CHUNK - 2], max_tokens=5))
    told = [saves(core.step()) for _ in range(5)]
    assert [bool(one) for one in told] == [True, False, True, False, False]
    assert core.hit(core.request("two", [*PROMPT[: 2 * CHUNK - 2], 7, 7, 7])) == 2 * CHUNK
    assert core.hit(core.request("three", [*PROMPT[: 2 * CHUNK - 2], 7, 8, 7])) == CHUNK


def test_answers_are_not_kept_where_the_configuration_says_so(core):
    core.connector._scheduler._duty = core.connector._scheduler._duty._replace(save_decode=False)
    core.add(core.request("one", PROMPT[: 2 * CHUNK - 2], max_tokens=5))
    core.run("one")
    assert core.hit(core.request("two", [*PROMPT[: 2 * CHUNK - 2], 7, 7, 7])) == CHUNK


def test_drafts_are_not_kept(core):
    """A step computes drafts beyond the tokens that are known: no key can hold them."""
    core.add(core.request("one", PROMPT[: 2 * CHUNK - 2], max_tokens=9))
    core.step()
    half, request = core.connector._scheduler, core.scheduler.requests["one"]
    cached = SimpleNamespace(
        req_ids=["one"],
        new_block_ids=[None],
        num_computed_tokens=[2 * CHUNK - 2],
        resumed_req_ids=set(),
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"one": 4},
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=4,
    )
    assert request.num_tokens == 2 * CHUNK - 1
    assert not half.step(output).saves


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
    forget_locally(core)
    core.scheduler.max_num_scheduled_tokens = 1024
    half.clear()
    hold = core.scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    output = core.step()
    told = output.scheduled_cached_reqs
    assert hold and told.resumed_req_ids == (set() if v2 else {"one"})
    (blocks,) = output.scheduled_new_reqs[0].block_ids if v2 else told.new_block_ids[0]
    assert saves(output) == [blocks[: 3 * CHUNK // BLOCK]]
    assert not half._prompts["one"].progress.states, "states of the blocks that it had"


def test_a_chunk_that_failed_to_load_is_forgotten_and_its_request_computes(core):
    core.add(core.request("one", PROMPT[:]))
    core.run("one")
    forget_locally(core)
    core.add(core.request("two", PROMPT[:], max_tokens=9))
    core.step(failed=True)
    assert core.hit(core.request("three", PROMPT[:])) == 0
    output = core.step()
    assert not output.kv_connector_metadata.loads
    assert output.num_scheduled_tokens == {"two": len(PROMPT)}
    assert saves(output), "what it computes is kept again"


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
