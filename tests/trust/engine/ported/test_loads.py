"""How a load begins, ends and is shared. After the name of each test stands what vLLM calls the
case."""

import pytest

from tests.trust.engine.cells import BLOCK, CHUNK, words
from tests.trust.engine.ported.prompts import MODES, PROMPT

pytestmark = pytest.mark.vllm


@MODES
def test_a_conversation_goes_on_from_what_was_saved(make, mode):
    """test_offloading_connector: chunks that an answer fills are saved too, and a prompt that
    differs in one token gets what stands before it."""
    engine = make(**mode)
    talk = engine.said(engine.answer(words(3 * CHUNK), 2 * CHUNK + 3))
    saved = (len(talk) - 1) // CHUNK * CHUNK
    assert saved == 5 * CHUNK
    engine.crowd_out()
    other = engine.answer([*talk[: saved - 1], talk[saved - 1] ^ 1, 7])
    assert engine.loaded(other) == [saved - CHUNK]
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])) == [saved]


@MODES
def test_a_load_begins_inside_a_chunk_where_vllms_own_blocks_end(make, mode):
    """test_offloading_connector (a hit in a middle block),
    test_partial_hash_hit_block_aligned_local_loads_partial_tail."""
    engine = make(**mode)
    engine.keep(PROMPT)
    had = 3 * BLOCK
    assert had % CHUNK
    assert engine.loaded(engine.answer(PROMPT[: had + 1])) == [CHUNK], "it has one whole chunk"
    assert engine.loaded(engine.answer(PROMPT)) == [5 * CHUNK - had]


def test_the_last_token_is_left_to_compute(make):
    """test_full_external_hit_keeps_kvpool_cached_tokens_block_aligned."""
    engine = make()
    engine.keep(PROMPT)
    assert engine.loaded(engine.answer(PROMPT[: 4 * CHUNK])) == [4 * CHUNK - BLOCK]


def test_what_vllm_has_by_itself_is_not_loaded(make):
    """test_full_external_hit_with_full_local_hit_skips_load,
    test_partial_hash_hit_no_remote_gain_skips_load."""
    engine = make()
    engine.answer(PROMPT)
    assert engine.loaded(engine.answer(PROMPT)) == []


def test_a_prompt_shorter_than_a_chunk_is_neither_saved_nor_loaded(make):
    """test_sub_block_prompt_not_looked_up_without_fine_grained."""
    engine = make()
    for _ in range(2):
        name = engine.answer(PROMPT[: CHUNK - 1])
        assert not engine.loads[name] and not engine.saves[name]
        engine.crowd_out()
    assert engine.half.store.stats()["saved"] == 0


@MODES
def test_the_same_prefix_is_loaded_once(make, mode):
    """test_concurrent_lookups_of_the_same_prefix."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    first = engine.ask(PROMPT)
    engine.until(lambda: engine.is_loading(first))
    others = [engine.ask(PROMPT), engine.ask([*PROMPT, 7])]
    engine.step()
    assert engine.is_loading(first), "the load goes on while the others ask"
    engine.idle()
    assert [engine.loaded(name) for name in (first, *others)] == [[5 * CHUNK], [], []]
    assert all(engine.is_answered(name) for name in (first, *others))


def test_a_load_ends_when_every_rank_has_copied(make):
    """test_complete_store_waits_for_all_worker_acks, for a load: its slots stay pinned for the
    slower rank."""
    engine = make(tensor=2, slow_copies=True)
    engine.keep(PROMPT)
    engine.worker(0)._clock = lambda: 0.0  # copies everything in one step
    name = engine.ask(PROMPT)
    engine.until(lambda: engine.is_loading(name))
    steps = 0
    while engine.worker(1)._copying:
        assert not engine.worker(0)._copying and engine.pins(name) == [1] * 5
        engine.step()
        steps += 1
    assert steps > 3
    engine.idle()
    assert engine.is_answered(name) and engine.loaded(name) == [5 * CHUNK]


@MODES
def test_an_aborted_request_keeps_its_blocks_until_its_load_has_ended(make, mode):
    """test_abort_loading_requests, test_abort_during_kv_transfer."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    name = engine.ask(PROMPT)
    engine.until(lambda: engine.is_loading(name))
    engine.step()
    blocks = engine.blocks(name)
    engine.abort(name)
    engine.step()
    assert engine.blocks(name) == blocks and len(blocks) == 5 * CHUNK // BLOCK
    assert engine.pins(name) == [1] * 5
    engine.idle()
    assert engine.pins(name) == [0] * 5
    assert name not in engine.scheduler.requests
    engine.crowd_out()
    assert engine.loaded(engine.answer(PROMPT)) == [5 * CHUNK]


