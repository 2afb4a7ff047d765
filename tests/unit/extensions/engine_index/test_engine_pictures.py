"""What is known of an engine from its events: as much as it said, and never more."""

import random
from typing import Any

import pytest

from kvtier.core.steps import whole
from kvtier.extensions.engine_index.picture import Picture, PromptBlocks
from kvtier.protocol import kv_events
from kvtier.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 4
TOKENS = list(range(100, 100 + 6 * BLOCK))


def stored(first, last, medium="GPU", tokens=None, **more):
    """The blocks from ``first`` to before ``last`` of a prompt. Their hashes are made of the
    prompt's beginning, as vLLM's are."""
    tokens = TOKENS if tokens is None else tokens
    names = [repr(tokens[: (number + 1) * BLOCK]).encode()[-60:] for number in range(last)]
    given: dict[str, Any] = {
        "block_hashes": names[first:last],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK : last * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    return BlockStored(**(given | more))


def removed(first, last, medium="GPU", **more):
    return BlockRemoved(stored(first, last).block_hashes, medium, **more)


def picture(*events, most=1000):
    made = Picture(most)
    whole(made.apply(events))
    return made


def lookup(seen, tokens=None, salt=None):
    """The tokens of all tiers together, and those of each."""
    found = whole(seen.lookup(PromptBlocks(TOKENS if tokens is None else tokens, salt)))
    return found.tokens // BLOCK, {tier: count // BLOCK for tier, count in found.items() if count}


def test_a_prompts_beginning_is_found_in_each_tier_and_in_all_together():
    seen = picture(stored(0, 3), stored(2, 5, "CPU"), stored(0, 1, "STORAGE"))
    assert lookup(seen) == (5, {"gpu": 3, "storage": 1})
    assert lookup(seen, TOKENS[: 2 * BLOCK + 1]) == (2, {"gpu": 2, "storage": 1})
    assert lookup(seen, [7, *TOKENS[1:]]) == (0, {})
    assert lookup(seen, []) == (0, {})


def test_a_block_counts_until_its_last_tier_lets_it_go():
    seen = picture(stored(0, 4), stored(0, 4, "CPU"), removed(2, 4))
    assert lookup(seen) == (4, {"gpu": 2, "cpu": 4})
    whole(seen.apply([removed(1, 2, "CPU"), removed(1, 2)]))
    assert lookup(seen) == (1, {"gpu": 1, "cpu": 1})
    assert seen.blocks == {"gpu": 1, "cpu": 3}


def test_what_is_removed_twice_is_counted_once():
    seen = picture(stored(0, 3), stored(0, 3, "CPU"), removed(1, 3), removed(1, 3), removed(0, 3))
    assert seen.blocks == {"gpu": 0, "cpu": 3}
    assert lookup(seen) == (3, {"cpu": 3})


def test_a_tier_that_other_hosts_reach_has_its_own_name():
    seen = picture(stored(0, 2, "STORAGE", ownership="redis", locality="REMOTE"))
    whole(seen.apply([removed(0, 2, "STORAGE")]))
    assert lookup(seen) == (2, {"redis": 2}), "the host's own disk is another tier"


def test_a_cleared_prefix_cache_leaves_what_other_tiers_hold():
    seen = picture(stored(0, 4), stored(0, 2, "CPU"), AllBlocksCleared())
    assert lookup(seen) == (2, {"cpu": 2})
    assert seen.blocks == {"gpu": 0, "cpu": 2}
    assert picture(stored(0, 2, "CPU"), AllBlocksCleared()).blocks == {"cpu": 2}


def test_blocks_whose_place_is_not_known_do_not_count():
    seen = picture(stored(1, 4))
    assert (lookup(seen), seen.ignored) == ((0, {}), 3)
    whole(seen.apply([stored(0, 1), stored(1, 3)]))
    assert lookup(seen) == (3, {"gpu": 3})
    odd = [
        stored(3, 5, token_ids=TOKENS[3 * BLOCK : 4 * BLOCK]),
        stored(3, 4, block_size=0, token_ids=[]),
    ]
    whole(seen.apply(odd))
    assert lookup(seen)[0] == 4, "a block without all of its tokens has no place"
    whole(seen.apply([stored(4, 5, block_size=0, token_ids=[])]))
    assert (seen.ignored, seen.blocks) == (5, {"gpu": 4})


def test_tiers_that_are_told_without_tokens_are_those_of_known_blocks():
    seen = picture(stored(0, 2), stored(0, 4, "CPU", token_ids=[], block_size=0))
    assert lookup(seen) == (2, {"gpu": 2, "cpu": 2})


def test_a_salt_and_an_adapter_are_parts_of_a_prompts_name():
    salted = stored(0, 2, extra_keys=[["tenant-1"], None])
    seen = picture(salted)
    assert lookup(seen) == (0, {})
    assert lookup(seen, salt="tenant-2") == (0, {})
    assert lookup(seen, salt="tenant-1") == (2, {"gpu": 2})
    assert lookup(picture(stored(0, 2, lora_name="sql"))) == (0, {})
    with pytest.raises(ValueError, match="extra keys"):
        picture(stored(0, 2, extra_keys=[None]))


def test_windows_do_not_count_and_of_several_groups_the_least():
    window = stored(0, 6, group_idx=1, kv_cache_spec_kind="sliding_window")
    full = stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention")
    assert lookup(picture(window)) == (0, {})
    assert lookup(picture(window, full)) == (4, {"gpu": 4})
    both = picture(window, full, stored(0, 2, "CPU", group_idx=2))
    assert lookup(both) == (2, {}), "neither tier has both groups"
    turned = picture(stored(0, 2, "CPU", group_idx=2), full)
    assert lookup(turned) == (2, {}), "whichever was told first"
    whole(both.apply([removed(1, 2, "CPU", group_idx=2)]))
    assert lookup(both)[0] == 1


def test_the_room_is_bounded():
    seen = picture(stored(0, 6), most=4)
    assert (lookup(seen), seen.ignored) == ((4, {"gpu": 4}), 2)
    other = [7, *TOKENS[1:]]
    whole(seen.apply([removed(3, 4), stored(0, 1, tokens=other), stored(4, 5)]))
    assert (lookup(seen), lookup(seen, other)) == ((3, {"gpu": 3}), (1, {"gpu": 1}))
    many = [stored(0, 1, f"tier{number}") for number in range(9)]
    with pytest.raises(ValueError, match="more than 8 tiers"):
        picture(*many)
    groups = [stored(0, 1, group_idx=number) for number in range(65)]
    with pytest.raises(ValueError, match="more than 64 cache groups"):
        picture(*groups)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_known_is_what_was_told_whatever_was_missed_before(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(6 * BLOCK)] for _ in range(20)]
    held: dict[tuple[str, object], tuple[int, ...]] = {}
    early, late = Picture(10_000), Picture(10_000)
    for turn in range(3000):
        prompt, medium = rng.choice(prompts), rng.choice(["GPU", "CPU"])
        if rng.random() < 0.6:
            event: BlockStored | BlockRemoved = stored(0, rng.randint(1, 6), medium, prompt)
        else:
            first = rng.randrange(6)
            event = BlockRemoved(stored(0, 6, tokens=prompt).block_hashes[first:], medium)
        for number, block in enumerate(event.block_hashes):
            if isinstance(event, BlockStored):
                held[medium, block] = tuple(prompt[: (number + 1) * BLOCK])
            else:
                held.pop((medium, block), None)
        whole(early.apply([event]))
        if turn > 1500:
            whole(late.apply([event]))
    for prompt in prompts:
        for tier in ("gpu", "cpu"):
            true = 0
            while tuple(prompt[: (true + 1) * BLOCK]) in {
                tokens for (medium, _), tokens in held.items() if medium == tier.upper()
            }:
                true += 1
                if true == 6:
                    break
            assert lookup(early, prompt)[1].get(tier, 0) == true
            assert lookup(late, prompt)[1].get(tier, 0) <= true


