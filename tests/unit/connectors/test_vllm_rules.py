"""vLLM's own Scheduler: what kvtier saves of a request, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.real_scheduler import BLOCK, CHUNK, Core

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 3 * CHUNK + 5))


def saves(output: Any) -> list[list[int]]:
    return [job.blocks for job in output.kv_connector_metadata.saves]


def forget_locally(core: Core) -> None:
    """vLLM's own cache no longer has anything, so that the next hit is kvtier's."""
    assert core.scheduler.reset_prefix_cache()


def test_whole_chunks_are_saved_by_the_step_that_computes_their_last_token(core: Core) -> None:
    core.scheduler.max_num_scheduled_tokens = 2 * CHUNK - 1
    core.add(core.request("one", PROMPT[:]))
    one, two = core.step(), core.step()
    blocks = one.scheduled_new_reqs[0].block_ids[0] + two.scheduled_cached_reqs.new_block_ids[0][0]
    per_chunk = CHUNK // BLOCK
    assert saves(one) == [blocks[:per_chunk]]
    assert saves(two) == [blocks[per_chunk : 3 * per_chunk]]


def test_of_a_hit_one_token_is_left_to_compute(core: Core) -> None:
    core.add(core.request("one", PROMPT[: 3 * CHUNK]))
    core.run("one")
    assert core.hit(core.request("same", PROMPT[: 3 * CHUNK])) == 3 * CHUNK - BLOCK
    assert core.hit(core.request("more", PROMPT[: 3 * CHUNK + 1])) == 3 * CHUNK
    assert core.hit(core.request("less", PROMPT[: 3 * CHUNK - 1])) == 2 * CHUNK


def test_of_a_chunk_that_vllm_has_half_of_only_the_rest_is_loaded(core: Core) -> None:
    core.add(core.request("one", PROMPT[:]))
    core.run("one")
    forget_locally(core)
    core.add(core.request("short", PROMPT[: CHUNK + BLOCK + 1]))
    (job,) = core.step().kv_connector_metadata.loads
    assert (job.moves[0].first, len(job.blocks)) == (0, CHUNK // BLOCK)
    core.run("short")
    core.add(core.request("long", PROMPT[:]))
    (job,) = core.step().kv_connector_metadata.loads
    assert (job.moves[0].first, job.request_id) == (1, "long")
    output = core.step()
    assert job.blocks == output.scheduled_new_reqs[0].block_ids[0][3:6]
    assert output.num_scheduled_tokens == {"long": len(PROMPT) - 3 * CHUNK}


def test_a_request_whose_prompt_has_to_be_computed_is_served_nothing(core: Core) -> None:
    core.add(core.request("one", PROMPT[:]))
    core.run("one")
    again = core.request("two", PROMPT[:])
    again.skip_reading_prefix_cache = True
    assert core.hit(again) == 0


def test_answers_are_kept_once_their_tokens_are_computed(core: Core) -> None:
    """The newest token's KV is in no block yet: a chunk that it ends is saved a step later."""
    core.add(core.request("one", PROMPT[: 2 * CHUNK - 2], max_tokens=5))
    told = [saves(core.step()) for _ in range(5)]
    assert [bool(one) for one in told] == [True, False, True, False, False]
    assert core.hit(core.request("two", [*PROMPT[: 2 * CHUNK - 2], 7, 7, 7])) == 2 * CHUNK
    assert core.hit(core.request("three", [*PROMPT[: 2 * CHUNK - 2], 7, 8, 7])) == CHUNK


def test_answers_are_not_kept_where_the_configuration_says_so(core: Core) -> None:
    core.connector._scheduler._duty = core.connector._scheduler._duty._replace(save_decode=False)
    core.add(core.request("one", PROMPT[: 2 * CHUNK - 2], max_tokens=5))
    core.run("one")
    assert core.hit(core.request("two", [*PROMPT[: 2 * CHUNK - 2], 7, 7, 7])) == CHUNK


def test_drafts_are_not_kept(core: Core) -> None:
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
def test_a_preempted_request_is_saved_from_its_new_blocks(core: Core, v2: bool) -> None:
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


