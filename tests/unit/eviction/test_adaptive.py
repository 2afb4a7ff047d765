"""``policy: auto``: the leader of the shadows rules, none of them runs under the Store's lock, all
of it is bounded."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.lookup import Asker
from kvtier.core.pool import Pool
from kvtier.core.steps import AT_ONCE, whole
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import LRU_SETTING
from kvtier.eviction.sessions import SessionPrompt, Sessions
from kvtier.eviction.shadows import Shadows
from kvtier.store.store import Store
from kvtier.testing import ManualLane

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "adaptive"}), 1, 1, (SLOT,))


def scans_and_a_loop(requests: int) -> Iterator[list[ChunkKey]]:
    """Twelve prompts that come in turn, among so many that come once that LRU holds none of
    them."""
    for number in range(requests):
        if number % 3 == 0:
            yield LAYOUT.keys([1000 + number // 3 % 12] * 3)
        else:
            yield LAYOUT.keys([10_000 + number] * 4)


def steps_of_one_size(requests: int) -> Iterator[list[ChunkKey]]:
    """What comes again comes soon, once: LRU's own load."""
    for number in range(requests):
        yield LAYOUT.keys([20_000 + number] * 3)
        yield LAYOUT.keys([20_000 + max(0, number - 8)] * 3)


def drive(store: Store, spare: ManualLane, run: list[ChunkKey]) -> int:
    with store.load(run) as load:
        served = load.poll().ready
    with store.save(run) as lease:
        lease.commit()
    spare.run()
    return served


def made(slots: int = 60) -> tuple[Store, ManualLane, Adaptive]:
    adaptive, spare = Adaptive(), ManualLane(bound=1)
    store = Store(Pool(slots, SLOT), orders=adaptive.orders(), spare=spare)
    spare.run()
    return store, spare, adaptive


def room_in(shadows: Shadows) -> int:
    """Of each of them."""
    (room,) = {each.order.room for each in shadows._contenders if each.order is not None}
    return room


def test_under_scans_it_leaves_lru_and_hits_what_lru_never_would() -> None:
    store, spare, adaptive = made()
    plain = Store(Pool(60, SLOT))
    ours, lru = 0, 0
    for run in scans_and_a_loop(3000):
        ours += drive(store, spare, run)
        lru += drive(plain, ManualLane(), run)
    assert lru == 0
    assert ours > 1000
    assert adaptive.live.setting != LRU_SETTING
    store.check(idle=True)


def test_when_the_load_changes_it_comes_back_to_lru() -> None:
    store, spare, adaptive = made()
    for run in scans_and_a_loop(1500):
        drive(store, spare, run)
    assert adaptive.live.setting != LRU_SETTING
    for run in steps_of_one_size(4000):
        drive(store, spare, run)
    assert adaptive.live.setting == LRU_SETTING


def test_what_it_counts() -> None:
    store, spare, _ = made()
    for run in scans_and_a_loop(700):
        drive(store, spare, run)
    stats = store.stats()
    names = [f"policy_hits_{setting.name}" for setting in Shadows.settings]
    assert stats["policy_asked"] > 0 and stats["dropped_prompts"] == 0
    assert stats[names[0]] == 0 < max(stats[name] for name in names)
    assert stats[names[stats["policy_now"]]] == max(stats[name] for name in names)


def test_the_shadows_run_without_the_lock_and_pause_between_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, spare, adaptive = made(64)
    pauses = []

    def look(seconds: float) -> None:
        assert not store._lock.locked()
        pauses.append(seconds)

    monkeypatch.setattr("kvtier.store.store.time.sleep", look)
    drive(store, spare, LAYOUT.keys([1, 2]))
    drive(store, spare, LAYOUT.keys(list(range(50 * AT_ONCE))))
    assert set(pauses) == {0} and adaptive.shadows.asked == 2 + 50 * AT_ONCE
    assert len(pauses) > 50 * len(adaptive.shadows.settings), "a long prompt in pieces"


def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    store = Store(Pool(10, SLOT), orders=Adaptive().orders(), spare=ManualLane(bound=1))
    for number in range(1000):
        store.load(LAYOUT.keys([number])).close()
    stats = store.stats()
    assert (stats["dropped_prompts"], stats["followed_prompts"]) == (1000 - 256, 0)


