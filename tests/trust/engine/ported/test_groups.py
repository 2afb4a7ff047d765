"""Models with several cache groups. After the name of each test stands what vLLM calls the
case."""

import pytest

from tests.trust.engine.cells import BLOCK, CHUNK, LONGEST, words
from tests.trust.engine.ported.prompts import MODES, PROMPT

pytestmark = pytest.mark.vllm


def blocks(engine, name):
    """How many blocks of each group were loaded for a request."""
    (job,) = engine.loads[name]
    return [len(move.blocks) for move in job.moves]


@MODES
@pytest.mark.parametrize(
    ("groups", "loaded"),
    [
        (("full", "window 40"), [10, 3]),
        (("full", "local 64"), [10, 2]),
        (("full", "state"), [10, 1]),
        (("full", "window 40", "state"), [10, 3, 1]),
        (("window 40",), [3]),
        (("full", "full"), [10, 10]),
    ],
)
def test_of_each_group_is_loaded_what_a_hit_needs(make, mode, groups, loaded):
    """test_two_groups_full_and_sliding_window, test_recv_skips_swa_blocks_before_window,
    test_coordinator_hybrid_full_plus_swa_all_hit,
    test_chunked_local_attention_reports_its_chunk_window,
    test_sliding_window_demand_is_store_reachable,
    test_request_level_supply_covers_consumer_demand,
    test_recurrent_group_unhashed_block_does_not_truncate_load_boundary: what the lookup asks for
    was saved, and the rest is not touched."""
    engine = make(groups=groups, blocks=120, **mode)
    engine.keep(PROMPT)
    name = engine.answer(PROMPT)
    assert engine.loaded(name) == [5 * CHUNK] and blocks(engine, name) == loaded


@MODES
def test_a_longer_prompt_loads_what_follows_vllms_own(make, mode):
    """test_two_groups_full_and_sliding_window, the second half: a part of the window is there."""
    engine = make(groups=("full", "window 100"), blocks=120, **mode)
    engine.keep(PROMPT)
    engine.answer(PROMPT[: 4 * CHUNK + 1])
    name = engine.answer(PROMPT)
    assert engine.loaded(name) == [CHUNK] and blocks(engine, name) == [2, 2]


def test_a_hole_in_one_group_ends_the_hit_of_all(make):
    """test_coordinator_hybrid_hole_in_full_clips_both, test_partial_lookup_requires_every_cache_
    group."""
    engine = make(groups=("full", "full"), blocks=120)
    name = engine.answer(PROMPT)
    engine.crowd_out()
    engine.drop(name, 1, 3)
    assert engine.loaded(engine.answer(PROMPT)) == [3 * CHUNK]


@MODES
def test_a_window_lacks_what_lies_before_it(make, mode):
    """test_e2e_swa_plus_full_save_then_lookup_hits: the hit is whole. A prompt whose hit ends
    where the window is not there gets a shorter one or none, and does not ask for ever."""
    engine = make(groups=("full", "window 40"), blocks=120, **mode)
    name = engine.answer(words(CHUNK + 1), 4 * CHUNK + 5)
    talk = engine.said(name)
    for piece in (0, 1):
        engine.drop(name, 1, piece)
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])) == [5 * CHUNK]
    engine.crowd_out()
    assert engine.loaded(engine.answer(talk[: 3 * CHUNK])) == []


@MODES
def test_a_window_lacks_what_it_needs(make, mode):
    """test_swa_load_does_not_wait_for_unusable_pending_suffix: the hit ends before."""
    engine = make(groups=("full", "window 40"), blocks=120, **mode)
    name = engine.answer(words(CHUNK + 1), 4 * CHUNK + 5)
    talk = engine.said(name)
    engine.drop(name, 1, 4)
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])) in ([], [4 * CHUNK])
    engine.crowd_out()
    assert engine.loaded(engine.answer(talk[: 4 * CHUNK + 1])) == [4 * CHUNK]


@MODES
def test_a_state_is_lost(make, mode):
    """TestMambaHybridOffloadServing, test_normal_store_excludes_align_mode_mamba_sources."""
    engine = make(groups=("full", "state"), blocks=120, **mode)
    name = engine.answer(PROMPT)
    engine.drop(name, 1, 4)
    engine.crowd_out()
    found = engine.loaded(engine.answer(PROMPT))
    assert not found or found[0] < 5 * CHUNK


@MODES
def test_vllm_has_more_of_one_group_than_of_the_other(make, mode):
    """test_hybrid_diverged_prefix_hit: its blocks of full attention are gone from the middle on,
    and a later state is still there."""
    engine = make(groups=("full", "state"), blocks=120, **mode)
    name = engine.ask(PROMPT)
    tables: list[list[int]] = []

    def ended():
        if name in engine.scheduler.requests:
            found = engine.scheduler.kv_cache_manager.get_block_ids(name)
            tables[:] = [list(table) for table in found if table]
        return not engine.scheduler.has_requests()

    engine.until(ended)
    engine.idle()
    had = 3 * CHUNK
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({*tables[0][had // BLOCK : 5 * CHUNK // BLOCK]} - {0})
    loads = engine.loaded(engine.answer(PROMPT, 3))
    assert loads and sum(loads) <= 5 * CHUNK


@MODES
def test_a_window_beside_drafts_is_served_as_without(make, mode):
    """TestSharedGroupMTPOffload, test_no_annotation_marks_no_groups."""
    found = []
    for drafts in (0, 3):
        engine = make(groups=("full", "window 40"), blocks=120, drafts=drafts, **mode)
        engine.answer(PROMPT, 5)
        engine.crowd_out()
        found.append(engine.loaded(engine.answer(PROMPT, 5)))
    assert found == [[5 * CHUNK]] * 2


@pytest.mark.parametrize(
    "mode",
    [{}, {"async_scheduling": True}, {"v2": True, "async_scheduling": True, "pipeline": 2}],
    ids=["one batch", "async", "three in flight"],
)
def test_a_granted_load_counts_on_the_blocks_that_vllm_admits_a_request_with(make, mode):
    """test_single_type_kv_cache_manager's admission cap: with every step in flight a window or an
    attention chunk keeps blocks longer."""
    engine = make(groups=("full", "window 40", "local 64"), blocks=150, **mode)
    half, managers = engine.half, engine.scheduler.kv_cache_manager.coordinator
    groups = zip(half._geometry.groups, managers.single_type_managers, strict=True)
    for group, manager in groups:
        most = manager.max_admission_blocks_per_request or LONGEST // BLOCK
        assert group.most_blocks(LONGEST, half._duty.in_flight) in (most, most + 1)
