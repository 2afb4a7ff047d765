"""The geometry of cache groups: what a chunk is kept as, what a hit needs, and where it may end."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvtier.core.chunk import ChunkLayout, own_half, parent_half
from kvtier.core.errors import LayoutError

groups = pytest.importorskip("kvtier.connectors.vllm.groups")
tabled = pytest.importorskip("kvtier.connectors.vllm.tables")
hits = pytest.importorskip("kvtier.connectors.vllm.scheduler_side.hit_table")
managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")

pytestmark = pytest.mark.vllm
BLOCK = 16
NULL = tabled.NULL_BLOCK


def full(number=0, block=BLOCK):
    return groups.Group(number, groups.Kind.FULL, block)


def window(reach, number=1, block=BLOCK):
    return groups.Group(number, groups.Kind.WINDOW, block, reach)


def local(reach, number=1):
    return groups.Group(number, groups.Kind.LOCAL, BLOCK, reach)


def state(number=1, block=BLOCK):
    return groups.Group(number, groups.Kind.STATE, block)


def keys(count, chunk, first=0):
    layout = ChunkLayout(bytes(32), chunk, chunk, (1,))
    return [*layout.keys([*range(first, first + count * chunk)])]


@pytest.mark.parametrize(
    ("given_groups", "chunk", "piece"),
    [
        ((full(),), 256, 256),
        ((full(), window(128)), 256, 128),
        ((full(), window(129)), 256, 128),
        ((full(), window(130)), 256, 256),
        ((full(), window(1024)), 256, 256),
        ((full(), window(128), window(1024, 2)), 2048, 128),
        ((full(), window(16)), 2048, 128),
        ((full(), local(256)), 256, 256),
        ((full(block=640), state(block=640)), 640, 640),
        ((full(block=640), state(block=640)), 1280, 640),
        ((full(block=32), window(64, block=16)), 256, 64),
        ((full(block=48), window(64, block=32)), 288, 96),
    ],
    ids=str,
)
def test_a_piece_is_short_enough_for_the_shortest_window(given_groups, chunk, piece):
    assert groups.Geometry(given_groups, chunk).piece_tokens == piece


def test_chunks_that_are_not_whole_blocks_of_a_group_are_refused_with_what_to_do():
    with pytest.raises(
        LayoutError,
        match=r"chunk_tokens=256 is not a multiple of 640.*recurrent state.*give a multiple",
    ):
        groups.Geometry((full(), state(block=640)), 256)


ANY = some.one_of(
    some.builds(window, some.integers(2, 700)),
    some.builds(local, some.integers(1, 20).map(lambda n: n * BLOCK)),
)


@given(
    other=ANY,
    chunk=some.sampled_from([16, 32, 64, 256]),
    chunks=some.integers(1, 12),
    had=some.integers(0, 40),
)
def test_a_run_has_every_token_that_a_hit_needs_and_hardly_more(other, chunk, chunks, had):
    geometry = groups.Geometry((full(), other), chunk)
    end, computed = chunks * chunk, min(had * BLOCK, chunks * chunk - BLOCK)
    run = geometry.run(keys(chunks + 1, chunk), computed, end)
    size = geometry.piece_tokens
    for group in geometry.groups:
        held = {
            token
            for piece in geometry.pieces(run)
            if piece.group == group
            for token in range(piece.number * size, (piece.number + 1) * size)
        }
        needed = set(range(max(group.first_needed(end), computed), end))
        assert needed <= held
        assert not held or min(held) > min(needed, default=0) - size
        assert not needed or max(held) < end
    assert len(set(run.keys)) == len(run.keys) == run.start + len(geometry.pieces(run))
    assert run.length == len(geometry.pieces(run))


@given(other=ANY, position=some.integers(0, 3000))
def test_what_is_needed_is_what_vllm_does_not_skip(other, position):
    if other.kind is groups.Kind.WINDOW:
        theirs = managers.SlidingWindowManager.__new__(managers.SlidingWindowManager)
        theirs.sliding_window = other.span
    else:
        theirs = managers.ChunkedLocalAttentionManager.__new__(
            managers.ChunkedLocalAttentionManager
        )
        theirs.attention_chunk_size = other.span
    theirs.extra_retained_tokens = 0
    assert other.first_needed(position) == theirs.get_num_skipped_tokens(position)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("tokens", [64, 65, 127, 128, 129, 192])
def test_a_run_ends_with_the_chunk_in_which_its_hit_ends(block, tokens):
    """A prompt of whole chunks leaves its last block to be computed, which may be all of its last
    chunk: no block is there for it."""
    geometry = groups.Geometry((full(block=block),), 64)
    end = hits.longest_hit(geometry, tokens)
    run = geometry.run(keys(tokens // 64, 64), 0, end)
    pieces = geometry.pieces(run)
    assert len(run.keys) == len(pieces) == min(tokens // 64, -(-end // 64))
    table = [[*range(1, 1 + end // block)]]
    for moved in tabled.loading(geometry, list(zip(pieces, range(9), strict=False)), table, 0, end):
        assert len(moved.slots) == -(-len(moved.blocks) // geometry.blocks_per_piece(full()))


def test_a_state_is_the_one_at_the_end_of_the_hit():
    geometry = groups.Geometry((full(), state(1), state(2)), 32)
    run = geometry.run(keys(4, 32), 0, 96)
    assert [
        (piece.group.number, piece.number) for piece in geometry.pieces(run) if piece.group.number
    ] == [(1, 2), (2, 2)]


TAILS = some.builds(
    lambda reach, block: groups.Group(1, groups.Kind.TAIL, block, reach),
    some.integers(2, 64),
    some.sampled_from([4, 8, 16, 32, 64]),
)


@given(other=TAILS, chunk=some.sampled_from([64, 128]), chunks=some.integers(1, 9))
def test_a_tail_is_the_blocks_that_vllm_does_not_skip_at_the_end_of_a_chunk(other, chunk, chunks):
    geometry, end = groups.Geometry((full(block=64), other), chunk), chunks * chunk
    table = [NULL, *range(100, 100 + end // other.block_tokens)][1:]
    behind = geometry.behind(end)
    held = [tabled.blocks_of(geometry, piece, [[], table]) for piece in behind]
    first = other.first_needed(end) // other.block_tokens
    assert [block for blocks in held for block in blocks or ()] == table[first:]

    named = keys(chunks, chunk)
    found = {geometry.key(piece, named) for piece in behind}
    assert len(found) == len(behind) and not found & set(named)
    (*_, move) = tabled.loading(
        geometry,
        [(piece, slot) for slot, piece in enumerate(behind)],
        [[*range(end // 64)], table],
        0,
        end,
    )
    assert (move.slots, move.blocks) == ([*range(len(behind))], table[first:])
    run = geometry.run(named, end - chunk, end)
    assert all(geometry.begins_before(piece, end) for piece in geometry.pieces(run))


def test_the_ends_of_tails_lie_apart_and_are_looked_for_where_they_are_kept():
    tail = groups.Group(1, groups.Kind.TAIL, 4, 64)
    geometry = groups.Geometry((full(block=64), tail), 64)
    apart = geometry.keep_tokens
    assert len(geometry.behind(apart)) == 16
    assert 16 <= 0.3 * apart / 64 < 17
    prompt = 110 * 64 + 30
    kept = [end for end in range(64, prompt + 12 * 64, 64) if geometry.is_kept(end, prompt)]
    assert kept == [54 * 64, 109 * 64, 110 * 64, 112 * 64, 116 * 64, 120 * 64]
    for known in range(110 * 64, 117 * 64, 64):
        tried = geometry.ends(200 * 64, known, 0)
        assert max(end for end in kept if end <= known) in tried
    assert 54 * 64 in geometry.ends(200 * 64, 90 * 64, 0)
    assert not geometry.is_kept(54 * 64, 107 * 64 + 30), "the last is as near as the next would be"
    with pytest.raises(LayoutError, match=r"shorter than a window of 65.*longer chunk"):
        groups.Geometry((full(block=32), groups.Group(1, groups.Kind.TAIL, 4, 65)), 32)


def test_windows_alone_are_kept_whole_and_loaded_as_far_as_they_reach():
    geometry = groups.Geometry((window(40, 0),), 32)
    assert [piece.number for piece in geometry.trunk(0, 4)] == [0, 1, 2, 3]
    run = geometry.run(keys(4, 32), 0, 128)
    assert [piece.number for piece in geometry.pieces(run)] == [2, 3]
    assert run.keys == [geometry.key(piece, keys(4, 32)) for piece in geometry.trunk(0, 4)], (
        "the others stay hot"
    )


@pytest.mark.parametrize("chunk", [128, 256], ids=["one piece a chunk", "two"])
def test_many_pieces_have_the_keys_that_each_has_alone(chunk):
    others = (window(128, 1), window(500, 2), state(3))
    for anchors in ((full(),), (full(), full(4))):
        geometry, named = groups.Geometry((*anchors, *others), chunk), keys(6, chunk)

        for end in range(chunk, 7 * chunk, chunk):
            run, behind = geometry.run(named, 0, end), geometry.behind(end, end - BLOCK)
            assert geometry.pieces(run) == geometry.trunk(0, end // chunk) + geometry.behind(end)
            assert run.keys == [geometry.key(piece, named) for piece in geometry.pieces(run)]
            found = geometry.behind_keys(named, end, end - BLOCK)
            assert found == [geometry.key(piece, named) for piece in behind]


def test_pieces_have_keys_of_their_own_and_link_to_those_before_them():
    geometry, named = (
        groups.Geometry((full(), window(128), window(128, 2), state(3)), 256),
        keys(6, 256),
    )
    pieces = [
        *geometry.trunk(0, 6),
        *(piece for end in range(256, 7 * 256, 256) for piece in geometry.behind(end)),
    ]
    found = {geometry.key(piece, named): piece for piece in pieces}
    assert len(found) == len(set(pieces))
    assert set(named) <= set(found), "who knows only chunks finds the first anchor's last piece"
    by_link = {own_half(key): piece for key, piece in found.items()}
    for key, piece in found.items():
        before = by_link.get(parent_half(key))
        if before is not None:
            a_chunk = 1 if piece.group.kind is groups.Kind.STATE else geometry.pieces_per_chunk
            assert before == piece._replace(number=piece.number - a_chunk)
        else:
            assert parent_half(key) == bytes(8) or piece.group not in geometry.anchors


def test_a_hit_may_end_where_something_is_kept_and_the_longest_end_is_tried_first():
    geometry = groups.Geometry((full(), window(512)), 256)
    branches = (3100, 5000)
    kept = [end for end in range(256, 9000, 256) if geometry.is_kept(end, 8300, branches)]
    assert kept == [2048, 3072, 4096, 4864, 6144, 8192, 8448, 8704, 8960], (
        "multiples, where others branch off, and the end"
    )
    assert geometry.ends(8960, 5000 // 256 * 256, 2048) == [8960, 4864, 4096]
    assert geometry.ends(8192, 8192, 0) == [8192, 6144, 4096, 2048]


WINDOWED = {
    "Gemma 2": (full(), window(4096)),
    "Gemma 3": (full(), *(window(1024, number) for number in range(1, 6))),
    "gpt-oss": (full(), window(128)),
    "Llama 4": (full(), *(groups.Group(n, groups.Kind.LOCAL, BLOCK, 8192) for n in (1, 2, 3))),
    "DeepSeek V4": (
        full(block=256),
        *(groups.Group(n, groups.Kind.TAIL, 64, 128) for n in (1, 2, 3)),
        groups.Group(4, groups.Kind.TAIL, 8, 128),
        groups.Group(5, groups.Kind.TAIL, 4, 8),
    ),
}


@pytest.mark.parametrize("like", WINDOWED)
def test_ends_within_a_long_prompt_take_a_part_of_its_room(like):
    geometry, prompt = groups.Geometry(WINDOWED[like], 256), 131_072
    last = geometry.last_end(prompt)
    ends = [end for end in range(256, last + 1, 256) if geometry.is_kept(end, prompt)]
    needed = {*geometry.trunk(0, last // 256), *geometry.behind(last)}
    kept = needed | {piece for end in ends for piece in geometry.behind(end)}
    assert len(kept) <= 1.3 * len(needed)
    assert all(end in geometry.ends(last, end, 0) for end in ends) and len(ends) > 2


def test_of_the_states_within_a_prompt_those_are_kept_that_lie_apart():
    """vLLM has them where its steps end."""
    geometry = groups.Geometry((full(block=640), *(state(n, block=640) for n in (1, 2, 3))), 640)
    assert geometry.keep_tokens == 10 * 640
    prompt, step = 40 * 640 + 30, 4 * 640
    ends = [*range(step, 40 * 640, step), 39 * 640, 40 * 640, 41 * 640]
    kept = [
        end // 640
        for begin, end in zip([0, *ends], ends, strict=False)
        if geometry.is_state_kept(end, begin, prompt, (16 * 640 + 5,))
    ]
    assert kept == [12, 16, 20, 32, 39, 40, 41]
    assert geometry.ends(3200, 1920, 0) == [3200, 1920, 1280, 640]


def test_a_prompt_that_ends_with_a_chunk_leaves_a_token_to_compute():
    geometry = groups.Geometry((full(), window(100)), 64)
    assert geometry.last_end(256) == 192
    assert geometry.is_kept(192, 256)


def test_a_piece_is_saved_only_from_blocks_that_the_group_still_has():
    whole, old = full(), window(64)
    geometry = groups.Geometry((whole, old), 64)
    tables = [[3, 4, 5, 6, 7, 8, 9, 10], [NULL, NULL, 13, 14, 15, 16, 17]]
    first, second = (groups.Piece(old, number) for number in range(2))
    assert tabled.blocks_of(geometry, groups.Piece(whole, 1), tables) == [7, 8, 9, 10]
    assert tabled.blocks_of(geometry, first, tables) is None, "the window has left two of them"
    assert tabled.blocks_of(geometry, second, tables) is None, "the last one is not there yet"
    tables[1].append(18)
    assert tabled.blocks_of(geometry, second, tables) == [15, 16, 17, 18]
