"""Keys: equal exactly when the KV bytes must be equal."""

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunk import KEY_BYTES, ChunkKey, ChunkLayout, fingerprint, own_half, parent_half
from kvtier.core.errors import ConfigError, LayoutError
from tests.command import ran

LAYOUT = ChunkLayout(fingerprint({"model": "a"}), 4, 2, (100, 30))
KNOWN: list[tuple[bytes, dict[int, bytes], list[str]]] = [
    (b"", {}, ["6818a140f18fef62", "4484b34617a4a497"]),
    (b"salt", {}, ["bbbee2e2dd8d420d", "3ab0e965f0cd93d9"]),
    (b"salt", {0: b"cat"}, ["9335fa67602a3c6b", "8fb49695a3b4aa86"]),
    (b"", {1: b"cat"}, ["ed7b5d63cb81ac4f", "14944b1174fc773a"]),
    (b"", {0: b"cat", 1: b"dog"}, ["553c012c028119f0", "8bfd6ebbc38faaea"]),
]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize(("extra", "media", "known"), KNOWN)
def test_known_keys_never_change(extra, media, known):
    keys = LAYOUT.chain(extra, media).extend(list(range(10)))
    assert [key.hex()[:16] for key in keys] == known
    assert all(len(key) == KEY_BYTES for key in keys)


@given(TOKENS, st.lists(TOKENS, max_size=3))
def test_prompts_that_go_on_differently_have_the_keys_they_have_alone(tokens, tails):
    chain = LAYOUT.chain(b"salt")
    known = list(chain.extend(tokens))
    whole = tokens[: len(known) * LAYOUT.chunk_tokens]
    for tail in tails:
        assert chain.continued(tail) == LAYOUT.keys([*whole, *tail], b"salt")
        assert chain.keys == known, "this one stays as it is"
    assert chain.extend([*whole, 1, 2, 3, 4]) == LAYOUT.keys([*whole, 1, 2, 3, 4], b"salt")


