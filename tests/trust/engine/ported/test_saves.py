"""What is saved, when it is found, and what is not. After the name of each test stands what vLLM
calls the case."""

import pytest

from tests.trust.engine.cells import BLOCK, CHUNK, words
from tests.trust.engine.ported.prompts import MODES, PROMPT

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "mode",
    [{}, {"async_scheduling": True}, {"drafts": 3}, {"async_scheduling": True, "drafts": 3}],
    ids=["one batch", "async", "drafts", "async, drafts"],
)
def test_a_chunk_is_saved_when_its_last_token_is_computed(make, mode):
    """test_final_sampled_token_does_not_complete_an_offloaded_block,
    test_cached_request_with_spec_decode_does_not_save_scheduled_drafts,
    test_cached_request_without_spec_decode_keeps_current_step_save_overlap,
    test_store_jobs_wait_for_missing_offload_key: the KV of the last sampled token is never
    computed, and that of a draft may be refused. A draft that became the last token was computed.
    Async steps whose tokens are not known when they are planned are saved by a later one, if there
    is one."""
    engine = make(**mode)
    for first, (prompt, answer) in enumerate([(31, 1), (31, 2), (62, 2), (62, 3), (40, 70)]):
        talk = engine.said(engine.answer(words(prompt, first), answer))
        engine.crowd_out()
        whole, rest = divmod(prompt + answer - 1, CHUNK)
        found = sum(engine.loaded(engine.answer([*talk, 7, 8, 9])))
        lost = CHUNK if mode and rest < 2 else 0
        most = whole * CHUNK + (CHUNK if "drafts" in mode and rest == CHUNK - 1 else 0)
        assert whole * CHUNK - lost <= found <= most, f"{prompt} and {answer} tokens"
        engine.crowd_out()


@MODES
def test_answers_are_not_saved_where_only_prompts_shall_be(make, mode):
    """test_offload_prompt_only."""
    engine = make(config={"save_decode": False}, **mode)
    talk = engine.said(engine.answer(words(2 * CHUNK + 5), 3 * CHUNK))
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])) == [2 * CHUNK]


@pytest.mark.parametrize(
    "mode",
    [{}, {"async_scheduling": True}, {"tensor": 2}, {"pipeline": 2}],
    ids=["one batch", "async", "tensor", "pipeline"],
)
def test_blocks_that_were_saved_belong_to_another_request_at_once(make, mode):
    """test_fence_at_update_state_after_alloc, test_fence_at_build_store_jobs,
    test_request_finished_with_pending_stores_populates_fence,
    test_multiple_in_flight_stores_all_flushed_by_fence,
    test_aligned_boundary_store_flushes_before_block_reuse."""
    engine = make(blocks=13, **mode)
    prompts = [words(5 * CHUNK, first) for first in range(4)]
    for _ in range(2):
        names = [engine.ask(prompt, 2) for prompt in prompts]
        engine.idle()
        assert all(engine.is_answered(name) for name in names)
    assert [engine.loaded(name) for name in names] == [[5 * CHUNK - BLOCK]] * 4


@MODES
def test_the_last_save_of_a_request_is_confirmed_when_the_request_is_over(make, mode):
    """test_on_request_finished_not_deferred_until_store_completion,
    test_on_request_finished_fires_after_final_block_store, test_complete_store_called_per_job."""
    engine = make(**mode)
    name = engine.answer(words(3 * CHUNK), 1)
    assert engine.saves[name] and not engine.half._pending
    engine.crowd_out()
    assert engine.loaded(engine.answer([*words(3 * CHUNK), 7])) == [3 * CHUNK]


@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_chunk_is_found_when_every_rank_has_saved_it(make, ranks, bad):
    """test_complete_store_waits_for_all_worker_acks."""
    engine = make(**ranks)
    with engine.broken_saves(bad):
        engine.keep(PROMPT)
    assert engine.loaded(engine.answer(PROMPT)) == []
    engine.crowd_out()
    assert engine.loaded(engine.answer(PROMPT)) == [5 * CHUNK]


@MODES
def test_a_save_that_failed_is_not_made_from_blocks_that_a_window_has_left(make, mode):
    """test_stale_sliding_window_block_after_prepare_store_failure."""
    engine = make(groups=("window 40",), blocks=14, **mode)
    with engine.broken_saves(0):
        name = engine.ask(words(2 * CHUNK + 5), 200)
        engine.until(lambda: bool(engine.saves[name]))
    engine.idle()
    talk = engine.said(name)
    engine.crowd_out()
    assert engine.loaded(engine.answer(talk[: CHUNK + 1])) == []
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])), "what came later was saved"


@MODES
def test_what_an_aborted_prompt_had_computed_is_saved(make, mode):
    """test_chunked_prefill_uses_final_swa_store_horizon (aborted),
    test_multichunk_store_no_interior_holes."""
    engine = make(**mode)
    prompt = words(300)
    name = engine.ask(prompt)
    engine.until(lambda: engine.asked[name].num_computed_tokens >= 4 * CHUNK)
    computed = engine.asked[name].num_computed_tokens
    engine.abort(name)
    engine.idle()
    engine.crowd_out()
    assert engine.loaded(engine.answer(prompt)) == [computed // CHUNK * CHUNK]


def test_an_engine_that_only_loads_saves_nothing(make):
    """The other half of test_disabled_lookup_reports_no_hit_without_querying_client."""
    engine = make(role="kv_consumer")
    assert not engine.saves[engine.answer(PROMPT)]
    assert engine.half.store.stats()["saved"] == 0


@MODES
def test_a_prompt_for_which_there_is_no_room(make, mode):
    """test_store_sending_thread_skips_request_during_cpu_pressure,
    test_scheduler_reports_allocation_failure: what does not fit is not saved, and the engine goes
    on."""
    engine = make(config={"ram_bytes": 4 * 1024}, **mode)
    names = [engine.ask(words(10 * CHUNK + 1, first), 3) for first in range(2)]
    engine.idle()
    assert all(engine.is_answered(name) for name in names)
    assert engine.half.store.sharing.occupied <= 4
    engine.crowd_out()
    engine.answer(words(10 * CHUNK + 1), 3)


@MODES
def test_a_reset_under_a_load(make, mode):
    """test_reset_cache: the load that is on its way ends well, and nothing else is found."""
    engine = make(slow_copies=True, **mode)
    other = words(2 * CHUNK + 1, 1)
    engine.answer(other)
    engine.keep(PROMPT)
    name = engine.ask(PROMPT, 3)
    engine.until(lambda: engine.is_loading(name))
    engine.reset(connector=True)
    assert set(engine.half.store.every_key()) == set()
    engine.idle()
    assert engine.is_answered(name) and engine.loaded(name) == [5 * CHUNK]
    assert engine.loaded(engine.answer(other)) == []


def test_a_reset_under_a_save(make):
    """test_reset_cache_finalizes_finished_request_with_pending_store: what ranks were saving is
    not found when they have saved it."""
    engine = make(async_scheduling=True)
    name = engine.ask(words(2 * CHUNK))
    engine.until(lambda: bool(engine.saves[name]))
    assert engine.half._pending, "it is not confirmed"
    engine.reset(connector=True)
    engine.idle()
    assert engine.is_answered(name)
    assert set(engine.half.store.every_key()) == set()
