"""Loads that fail. After the name of each test stands what vLLM calls the case."""

import pytest

from tests.trust.engine.cells import CHUNK, words
from tests.trust.engine.ported.prompts import MODES, PROMPT

pytestmark = pytest.mark.vllm
GROUPS = pytest.mark.parametrize(
    "groups",
    [("full",), ("full", "window 40"), ("full", "state")],
    ids=["one group", "windows", "states"],
)


@MODES
@GROUPS
def test_one_of_three_loads_fails(make, mode, groups):
    """test_async_load_failure, test_hybrid_async_load_failure_zeroes_computed_tokens: the others
    keep what they have loaded. It is computed, and is not offered the same again."""
    engine = make(groups=groups, blocks=150, **mode)
    prompts = [words(5 * CHUNK + 1, first) for first in (1, 2, 3)]
    for prompt in prompts:
        engine.answer(prompt)
    engine.crowd_out()
    names = [engine.ask(prompt, 3) for prompt in prompts]
    bad = names[1]
    engine.broken = lambda rank, blocks: bool(engine.blocks(bad) & set(blocks))
    engine.idle()
    assert engine.counts["faults"] == 1
    assert [engine.loaded(name) for name in names] == [[5 * CHUNK]] * 3
    assert all(engine.is_answered(name) for name in names)
    engine.broken = lambda rank, blocks: False
    engine.crowd_out()
    assert engine.loaded(engine.answer(prompts[1])) == [5 * CHUNK], "it was saved anew"


@MODES
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_load_fails_half_way(make, mode, bad):
    """test_async_progressive_load_failure, test_async_recompute_blocks_not_cached_when_invalid,
    test_invalid_blocks_evicted_prevents_cache_pollution: no block of it is in vLLM's own cache."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    copied = []

    def fails(rank, blocks):
        copied.append(blocks)
        return len(copied) == bad + 1

    engine.broken = fails
    first = engine.ask(PROMPT, 3)
    engine.until(lambda: bool(engine.counts["faults"]))
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert not any(pool.blocks[block].block_hash for block in engine.blocks(first))
    second = engine.ask([*PROMPT, 7], 3)
    engine.idle()
    assert engine.is_answered(first) and engine.is_answered(second)
    assert engine.loaded(first) == [5 * CHUNK], "nothing of it was loaded again"


@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_a_load_fails_on_one_of_two_ranks(make, ranks):
    """test_hybrid_sync_failure_in_state_group_also_replays_from_zero: what one rank lacks, all
    compute."""
    engine = make(**ranks)
    engine.keep(PROMPT)
    engine.broken = lambda rank, blocks: rank is engine.ranks[1]
    name = engine.answer(PROMPT, 3)
    assert engine.counts["faults"] == 1 and engine.loaded(name) == [5 * CHUNK]


@MODES
def test_what_could_not_be_loaded_is_dropped(make, mode):
    """test_sync_fail_invalid_blocks_evicted: the same bad bytes are offered to nobody."""
    engine = make(**mode)
    engine.keep(PROMPT)
    engine.broken = lambda rank, blocks: True
    name = engine.ask(PROMPT)
    engine.until(lambda: bool(engine.counts["faults"]))
    engine.abort(name)
    engine.idle()
    assert engine.loaded(engine.answer(PROMPT)) == []


@MODES
def test_the_load_of_an_aborted_request_fails(make, mode):
    """test_async_fail_blocks_not_freed_before_transfer_complete."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    name = engine.ask(PROMPT)
    engine.until(lambda: engine.is_loading(name))
    engine.step()
    blocks = engine.blocks(name)
    engine.abort(name)
    assert engine.blocks(name) == blocks and blocks
    engine.broken = lambda rank, blocks: True
    engine.idle()
    assert engine.counts["faults"] == 1 and name not in engine.scheduler.requests


@MODES
def test_others_that_wait_for_a_load_that_fails(make, mode):
    """test_sync_load_failure_with_shared_blocks."""
    engine = make(slow_copies=True, **mode)
    engine.keep(PROMPT)
    engine.broken = lambda rank, blocks: not engine.counts["faults"]
    names = [engine.ask([*PROMPT, *words(end, 4)], 3) for end in (0, 5, 40)]
    engine.idle()
    assert all(engine.is_answered(name) for name in names)
    assert engine.counts["faults"] == 1
