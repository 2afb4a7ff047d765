"""``policy: auto``, in RAM and below: the leader of the shadows rules, none of them runs under the
Store's lock, a setting changes under it only, all of it is bounded."""

import random

import pytest

from kvtier.bench.traces.mooncake import Request, key_of
from kvtier.bench.traces.simulate import Cache, simulate
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker
from kvtier.core.pool import Pool
from kvtier.core.steps import PIECE_CHUNKS, whole
from kvtier.eviction.adaptive import Adaptive, Shadows
from kvtier.eviction.order import LRU_SETTING, Segments, Setting
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.sessions import Sessions
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from tests.stores import SLOT, keys, save

RAM, NVME = 12, 60


def run_of(*names):
    return tuple(map(key_of, names))


def scans_and_a_loop(requests):
    """Twelve prompts that come in turn, among so many that come once that neither place holds any
    of them by LRU."""
    for number in range(requests):
        place = number // 3 % 12 if number % 3 == 0 else 1000 + number
        yield Request(float(number), run_of(*((place, at) for at in range(4))))


def what_comes_again_comes_soon(requests):
    """LRU's own load: each prompt comes twice, the second time after some others."""
    for number in range(requests):
        for place in (number, max(0, number - 8)):
            yield Request(5000.0 + number, run_of(*((f"soon {place}", at) for at in range(3))))


class Lock:
    """Tells whether it is held."""

    held = False

    def __enter__(self):
        self.held = True

    def __exit__(self, *raised):
        self.held = False


def follow(one, requests, lock):
    sessions = Sessions(10_000)
    for request in requests:
        for _ in one.following(request.run, sessions.seen(request.run), lock):
            assert not lock.held, "no pause with the lock"


def drive(store, spare, run):
    with store.load(run) as load:
        served = load.poll().ready
    save(store, run, spare)
    return served


def made(slots=60):
    adaptive, spare = Adaptive(), ManualLane(bound=1)
    store = Store(Pool(slots, SLOT), orders=adaptive.orders(), spare=spare)
    spare.run()
    return store, spare, adaptive


def room_in(shadows):
    """Of each of them."""
    (room,) = {each.room for each in shadows.every}
    return room


def test_under_scans_it_leaves_lru_and_hits_what_lru_never_would():
    store, spare, adaptive = made()
    plain = Store(Pool(60, SLOT))
    ours, lru = 0, 0
    for _, run, *_ in scans_and_a_loop(3000):
        ours += drive(store, spare, run)
        lru += drive(plain, ManualLane(), run)
    assert lru == 0
    assert ours > 1000
    assert adaptive.places[0][0].setting != LRU_SETTING
    store.check(idle=True)


def test_the_shadows_run_without_the_lock_and_pause_between_each_other(monkeypatch):
    store, spare, adaptive = made(64)
    pauses = []

    def look(seconds):
        assert not store._lock.locked()
        pauses.append(seconds)

    monkeypatch.setattr("kvtier.store.store.time.sleep", look)
    drive(store, spare, keys(1, 2))
    drive(store, spare, keys(*range(50 * PIECE_CHUNKS)))
    assert set(pauses) == {0} and adaptive.places[0][1].asked == 2 + 50 * PIECE_CHUNKS
    assert len(pauses) > 50 * len(adaptive.places[0][1].settings), "a long prompt in pieces"


def test_what_waits_is_bounded_and_what_is_dropped_is_counted():
    store = Store(Pool(10, SLOT), orders=Adaptive().orders(), spare=ManualLane(bound=1))
    for number in range(1000):
        store.load(keys(number)).close()
    stats = store.stats()
    assert (stats["dropped_prompts"], stats["followed_prompts"]) == (1000 - 256, 0)


def test_a_prompt_that_waits_for_a_tier_asks_again_and_counts_once():
    store, spare, adaptive = made()
    run = keys(1, 2, 3)
    store.load(run).close()
    run.append(keys(7)[0])  # the caller's list goes on growing
    store.load(run[:3], asker=Asker(again=True)).close()
    spare.run()
    assert (store.stats()["followed_prompts"], adaptive.places[0][1].asked) == (1, 3)


