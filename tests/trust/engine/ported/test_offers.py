"""What vLLM makes of an offered hit: it takes it whole, in part, or not at all. Leases, jobs and
counts follow what it has allocated."""

from contextlib import contextmanager

import pytest

from tests.trust.engine.cells import BLOCK, CHUNK, words
from tests.trust.engine.ported.prompts import MODES, PROMPT

pytestmark = pytest.mark.vllm
STEM = words(3 * CHUNK)


def connector(engine):
    return engine.scheduler.connector


@contextmanager
def counted(engine):
    """What the store is told of prompts: where their loaded tokens came from."""
    told, store = list[dict[str, int]](), engine.half.store
    with pytest.MonkeyPatch.context() as patch:
        own = store.served

        def served(one):
            told.append(dict(one.hits))
            own(one)

        patch.setattr(store, "served", served)
        yield told


def evict(engine, tables, group):
    """vLLM's own cache loses what it has of a group."""
    engine.scheduler.kv_cache_manager.block_pool.evict_blocks({*tables[group]} - {0})


def answered(engine, tokens):
    """Answer a prompt. Returns the blocks that it had of each group while it ran."""
    name, tables = engine.ask(tokens), [set[int](), set[int](), set[int]()]

    def ended():
        if name in engine.scheduler.requests:
            for had, table in zip(
                tables, engine.scheduler.kv_cache_manager.get_block_ids(name), strict=False
            ):
                had.update(table)
        return not engine.scheduler.has_requests()

    engine.until(ended)
    engine.idle()
    return [[*had] for had in tables]


@MODES
@pytest.mark.parametrize("lost", [1, 2], ids=["window", "state"])
def test_a_hit_begins_where_all_groups_end_in_vllms_own_cache(make, mode, lost):
    """vLLM has all full attention of the prompt and lacks a window or the state. If it told where
    its full attention ends, nothing would be left to offer, and it would compute the prompt."""
    engine = make(groups=("full", "window 40", "state"), blocks=150, **mode)
    assert not connector(engine).supports_divergent_local_hybrid_hits
    evict(engine, answered(engine, PROMPT), lost)
    assert engine.loaded(engine.answer(PROMPT, 3)) == [5 * CHUNK]


@pytest.mark.parametrize("groups", [("full", "replayed 40"), ("full", "replayed 24/8", "ring 8/8")])
def test_what_a_load_does_not_bring_is_computed_again(make, groups):
    """vLLM rewinds a hit by a replayed window that no load has brought."""
    engine = make(groups=groups, blocks=150, v2=True)
    assert connector(engine).get_loaded_kv_cache_group_ids(None) == (0,)
    engine.keep(PROMPT)
    assert engine.loaded(engine.answer(PROMPT, 3)) == [5 * CHUNK]
    assert engine.counts["replays"] == 1


@MODES
def test_an_offer_that_vllm_cancels_leaves_nothing_behind(make, mode):
    """A hit is no longer than the window that would be replayed, so vLLM computes all."""
    engine = make(groups=("full", f"replayed {2 * CHUNK + 6}"), blocks=150, **mode | {"v2": True})
    engine.keep(PROMPT[: 2 * CHUNK + 1])
    with counted(engine) as told:
        name = engine.ask(PROMPT[: 2 * CHUNK + 1], 3)
        engine.until(lambda: bool(engine.scheduler.running))
        assert engine.loaded(name) == [] and not any(engine.pins(name))
        assert engine.half.sources(engine.asked[name]) == {} and not engine.half._under_way
        engine.idle()
    assert told == [{}] and not engine.counts["tokens from ram"]


@MODES
def test_of_an_offer_that_vllm_rounds_is_loaded_what_was_allocated(make, mode):
    """kvtier may end a hit with any block of eight tokens, and vLLM has longer ones beside them."""
    engine = make(groups=("full 0/8", "replayed 40"), blocks=150, **mode | {"v2": True})
    prompt = PROMPT[: 5 * CHUNK]
    engine.keep(prompt)
    with counted(engine) as told:
        name = engine.answer(prompt, 3)
    taken = 5 * CHUNK - BLOCK
    assert engine.loaded(name) == [taken]
    (job,) = engine.loads[name]
    assert [len(move.blocks) for move in job.moves] == [taken // 8]
    assert told == [{"ram": taken}] and engine.counts["tokens from ram"] == taken


@MODES
@pytest.mark.parametrize("other", ["window 40", "latent 9/4"])
def test_where_prompts_branch_off_the_third_finds_an_end(make, mode, other):
    """Within a prompt few ends are kept. The second one finds the stem and no end of it, and
    leaves one."""
    engine = make(groups=("full", other), blocks=150, **mode)
    asked = [[*STEM, *words(100, number)] for number in (7, 8, 9)]
    found = []
    for tokens in asked:
        found.append(engine.loaded(engine.answer(tokens)))
        engine.crowd_out()
    assert found == [[], [], [len(STEM)]]
