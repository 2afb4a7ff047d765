"""Sessions: whose prompt it is, told from a name or from the chunks, and what nobody else has."""

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.sessions import Sessions
from tests.stores import keys


def exclusive(sessions, run):
    return [key for part in sessions.exclusive(run) for key in part]


def test_a_turn_goes_on_where_the_last_one_ended():
    sessions = Sessions(100)
    first = sessions.seen(keys(1, 2, 3))
    assert sessions.seen(keys(1, 2, 3, 4, 5)) == first
    assert sessions.seen(keys(1, 2, 3, 4, 5, 6)) == first
    assert sessions.seen(keys(7, 8)) != first


def test_another_conversation_shares_only_the_system_prompt():
    sessions = Sessions(100)
    first = sessions.seen(keys(1, 2, 3))
    assert sessions.seen(keys(1, 9, 9)) != first
    assert exclusive(sessions, keys(1, 2, 3)) == keys(1, 2, 3)[1:]
    assert exclusive(sessions, keys(1, 9, 9)) == keys(1, 9, 9)[1:]


def test_an_answer_made_anew_is_the_same_session():
    sessions = Sessions(100)
    first = sessions.seen(keys(1, 2, 3, 4, 5, 6))
    assert sessions.seen(keys(1, 2, 3, 4, 7)) == first
    left = keys(1, 2, 3, 4, 5, 6)[-1:]
    assert exclusive(sessions, keys(1, 2, 3, 4, 7)) == keys(1, 2, 3, 4, 7) + left


def test_of_a_long_system_prompt_the_third_conversation_tells():
    sessions = Sessions(100)
    system = [1] * 9
    for user in range(4):
        sessions.seen(keys(*system, user, user, user))
    for user in (2, 3):
        found = exclusive(sessions, keys(*system, user, user, user))
        assert found == keys(*system, user, user, user)[9:]
    assert sessions.seen(keys(*system, 3, 3, 3, 4)) == sessions.seen(keys(*system, 3, 3, 3, 4, 5))


def test_chunks_that_were_not_full_are_the_session_s_own_after_the_turns_that_had_them():
    sessions, ends = Sessions(100), list[ChunkKey]()
    for turn in range(5):
        run = keys(1, 2, 3, *range(4, 5 + turn), 101 + turn)
        sessions.seen(run)
        assert exclusive(sessions, run) == [*run, *ends]
        ends += run[-1:]
    for turn in range(200):
        sessions.seen(keys(*range(1, 8), 1000 + turn))
    assert exclusive(sessions, run)[-64:] == [
        keys(*range(1, 8), 1000 + turn)[-1] for turn in range(135, 199)
    ]


def test_an_end_that_another_session_has_too_is_not_its_own():
    sessions = Sessions(100)
    sessions.seen(keys(1, 2, 3, 4), "a")
    sessions.seen(keys(1, 2, 3, 5), "a")
    sessions.seen(keys(1, 2, 3, 4), "b")
    assert exclusive(sessions, keys(1, 2, 3, 5)) == keys(1, 2, 3, 5)[-1:]


def test_a_name_decides_and_remembers_its_last_prompt():
    sessions = Sessions(100)
    a = sessions.seen(keys(1, 2, 3), "a")
    assert sessions.seen(keys(1, 2, 3, 4), "b") != a
    assert sessions.seen(keys(8, 9), "a") == a
    assert sessions.last("a") == keys(8, 9) and sessions.last("c") == ()
    assert exclusive(sessions, keys(1, 2, 3, 4)) == keys(1, 2, 3, 4)[3:], "b shares what a had"


def test_the_answer_after_a_session_s_last_prompt_is_its_own():
    sessions = Sessions(100)
    sessions.seen(keys(1, 2, 3))
    sessions.seen(keys(1, 9))
    assert exclusive(sessions, keys(1, 2, 3, 4, 5)) == keys(1, 2, 3, 4, 5)[1:]
    assert exclusive(sessions, keys(1, 6)) == [], "what comes after a shared chunk is nobody's"


def test_all_of_it_is_bounded():
    sessions = Sessions(50)
    for number in range(40_000):
        sessions.seen([ChunkKey(number.to_bytes(40, "big"))], f"name{number}")
    for number in range(10_000):
        sessions.seen(keys(5, 5, 5, 5, number % 100, number, number))
    assert len(sessions._whose) == 50
    assert (
        len(sessions._names) == 4096
        and len(sessions._lasts) <= 16_384
        and len(sessions._forks) <= 4096
    )


def test_a_shared_chunk_that_is_used_stays_known_as_shared():
    sessions = Sessions(8)
    for number in range(50):
        run = keys(1, 100 + number, 200 + number)
        sessions.seen(run)
        if number:
            assert exclusive(sessions, run) == run[1:]
