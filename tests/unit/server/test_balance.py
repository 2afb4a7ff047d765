"""The rule that shares bytes among slot sizes: who gives, who gets, and what never happens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.server.shares import _LEAST_PARTS, _TURN_PARTS, Side, divide, shift

PLACE = 1000 * 80


def full(room, age, wanted=0, unit=10):
    return Side(room, unit, 0, room, wanted, age)


def test_what_nobody_holds_makes_the_sizes_equal():
    found = divide(PLACE, {1: Side(0, 10, 0, 0), 2: Side(0, 20, 0, 0)})
    assert found == {1: PLACE // 2, 2: PLACE // 2}
    assert divide(PLACE, {1: Side(0, 10, 0, 0)}) == {1: PLACE}


def test_who_holds_more_than_his_part_keeps_it_as_long_as_there_is_room():
    found = divide(PLACE, {1: Side(0, 10, 0, 70_000), 2: Side(0, 20, 0, 0)})
    assert found == {1: 70_000, 2: 10_000}


def test_the_largest_gives_what_a_new_size_keeps_at_least():
    rooms = divide(PLACE, {1: full(70_000, 1), 2: full(10_000, 1), 3: Side(0, 10, 0, 0)})
    assert rooms == {1: 69_667, 2: 10_000, 3: 333}


def test_where_not_even_the_least_is_there_nobody_gets_more_than_there_is():
    rooms = divide(100, {1: Side(0, 90, 0, 90), 2: Side(0, 80, 0, 0)})
    assert sum(rooms.values()) <= 100 and rooms[1] >= 20


def test_nothing_moves_to_who_lacks_nothing():
    sides = {1: full(PLACE // 2, 1000), 2: full(PLACE // 2, 1)}
    assert shift(PLACE, sides) == {1: PLACE // 2, 2: PLACE // 2}


def test_what_is_free_goes_first_whoever_has_it():
    sides = {1: full(30_000, 1000), 2: Side(20_000, 10, 0, 15_000, 0, 0), 3: full(30_000, 5, 1_000)}
    assert shift(PLACE, sides) == {1: 30_000, 2: 18_000, 3: 32_000}


def test_of_chunks_the_coldest_go_and_only_for_what_is_clearly_hotter():
    def moved(giver, taker):
        return shift(PLACE, {1: full(40_000, giver), 2: full(40_000, taker, 100)})[2] - 40_000

    assert moved(1000, 100) == 200, "twice what it lacked"
    assert moved(100, 100) == moved(127, 100) == 0
    assert moved(128, 100) == 200
    assert moved(2, 0) == 0 and moved(3, 0) == 200
    rooms = shift(PLACE, {1: full(20_000, 50), 2: full(20_000, 90), 3: full(40_000, 1, 100)})
    assert rooms == {1: 20_000, 2: 19_800, 3: 40_200}


def test_who_waits_for_room_that_is_his_gets_no_more():
    sides = {1: full(30_000, 1000), 2: Side(50_000, 10, 0, 20_000, 5_000, 1)}
    assert shift(PLACE, sides) == {1: 30_000, 2: 50_000}


def test_a_size_of_whose_chunks_nothing_is_known_gives_none_of_them():
    assert shift(PLACE, {1: full(40_000, None), 2: full(40_000, 1, 100)}) == {1: 40_000, 2: 40_000}


def test_one_chunk_moves_even_where_it_is_larger_than_a_turn_allows():
    rooms = shift(80, {1: full(40, 1000, unit=1), 2: full(40, 0, 40, unit=40)})
    assert rooms == {1: 1, 2: 79}, "all but the least"


sizes = st.dictionaries(
    st.integers(1, 8),
    st.tuples(
        st.integers(0, 30_000),  # room
        st.integers(1, 900),  # unit
        st.integers(0, 50),  # fixed
        st.floats(0, 1.2),  # how full
        st.integers(0, 50),  # chunks that lacked room
        st.one_of(st.none(), st.integers(0, 10_000)),
    ),
    min_size=1,
    max_size=8,
)


def sides_of(given):
    return {
        size: Side(room, unit, fixed, fixed + int(part * room / unit) * unit, lacked * unit, age)
        for size, (room, unit, fixed, part, lacked, age) in given.items()
    }


@settings(max_examples=400)
@given(sizes)
def test_whatever_comes_no_byte_is_made_none_is_lost_and_everybody_keeps_the_least(given):
    sides = sides_of(given)
    place = sum(side.room for side in sides.values())
    after = shift(place, sides)
    assert sum(after.values()) == place and min(after.values()) >= 0
    most = place // _TURN_PARTS + max(side.unit for side in sides.values())
    assert sum(max(0, after[size] - side.room) for size, side in sides.items()) <= most
    for size, side in sides.items():
        if after[size] < side.room:
            assert after[size] >= side.least(place)
        if after[size] > side.room:
            assert side.wanted
    level = divide(place, sides)
    assert (
        place - len(sides) < sum(level.values()) <= place or max(level.values(), default=0) >= place
    )


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 2000), st.integers(0, 40)),
        min_size=2,
        max_size=6,
    )
)
def test_under_a_steady_load_the_room_comes_to_rest(loads):
    """Each size uses the same chunks again and again, so many bytes a turn. Its coldest is as old
    as it takes to use all that fits. What it uses and does not fit lacks room."""
    place = 80_000
    rooms = divide(place, {size: Side(0, unit, 0, 0) for size, (unit, _, _) in enumerate(loads)})
    history = []
    for _ in range(300):
        sides = {}
        for size, (unit, rate, sets) in enumerate(loads):
            whole = rate * sets // unit * unit  # the bytes that it uses again and again
            used = min(rooms[size] // unit * unit, whole)
            age = used // rate if used else None
            sides[size] = Side(rooms[size], unit, 0, used, rate if whole > rooms[size] else 0, age)
        rooms = shift(place, sides)
        history.append(tuple(rooms.values()))
    assert len(set(history[-50:])) == 1, f"it still moves: {history[-5:]}"


def test_23_idle_sizes_leave_nine_tenths_to_the_busy_one():
    rooms = divide(PLACE, {size: Side(0, 10, 0, 0) for size in range(24)})
    for turn in range(200):
        sides = {size: full(room, turn) for size, room in rooms.items()}
        sides[0] = full(rooms[0], 1, 50_000)
        rooms = shift(PLACE, sides)
    assert rooms[0] >= 0.9 * PLACE
    assert all(rooms[size] == PLACE // _LEAST_PARTS for size in range(1, 24))
