"""Hits that end within a block. The cases are geometries on which other connectors have served
wrong bytes: see the names of vLLM's own tests and issues after the names here."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.connectors.vllm.groups import Piece
from tests.trust.engine.cells import BLOCK, words

pytestmark = pytest.mark.vllm
UNIT = 4
STATES: dict[str, Any] = {
    "groups": ("full", "state"),
    "config": {"chunk_tokens": BLOCK},
    "blocks": 120,
}
HYBRID = STATES | {"match_unit": UNIT}
PROMPT = words(5 * BLOCK)


def forget(engine, group, end):
    """The store loses a group's piece of the part of :data:`PROMPT` that ends here."""
    half = engine.half
    geometry, chain = half._geometry, half._layout.chain()
    chain.extend(PROMPT)
    chunk, part = divmod(end, BLOCK)
    key = chain.within(chunk, PROMPT, UNIT)[part // UNIT - 1] if part else chain.keys[chunk - 1]
    piece = Piece(geometry.groups[group], chunk if part else chunk - 1)
    named = [*chain.keys[: piece.number], key]
    (known,) = {half.store.lookup([geometry.key(piece, named)]).known}
    assert known, "it was there"
    half.store.invalidate([geometry.key(piece, named)])


@pytest.mark.parametrize(
    ("tokens", "before", "now"),
    [(BLOCK + 11, BLOCK, BLOCK + 8), (2 * BLOCK, BLOCK, 2 * BLOCK - 4), (11, 0, 8), (4, 0, 0)],
)
def test_a_prompt_is_had_up_to_its_last_unit(make, tokens, before, now):
    """test_partial_tail_store_and_load: Qwen3.6's 896 of 900 tokens, with blocks of 784."""
    for cell, longest in ((STATES, before), (HYBRID, now)):
        engine = make(**cell)
        engine.keep(PROMPT[:tokens])
        assert sum(engine.loaded(engine.answer(PROMPT[:tokens], 20))) == longest


def test_a_conversation_goes_on_behind_its_last_units(make):
    """Each turn is longer than a block, and leaves a tail of its own."""
    engine = make(**HYBRID)
    talk, loads = PROMPT[: BLOCK + 11], list[int]()
    for turn in range(3):
        name = engine.answer(talk)
        loads.append(sum(engine.loaded(name)))
        talk = [*engine.said(name), *words(BLOCK, turn + 1)]
        engine.crowd_out()
    assert loads == [0, BLOCK + 8, 2 * BLOCK + 8]


def test_prompts_that_part_within_a_block_share_what_ends_before(make):
    engine = make(**HYBRID)
    engine.keep(PROMPT[: BLOCK + 9])
    near = [*PROMPT[: BLOCK + 8], *words(30, 7)]
    assert engine.loaded(engine.answer(near)) == [BLOCK + 8]
    engine.crowd_out()
    early = [*PROMPT[: BLOCK + 7], *words(30, 8)]
    assert engine.loaded(engine.answer(early)) == [BLOCK]


def test_a_longer_piece_of_one_group_says_nothing_of_the_others_ends(make):
    """vllm#50359, vllm#52272: of full attention there is what ends at 32 and 64, of states at 32
    and 48, and 48 was served. Here in quarters: a hit is 8 tokens long, neither 12 nor 16."""
    engine = make(**HYBRID)
    for tokens in (9, 13, 17):
        engine.keep(PROMPT[:tokens])
    forget(engine, 0, 12)
    forget(engine, 1, 16)
    assert engine.loaded(engine.answer(PROMPT[:20])) == [8]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_tail_without_the_piece_of_one_group_is_no_hit(make, group):
    """Mooncake#4153: hits in part on three groups. The shorter tail has all, and is served."""
    engine = make(**HYBRID | {"groups": ("full", "state", "state"), "blocks": 150})
    for tokens in (BLOCK + 5, BLOCK + 13):
        engine.keep(PROMPT[:tokens])
    forget(engine, group, BLOCK + 12)
    assert engine.loaded(engine.answer(PROMPT[: BLOCK + 15])) == [BLOCK + 4]


def test_beside_drafts_hits_end_with_blocks(make):
    """vllm#53324: a draft that goes back by a unit. Its states are not those of a unit's end."""
    engine = make(**HYBRID | {"drafts": 3, "blocks": 150})
    engine.keep(PROMPT[: 2 * BLOCK + 11])
    (load,) = engine.loaded(engine.answer(PROMPT[: 2 * BLOCK + 11]))
    assert not load % BLOCK


def test_a_tail_that_vllm_has_itself_is_not_loaded(make):
    engine = make(**HYBRID)
    engine.answer(PROMPT[: BLOCK + 11])
    assert engine.loaded(engine.answer(PROMPT[: BLOCK + 11])) == []


def test_a_tail_whose_load_fails_is_computed(make):
    engine = make(**HYBRID)
    engine.keep(PROMPT[: BLOCK + 11])
    engine.broken = lambda rank, blocks: True
    assert engine.loaded(engine.answer(PROMPT[: BLOCK + 11], 20)) == [BLOCK + 8]