@MODES
def test_an_aborted_request_that_was_never_scheduled_saves_nothing(make, mode):
    """test_abort_queued_request_does_not_build_store_job."""
    engine = make(**mode)
    engine.take_blocks()
    name = engine.ask(PROMPT)
    engine.step()
    assert name in engine.scheduler.requests and not engine.blocks(name)
    engine.abort(name)
    engine.give_back()
    engine.idle()
    assert not engine.saves[name] and not engine.half._prompts


def test_a_hit_waits_for_blocks_and_is_loaded_once(make):
    """test_cannot_recv: there is no block for the load."""
    engine = make()
    engine.answer(PROMPT)
    engine.take_blocks()
    name = engine.ask(PROMPT)
    for _ in range(3):
        engine.step()
    assert not engine.loads[name]
    engine.give_back()
    engine.idle()
    assert engine.is_answered(name) and engine.loaded(name) == [5 * CHUNK]


def test_a_load_that_has_ended_waits_for_blocks_and_is_kept(make):
    """test_cannot_schedule_after_recv: there is no block for the rest of the prompt."""
    engine = make(slow_copies=True)
    engine.keep(PROMPT)
    name = engine.ask(PROMPT)
    engine.until(lambda: engine.is_loading(name))
    engine.take_blocks()
    engine.until(lambda: not engine.half._pending)
    for _ in range(3):
        engine.step()
    assert not engine.asked[name].num_output_tokens
    engine.give_back()
    engine.idle()
    assert engine.is_answered(name) and engine.loaded(name) == [5 * CHUNK]


@MODES
def test_others_go_on_while_one_loads(make, mode):
    """test_interleaved_lifecycle."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    other = engine.ask(words(20, 1), 60)
    engine.until(lambda: engine.asked[other].num_output_tokens > 2)
    name, before, steps = engine.ask(PROMPT), engine.asked[other].num_output_tokens, 0
    engine.until(lambda: engine.is_loading(name))
    while engine.is_loading(name):
        engine.step()
        steps += 1
    assert steps > 3
    assert engine.asked[other].num_output_tokens >= before + steps - 1
    engine.idle()
    assert engine.is_answered(name) and engine.is_answered(other)


def test_a_request_that_reads_no_cache_loads_nothing_and_is_saved(make):
    """test_skip_reading_prefix_cache."""
    engine = make()
    name = engine.answer(PROMPT, skip_reading_prefix_cache=True)
    assert engine.saves[name]
    engine.take_blocks()
    name = engine.ask(PROMPT, skip_reading_prefix_cache=True)
    engine.step()
    assert engine.half._prompts[name].claim.lease is None, "nothing is claimed for it"
    engine.give_back()
    engine.idle()
    assert engine.is_answered(name) and engine.loaded(name) == []
    engine.crowd_out()
    assert engine.loaded(engine.answer(PROMPT)) == [5 * CHUNK]


def test_an_engine_that_only_saves_is_promised_nothing(make):
    """test_disabled_lookup_reports_no_hit_without_querying_client."""
    engine = make(role="kv_producer")
    name = engine.answer(PROMPT)
    engine.crowd_out()
    assert engine.saves[name] and engine.loaded(engine.answer(PROMPT)) == []


@MODES
def test_what_is_loaded_is_not_saved_again(make, mode):
    """test_pending_load_does_not_co_queue_save, test_from_request_tracker_load_overrides_
    caller_skip_save."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    name = engine.answer([*PROMPT, *words(CHUNK, 3)])
    assert engine.loaded(name) == [5 * CHUNK]
    assert sum(len(move.slots) for job in engine.saves[name] for move in job.moves) == 1