def test_a_chunk_that_a_rank_could_not_save_is_offered_once_more(core: Core) -> None:
    from collections import Counter

    from kvtier.connectors.vllm.metadata import StepReport

    half = core.connector._scheduler
    core.add(core.request("one", PROMPT[:], max_tokens=9))
    first = core.scheduler.schedule().kv_connector_metadata
    half.report(StepReport(failed=Counter({job.number: 1 for job in first.saves})))
    assert core.hit(core.request("two", PROMPT[:])) == 0
    assert half._prompts["one"].progress.saved == 0


def test_a_key_enters_the_store_only_when_every_rank_wrote_its_part(core: Core) -> None:
    from collections import Counter

    from kvtier.connectors.vllm.metadata import StepReport

    half = core.connector._scheduler
    half._jobs._parts = ((0, True), (4096, True))
    core.add(core.request("one", PROMPT[:], max_tokens=9))
    (job,) = core.scheduler.schedule().kv_connector_metadata.saves
    half.report(StepReport(done=Counter({job.number: 1})))
    assert core.hit(core.request("two", PROMPT[:])) == 0
    half.report(StepReport(done=Counter({job.number: 1})))
    assert core.hit(core.request("three", PROMPT[:])) == 3 * CHUNK


def test_a_key_that_one_rank_could_not_write_never_enters_the_store(core: Core) -> None:
    from collections import Counter

    from kvtier.connectors.vllm.metadata import StepReport

    half = core.connector._scheduler
    half._jobs._parts = ((0, True), (4096, True))
    core.add(core.request("one", PROMPT[:], max_tokens=9))
    (job,) = core.scheduler.schedule().kv_connector_metadata.saves
    half.report(StepReport(done=Counter({job.number: 1}), failed=Counter({job.number: 1})))
    assert core.hit(core.request("two", PROMPT[:])) == 0


def test_a_chunk_that_failed_to_load_is_forgotten_and_its_request_computes(core: Core) -> None:
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


def test_twenty_equal_prompts_are_one_load(core: Core) -> None:
    core.add(core.request("one", PROMPT[:]))
    core.run("one")
    forget_locally(core)
    for number in range(20):
        core.add(core.request(f"same {number}", PROMPT[:]))
    outputs = [core.step() for _ in range(3)]
    assert [len(output.kv_connector_metadata.loads) for output in outputs] == [1, 0, 0]
    assert sum(outputs[1].num_scheduled_tokens.values()) == 20 * (len(PROMPT) - 3 * CHUNK), (
        "all go on with its blocks"
    )


def test_twenty_hits_come_to_their_end_with_blocks_for_two(core: Core) -> None:
    prompts = [[number, *PROMPT[1:]] for number in range(20)]
    for number, tokens in enumerate(prompts):
        core.add(core.request(f"one {number}", tokens))
        core.run(f"one {number}")
    forget_locally(core)
    pool = core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 2 * -(-(len(PROMPT) + 1) // BLOCK))
    for number, tokens in enumerate(prompts):
        core.add(core.request(f"two {number}", tokens))
    loads = 0
    for _ in range(200):
        if not core.scheduler.requests:
            break
        loads += len(core.step().kv_connector_metadata.loads)
    assert not core.scheduler.requests
    assert loads == 20
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(held)


def test_an_aborted_requests_blocks_are_free_when_its_load_has_ended_and_not_before(
    core: Core,
) -> None:
    from vllm.v1.request import RequestStatus

    core.add(core.request("one", PROMPT[:]))
    core.run("one")
    forget_locally(core)
    pool = core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    core.add(core.request("two", PROMPT[:]))
    core.begin()
    core.scheduler.finish_requests("two", RequestStatus.FINISHED_ABORTED)
    assert pool.get_num_free_blocks() < free
    assert core.connector._scheduler._pending, "its slots are not given back before"
    core.end()
    assert pool.get_num_free_blocks() == free
    assert not core.connector._scheduler._pending