def test_both_forms_of_vllms_messages_are_read():
    import msgspec

    fields = ["GPU", None, [["salt"], None], 0, "full_attention"]
    listed = ["BlockStored", [b"a", 7], None, [1, 2], 1, None, *fields, None]
    events: list[Any] = [listed, ["BlockRemoved", [b"a"], "GPU"], ["AllBlocksCleared"]]
    first, second, third = kv_events.decode(msgspec.msgpack.encode([1.5, events, 0]))
    assert isinstance(first, BlockStored) and isinstance(second, BlockRemoved)
    assert (first.block_hashes, first.extra_keys, first.group_idx) == (
        [b"a", 7],
        [["salt"], None],
        0,
    )
    assert isinstance(third, AllBlocksCleared)
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode([1.5, [["Other"]]])):
        with pytest.raises(msgspec.DecodeError):
            kv_events.decode(wrong)


def test_vllms_own_messages_are_read_to_the_last_field():
    import msgspec

    events = pytest.importorskip("vllm.distributed.kv_events")
    theirs = events.BlockStored(
        block_hashes=[b"a", b"b"],
        parent_block_hash=b"p",
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=3,
        medium="STORAGE",
        lora_name="sql",
        extra_keys=[("sql",), None],
        group_idx=2,
        kv_cache_spec_kind="mla_attention",
        locality="REMOTE",
        ownership="redis",
        session_id="s",
    )
    gone = events.BlockRemoved(block_hashes=[b"a"], medium=None, group_idx=2, ownership="redis")
    batch = events.KVEventBatch(ts=1.0, events=[theirs, gone, events.AllBlocksCleared()])
    first, second, third = kv_events.decode(msgspec.msgpack.encode(batch))
    for ours, them in ((first, theirs), (second, gone)):
        for name in ours.__struct_fields__:
            given = getattr(them, name)
            given = [list(one) if one else one for one in given] if name == "extra_keys" else given
            assert getattr(ours, name) == given, name
    assert isinstance(third, AllBlocksCleared)