@pytest.mark.parametrize(
    ("room", "part"),
    [(1, 1.0), (12_288, 1.0), (24_576, 0.5), (122_880, 0.1), (10**6, 12_288 / 10**6)],
)
def test_large_places_are_followed_in_part(room, part):
    shadows = Shadows(room, SavedCompute())
    assert shadows.part == part
    assert room_in(shadows) == max(8, int(room * part)) <= 12_288


def test_a_session_is_followed_with_all_its_turns_or_not_at_all():
    shadows, sessions = Shadows(122_880, SavedCompute()), Sessions(10_000)
    draw, turns = random.Random(1), {number: keys(number, 1) for number in range(400)}
    followed = dict.fromkeys(turns, 0)
    for _ in range(4):
        for number in draw.sample(sorted(turns), len(turns)):
            turns[number] = keys(number, 1, *[2] * len(turns[number]))
            before = shadows.asked
            whole(shadows.seeing(turns[number], sessions.seen(turns[number])))
            followed[number] += shadows.asked > before
    assert set(followed.values()) == {0, 4}
    assert 30 <= sum(count == 4 for count in followed.values()) <= 50


def test_a_setting_that_is_clearly_better_rules_long_before_the_first_comparison():
    shadows, sessions = Shadows(60, SavedCompute()), Sessions(10_000)
    for _, run, *_ in scans_and_a_loop(100):
        whole(shadows.seeing(run, sessions.seen(run)))
    assert shadows.every[0].hits == 0 and shadows.now != 0


def test_a_tier_below_keeps_of_a_loop_among_scans_what_lru_never_would():
    trace = list(scans_and_a_loop(1500))
    lru = simulate(trace, Cache(RAM, NVME, policy="lru"))
    with_lru_below = simulate(trace, Cache(RAM, NVME, policy="keep90_4x"))
    auto = simulate(trace, Cache(RAM, NVME, policy="auto"))
    assert lru.hits == 0
    assert auto.lower > with_lru_below.lower + 500
    assert auto.writes < lru.writes, "and what stays need not be written again"


def test_where_lru_is_best_it_stays_lru_to_the_chunk():
    trace = list(what_comes_again_comes_soon(500))
    lru, auto = (simulate(trace, Cache(RAM, NVME, policy=one)) for one in ("lru", "auto"))
    assert (auto.hits, auto.writes) == (lru.hits, lru.writes) and lru.hits > 0


def test_its_setting_follows_the_load_and_changes_under_the_lock(monkeypatch):
    one = Adaptive()
    live = one(NVME)
    lock, settle = Lock(), live.settle
    settled = list[Setting]()

    def look(this, setting):
        assert this is live and lock.held
        settled.append(setting)
        settle(setting)

    monkeypatch.setattr(Segments, "settle", look)
    follow(one, scans_and_a_loop(900), lock)
    assert settled and live.setting != LRU_SETTING
    keys = [ChunkKey(number.to_bytes(40)) for number in range(NVME // 2)]
    live.add(keys)
    live.used(keys)
    follow(one, what_comes_again_comes_soon(1500), lock)
    assert live.setting == LRU_SETTING
    assert list(live) == keys[::-1] and not any(map(live.keeps, keys)), "none is left behind"


def test_a_session_that_is_over_is_the_first_to_leave_the_shadows_below():
    adaptive = Adaptive()
    adaptive(RAM)
    adaptive(8)
    ended, other = run_of(*"abcd"), run_of(*"wxyz")
    for session, run in enumerate((ended, other)):
        whole(adaptive.following(run, session, Lock()))
    whole(adaptive.over(ended[2:]))
    whole(adaptive.following(run_of(1, 2), 2, Lock()))
    (_, shadows) = adaptive.places[1]
    for each in shadows.every:
        assert [key in each for key in (*ended, *other)] == [True, True, False, False] + [True] * 4