def test_a_prompt_that_waits_for_a_tier_asks_again_and_counts_once() -> None:
    store, spare, adaptive = made()
    run = LAYOUT.keys([1, 2, 3])
    store.load(run).close()
    run.append(LAYOUT.keys([7])[0])  # the caller's list goes on growing
    store.load(run[:3], asker=Asker(again=True)).close()
    spare.run()
    assert (store.stats()["followed_prompts"], adaptive.shadows.asked) == (1, 3)


def test_before_the_pool_is_there_its_lane_is_left_alone() -> None:
    spare = ManualLane(bound=1)
    store = Store(Pool(9000, SLOT), orders=Adaptive().orders(), spare=spare)
    store.load(LAYOUT.keys([1])).close()
    assert len(spare) == 1, "the pool's pages"
    spare.run()
    assert store.touched.done() and store.stats()["followed_prompts"] == 1


def test_a_smaller_room_is_a_new_start_of_the_shadows() -> None:
    adaptive = Adaptive()
    live = adaptive(100)
    live.resize(50)
    prompt = SessionPrompt(LAYOUT.keys([1]), 0)
    whole(adaptive.following(prompt, threading.Lock()))
    assert adaptive.shadows.room == 50 and room_in(adaptive.shadows) == 50


@pytest.mark.parametrize(
    ("room", "part"),
    [(1, 1.0), (12_288, 1.0), (24_576, 0.5), (122_880, 0.1), (10**6, 12_288 / 10**6)],
)
def test_large_places_are_followed_in_part(room: int, part: float) -> None:
    shadows = Shadows(room, SavedCompute())
    assert shadows.part == part
    assert room_in(shadows) == max(8, int(room * part)) <= 12_288


def test_a_session_is_followed_with_all_its_turns_or_not_at_all() -> None:
    shadows, sessions = Shadows(122_880, SavedCompute()), Sessions(10_000)
    draw, turns = random.Random(1), {number: LAYOUT.keys([number, 1]) for number in range(400)}
    followed = dict.fromkeys(turns, 0)
    for _ in range(4):
        for number in draw.sample(sorted(turns), len(turns)):
            turns[number] = LAYOUT.keys([number, 1, *[2] * len(turns[number])])
            before = shadows.asked
            whole(shadows.seeing(SessionPrompt(turns[number], sessions.seen(turns[number]))))
            followed[number] += shadows.asked > before
    assert set(followed.values()) == {0, 4}
    assert 30 <= sum(count == 4 for count in followed.values()) <= 50


def test_a_setting_that_is_far_behind_sleeps_and_wakes_and_what_is_counted_only_grows() -> None:
    shadows, sessions = Shadows(60, SavedCompute()), Sessions(10_000)
    asleep, hits = list[int](), dict.fromkeys((each.name for each in shadows.settings), 0)
    for run in scans_and_a_loop(9000):
        whole(shadows.seeing(SessionPrompt(run, sessions.seen(run))))
        asleep.append(sum(each.order is None for each in shadows._contenders))
        before, hits = hits, shadows.hits()
        assert all(hits[name] >= before[name] for name in hits)
        assert shadows._contenders[0].order is not None, "LRU is what all are held against"
        assert shadows._contenders[shadows.now].order is not None
    assert max(asleep) > 0
    woken = [at for at in range(1, 9000) if asleep[at] < asleep[at - 1]]
    fell = [at for at in range(1, 9000) if asleep[at] > asleep[at - 1]]
    assert woken and woken[0] - fell[0] == 32 * 200
    assert shadows.hits()["lru"] == 0


def test_a_setting_that_is_clearly_better_rules_long_before_the_first_comparison() -> None:
    """Where LRU hits nothing at all."""
    shadows, sessions = Shadows(60, SavedCompute()), Sessions(10_000)
    for run in scans_and_a_loop(100):
        whole(shadows.seeing(SessionPrompt(run, sessions.seen(run))))
    assert shadows.hits()["lru"] == 0 and shadows.now != 0


def test_when_the_best_setting_does_much_worse_all_settings_wake() -> None:
    shadows, sessions = Shadows(60, SavedCompute()), Sessions(10_000)
    for run in scans_and_a_loop(4000):
        whole(shadows.seeing(SessionPrompt(run, sessions.seen(run))))
    assert any(each.order is None for each in shadows._contenders)
    for run in steps_of_one_size(600):
        whole(shadows.seeing(SessionPrompt(run, sessions.seen(run))))
    assert all(each.order is not None for each in shadows._contenders)