@given(TOKENS, TOKENS, st.integers(0, 12), st.sampled_from([1, 2]))
def test_parts_of_a_chunk_have_equal_keys_where_all_tokens_so_far_are_equal(
    left, right, chunk, every
):
    size, named = LAYOUT.chunk_tokens, list[list[ChunkKey]]()
    chunk = min(chunk, len(left) // size, len(right) // size)
    for tokens in (left, right):
        chain = LAYOUT.chain(b"salt")
        known = list(chain.extend(tokens))
        named.append(chain.within(chunk, tokens, every))
        assert chain.keys == known and not set(named[-1]) & set(known)
        assert len(named[-1]) == min(size, len(tokens) - chunk * size) // every
        assert chain.within(chunk, tokens, 1)[every - 1 :: every] == named[-1]
        parent = own_half(known[chunk - 1]) if chunk else bytes(8)
        assert {parent_half(key) for key in named[-1]} <= {parent}
    for index, (one, other) in enumerate(zip(*named, strict=False), 1):
        end = chunk * size + index * every
        assert (one == other) == (left[:end] == right[:end])


def test_parts_with_other_images_have_other_keys():
    cat, dog = (LAYOUT.chain(per_chunk={1: image}) for image in (b"cat", b"dog"))
    for chain in (cat, dog):
        chain.extend(PARTS)
    assert cat.within(0, PARTS, 1) == dog.within(0, PARTS, 1), "the image comes later"
    assert not set(cat.within(1, PARTS, 1)) & set(dog.within(1, PARTS, 1))


PARTS = [1, 2, 3, 4, 5, 6]
KNOWN_PARTS = ["c925aba1e94cea25", "1c9d8f653f00ad73"]


@pytest.mark.parametrize(
    "other",
    [
        LAYOUT.chain(b"tenant"),
        LAYOUT.chain(per_chunk={1: b"image"}),
        ChunkLayout(fingerprint({"model": "b"}), 4, 2, (100, 30)).chain(),
    ],
    ids=["salt", "image", "model"],
)
def test_everything_that_changes_bytes_changes_the_keys_of_parts(other):
    chain = LAYOUT.chain()
    assert [key.hex()[:16] for key in chain.within(0, PARTS, 2)] == KNOWN_PARTS, "never changes"
    for one in (chain, other):
        one.extend(PARTS)
    assert not set(chain.within(1, PARTS, 1)) & set(other.within(1, PARTS, 1))


CHUNK_BYTES = 4 * LAYOUT.chunk_tokens
"""What the tokens of one chunk are hashed as."""
SPLIT = st.tuples(*[st.integers(0, 12)] * 3)


def cut(flat, split):
    """Read a run of bytes as a prompt: so many of the extra, of the first chunk's media and of the
    second's, each before what belongs to it."""
    parts, at = [], 0
    for size in (split[0], split[1], CHUNK_BYTES, split[2], CHUNK_BYTES):
        parts.append(flat[at : at + size])
        at += size
    extra, first, one, second, two = parts
    media = {index: what for index, what in enumerate((first, second)) if what}
    return extra, media, list(struct.unpack(f"<{2 * LAYOUT.chunk_tokens}I", one + two))


@given(st.binary(min_size=64, max_size=64), SPLIT, SPLIT)
def test_no_two_readings_of_the_same_bytes_share_a_key(flat, one, other):
    flat += bytes(CHUNK_BYTES)
    left, right = cut(flat, one), cut(flat, other)
    keys = [LAYOUT.chain(extra, media).extend(tokens)[-1] for extra, media, tokens in (left, right)]
    assert (keys[0] == keys[1]) == (left == right)


def test_media_end_where_they_end():
    split = [(0, 1, 8), (0, 5, 4), (4, 1, 4), (0, 9, 0), (9, 0, 0), (0, 0, 9), (5, 4, 0), (4, 0, 5)]
    flat = bytes([1] * 9 + [0] * 2 * CHUNK_BYTES)
    read = [cut(bytes([1]) * len(flat), one) for one in split]
    keys = {LAYOUT.chain(extra, media).extend(tokens)[-1] for extra, media, tokens in read}
    assert len(keys) == len(split)


def test_keys_do_not_depend_on_the_process():
    code = (
        "from kvtier.core.chunk import *; "
        "print(ChunkLayout(fingerprint({'b': 1, 'a': 2}), 4, 2, "
        "(1,)).keys(list(range(9)))[1].hex())"
    )
    seen = {
        ran([sys.executable, "-c", code], {"PYTHONHASHSEED": seed}).stdout
        for seed in ("0", "1", "random")
    }
    assert seen == {
        ChunkLayout(fingerprint({"a": 2, "b": 1}), 4, 2, (1,)).keys(list(range(9)))[1].hex() + "\n"
    }


@given(TOKENS, TOKENS)
def test_equal_keys_mean_equal_tokens_so_far(left, right):
    for index, (one, other) in enumerate(zip(LAYOUT.keys(left), LAYOUT.keys(right), strict=False)):
        assert (one == other) == (left[: 4 * index + 4] == right[: 4 * index + 4])


@given(TOKENS, st.lists(st.integers(0, 40), max_size=5))
def test_growing_prompt_hashes_to_the_same_keys(tokens, cuts):
    chain = LAYOUT.chain(b"x", {1: b"image"})
    for cut in [*sorted(cuts), len(tokens)]:
        chain.extend(tokens[:cut])
    assert chain.keys == LAYOUT.chain(b"x", {1: b"image"}).extend(tokens)


def test_a_prompt_that_grows_past_an_image_has_it_where_it_lies():
    tokens, media = list(range(16)), {0: b"cat", 2: b"dog"}
    chain = LAYOUT.chain(b"", media)
    for end in (4, 9, 12, 16):
        chain.extend(tokens[:end])
    assert chain.keys == LAYOUT.chain(b"", media).extend(tokens)


@pytest.mark.parametrize(
    "other",
    [
        LAYOUT.keys(list(range(8)), b"tenant"),
        LAYOUT.chain(per_chunk={0: b"image"}).extend(list(range(8))),
        LAYOUT.chain(per_chunk={0: b"other image"}).extend(list(range(8))),
        ChunkLayout(fingerprint({"model": "b"}), 4, 2, (100, 30)).keys(list(range(8))),
        ChunkLayout(fingerprint({"model": "a"}), 8, 2, (100, 30)).keys(list(range(8))),
    ],
    ids=["salt", "image", "other image", "model", "chunk size"],
)
def test_everything_that_changes_bytes_changes_keys(other):
    assert not set(other) & set(LAYOUT.keys(list(range(8))))


def test_an_image_in_a_later_chunk_leaves_earlier_ones_apart_from_plain_text_only_in_framing():
    one, two = (
        LAYOUT.chain(per_chunk={1: image}).extend(list(range(8))) for image in (b"cat", b"dog")
    )
    assert one[0] == two[0] and one[1] != two[1]


def test_keys_link_a_run():
    keys = LAYOUT.keys(list(range(16)))
    assert not any(parent_half(keys[0]))
    assert [parent_half(key) for key in keys[1:]] == [own_half(key) for key in keys[:-1]]


@pytest.mark.parametrize("tokens", [[-1] * 4, [2**32] * 4, ["a"] * 4, [1.5] * 4])
def test_bad_token_ids_are_named(tokens):
    with pytest.raises(ConfigError, match=r"0 .. 2\*\*32-1"):
        LAYOUT.keys(tokens)


def test_layout_sizes():
    assert LAYOUT.blocks_per_chunk == 2
    assert LAYOUT.chunk_bytes == 260
    assert LAYOUT.slot_bytes == 4096


@pytest.mark.parametrize(
    "arguments", [(b"short", 4, 2, (1,)), (bytes(32), 5, 2, (1,)), (bytes(32), 4, 2, ())]
)
def test_impossible_layouts_are_refused(arguments):
    with pytest.raises(LayoutError):
        ChunkLayout(*arguments)
