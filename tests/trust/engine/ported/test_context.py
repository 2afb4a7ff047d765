"""Context parallelism. After the name of each test stands what vLLM calls the case."""

import pytest

from tests.trust.engine.cells import BLOCK, words
from tests.trust.engine.ported.prompts import MODES
from tests.trust.engine.simulated import ours

pytestmark = pytest.mark.vllm

DIVIDED = 2 * BLOCK
"""Tokens of a block that two ranks divide."""
LONG = {"chunk_tokens": 2 * DIVIDED}


@MODES
def test_a_hit_ends_with_a_block_of_all_ranks_tokens(make, mode):
    """A prompt's last token is computed, so the hit of one that is whole chunks ends inside the
    last of them."""
    engine = make(tensor=2, divide=2, turn=4, config=LONG, **mode)
    prompt = words(4 * DIVIDED + 1)
    engine.keep(prompt)
    for tokens in (4 * DIVIDED, 4 * DIVIDED + 1):
        name = engine.answer(prompt[:tokens])
        loaded = (tokens - 1) // DIVIDED * DIVIDED
        assert engine.loaded(name) == [loaded]
        (move,) = engine.loads[name][0].moves
        assert len(move.blocks) == loaded // DIVIDED
        engine.crowd_out()


def test_a_worker_tells_how_it_divides_its_blocks(make):
    """It is part of every key. vLLM settles the turn in workers alone."""
    divided = make(tensor=2, divide=2, turn=8)
    for rank in divided.ranks:
        assert ours(rank.connector).get_handshake_metadata().description["interleave"] == 8
    (whole,) = make().ranks
    assert "interleave" not in ours(whole.connector).get_handshake_metadata().description


def test_one_rank_that_cannot_save_its_share_keeps_the_chunk_from_all(make):
    engine = make(tensor=2, divide=2, config=LONG)
    prompt = words(2 * DIVIDED + 1)
    with engine.broken_saves(1):
        engine.keep(prompt)
    assert engine.loaded(engine.answer(prompt)) == []
    engine.crowd_out()
    assert engine.loaded(engine.answer(prompt)) == [2 * DIVIDED]


@pytest.mark.parametrize("v2", [True], ids=["V2"])
def test_every_rank_that_shares_a_prompt_loads_what_one_has_saved(make):
    """Prefill context parallelism, which V2 alone has. Where one of them cannot load, the request
    is computed."""
    engine = make(prefill=2)
    prompt = words(3 * DIVIDED + 1)
    engine.keep(prompt)
    assert engine.loaded(engine.answer(prompt)) == [3 * DIVIDED]
    engine.crowd_out()
    engine.broken = lambda rank, blocks: rank is engine.ranks[1]
    assert engine.loaded(engine.answer(prompt)) == [3 * DIVIDED] and engine.counts["faults"]
