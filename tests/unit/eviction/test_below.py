"""``policy: auto`` below RAM: each tier has the order whose hits would save most, changes it under
the Store's lock only, and starts anew with another room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.bench.traces.chains import key_of
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import OVER, Cache, simulate
from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import AT_ONCE, whole
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.below import Below
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import LRU_SETTING, Segments, Setting
from kvtier.eviction.sessions import SessionPrompt, Sessions
from kvtier.eviction.shadows import Shadows

RAM, NVME = 12, 60


def run_of(*names: object) -> tuple[ChunkKey, ...]:
    return tuple(map(key_of, names))


def scans_and_a_loop(requests: int) -> Iterator[Request]:
    """Twelve prompts that come in turn, among so many that come once that neither place holds any
    of them by LRU."""
    for number in range(requests):
        place = number // 3 % 12 if number % 3 == 0 else 1000 + number
        yield Request(float(number), run_of(*((place, at) for at in range(4))))


def what_comes_again_comes_soon(requests: int) -> Iterator[Request]:
    """LRU's own load: each prompt comes twice, the second time after some others."""
    for number in range(requests):
        for place in (number, max(0, number - 8)):
            yield Request(5000.0 + number, run_of(*((f"soon {place}", at) for at in range(3))))


class Lock:
    """Tells whether it is held."""

    held = False

    def __enter__(self) -> None:
        self.held = True

    def __exit__(self, *raised: object) -> None:
        self.held = False


def below(room: int = NVME) -> tuple[Below, Segments, Shadows]:
    made = Below(SavedCompute())
    live = made(room)
    return made, live, made.tiers[0][1]


def follow(one: Below, requests: Iterator[Request], lock: Lock) -> None:
    sessions = Sessions(10_000)
    for request in requests:
        prompt = SessionPrompt(request.run, sessions.seen(request.run))
        for _ in one.following(prompt, lock):
            assert not lock.held, "no pause with the lock"


def test_a_tier_below_keeps_of_a_loop_among_scans_what_lru_never_would() -> None:
    trace = list(scans_and_a_loop(1500))
    lru = simulate(trace, Cache(RAM, NVME, policy="lru"))
    with_lru_below = simulate(trace, Cache(RAM, NVME, policy="keep90_4x"))
    auto = simulate(trace, Cache(RAM, NVME, policy="auto"))
    assert lru.hits == 0
    assert auto.lower > with_lru_below.lower + 500
    assert auto.writes < lru.writes, "and what stays need not be written again"


def test_where_lru_is_best_it_stays_lru_to_the_chunk() -> None:
    trace = list(what_comes_again_comes_soon(500))
    lru, auto = (simulate(trace, Cache(RAM, NVME, policy=one)) for one in ("lru", "auto"))
    assert (auto.hits, auto.writes) == (lru.hits, lru.writes) and lru.hits > 0


def test_its_setting_follows_the_load_and_changes_under_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, live, _ = below()
    lock, settle = Lock(), live.settle
    settled = list[Setting]()

    def look(this: Segments, setting: Setting) -> None:
        assert this is live and lock.held
        settled.append(setting)
        settle(setting)

    monkeypatch.setattr(Segments, "settle", look)
    follow(one, scans_and_a_loop(900), lock)
    assert settled and live.setting != LRU_SETTING
    follow(one, what_comes_again_comes_soon(1500), lock)
    assert live.setting == LRU_SETTING


def test_another_room_is_a_new_start_of_its_shadows_alone() -> None:
    one, live, shadows = below()
    other = one(200)
    follow(one, scans_and_a_loop(10), Lock())
    live.resize(30)
    follow(one, scans_and_a_loop(1), Lock())
    assert (shadows.room, one.tiers[1][1].room, other.room) == (30, 200, 200)
    assert shadows._contenders[0].order is not None and len(shadows._contenders[0].order) == 4


def test_a_long_prompt_is_followed_in_pieces() -> None:
    one, _, shadows = below(100_000)
    run = run_of(*range(50 * AT_ONCE))
    steps = one.following(SessionPrompt(run, 0), Lock())
    assert sum(1 for _ in steps) > 50 * len(shadows.settings)


def test_a_session_that_is_over_is_the_first_to_leave_the_shadows_below() -> None:
    adaptive = Adaptive()
    adaptive(RAM)
    adaptive.below(8)
    ended, other = run_of(*"abcd"), run_of(*"wxyz")
    for session, run in enumerate((ended, other)):
        whole(adaptive.following(SessionPrompt(run, session), Lock()))
    whole(adaptive.over(ended[2:]))
    whole(adaptive.following(SessionPrompt(run_of(1, 2), 2), Lock()))
    (_, shadows) = adaptive.below.tiers[0]
    for each in shadows._contenders:
        assert each.order is not None
        assert [key in each.order for key in (*ended, *other)] == [True, True, False, False] + [
            True
        ] * 4


def test_with_hints_nothing_that_is_over_is_written_below() -> None:
    trace = [one._replace(hint=OVER) for one in scans_and_a_loop(300)]
    assert simulate(trace, Cache(RAM, NVME, policy="auto")).writes == 0
