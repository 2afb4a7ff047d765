"""coldest_first: any stamps, any set of chunks, any links: each key once, no parent before its
child, else by stamp."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunk import ChunkKey, ChunkLayout, coldest_first, own_half, parent_half

LAYOUT = ChunkLayout(bytes(32), 1, 1, (1,))
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=6)


@given(PROMPTS, st.data())
def test_no_parent_leaves_before_its_child_and_stamps_decide_the_rest(prompts, data):
    keys = sorted({key for prompt in prompts for key in LAYOUT.keys(prompt)})
    held = data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    stamps = dict(
        zip(
            held,
            data.draw(st.lists(st.integers(0, 5), min_size=len(held), max_size=len(held))),
            strict=True,
        )
    )
    order = coldest_first(stamps.items())
    assert sorted(order) == sorted(held)
    place = {own_half(key): index for index, key in enumerate(order)}
    assert all(place[own_half(key)] < place.get(parent_half(key), len(order)) for key in order)
    lifted = {key: max(stamps[below] for below in held if key in line(below, held)) for key in held}
    assert [lifted[key] for key in order] == sorted(lifted.values()), (
        "a chunk is as hot as the hottest below it"
    )


def line(key, held):
    """The key and its ancestors, as far as there is no gap."""
    found = [key]
    while parents := [other for other in held if own_half(other) == parent_half(found[-1])]:
        found += parents
    return found


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers()), max_size=12))
def test_forged_links_and_double_keys_end_and_lose_nothing(forged):
    stamped = [
        (ChunkKey(bytes([own]) * 32 + bytes([parent]) * 8), stamp) for own, parent, stamp in forged
    ]
    assert sorted(coldest_first(stamped)) == sorted({key for key, _ in stamped})
