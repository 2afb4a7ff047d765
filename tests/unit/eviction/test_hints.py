"""Hints: soft, bounded, expiring, cleared by the next use. What is over leaves first and is not
written below."""

import random
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker
from kvtier.core.pool import Pool
from kvtier.eviction.adaptive import Adaptive, Orders
from kvtier.eviction.hints import (
    LONGEST_KEEP_S,
    NO_HINT,
    PRIORITY_KEEP_S,
    Hint,
    read,
    salt_name,
    session_name,
    with_salt,
    without_salt,
)
from kvtier.eviction.order import SETTINGS, Segments
from kvtier.protocol import wire
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.answering import Session
from tests.clock import Clock
from tests.stores import SLOT, keys

OVER = Hint(over=True)
KEEPING = partial(Segments, setting=SETTINGS[1])


class Cache:
    """A Store with a tier that is written on eviction, or at once, lanes turned by hand, and a
    clock. ``keep``: the part that hints may keep."""

    def __init__(self, slots, policy=Segments, below=64, adaptive=None, keep=0.5, on_evict=True):
        self.tier, self.lane, self.spare, self.clock = (
            DictTier(below),
            ManualLane(),
            ManualLane(bound=1),
            Clock(),
        )
        places = [TierSpec(self.tier, self.lane, on_evict=on_evict)]
        own = Orders(policy, policy, policy, keep=keep)
        orders = own if adaptive is None else adaptive.orders()
        self.store = Store(Pool(slots, SLOT), places, orders, spare=self.spare, clock=self.clock)
        self.spare.run()

    def request(self, run, session=""):
        with self.store.load(run, asker=Asker(session)) as load:
            self.lane.run()
            ready = load.poll().ready
        with self.store.save(run) as lease:
            lease.commit()
        self.spare.run()
        self.lane.run()
        return ready

    def hint(self, run, hint, session=""):
        self.store.hint(run, hint, session)
        self.spare.run()

    @property
    def in_ram(self):
        return {key for key in self.store.every_key() if self.store.lookup([key]).ready}


@pytest.mark.parametrize("policy", [Segments, KEEPING])
def test_a_session_that_is_over_leaves_first_end_first_and_is_not_written(policy):
    cache = Cache(8, policy)
    old, ended = keys(1, 2), keys(5, 6, 7)
    cache.request(old)
    cache.request(ended)
    cache.hint(ended, OVER)
    cache.request(keys(8, 9, 10, 11))
    assert cache.in_ram >= {*old, *ended[:2]} and ended[2] not in cache.in_ram
    cache.request(keys(12, 13))
    assert cache.in_ram >= {*old} and not cache.in_ram & {*ended}
    assert not set(cache.tier.held) & {*ended}
    stats = cache.store.stats()
    assert stats["dict_spill_late"] == 0, "it was not meant to be written"
    assert stats["hints_over"] == 1
    cache.store.check(idle=True)


def test_what_another_session_shares_stays():
    cache = Cache(8)
    ended = keys(1, 2, 3)
    cache.request(keys(1, 8, 9))
    cache.request(ended)
    cache.hint(ended, OVER)
    assert cache.store._directory._over == {*ended[1:]}


def test_below_it_is_coldest_too():
    cache = Cache(2, below=3)
    for token in (1, 2, 3, 4):
        cache.request(keys(token))
    assert {*keys(1), *keys(2)} <= {*cache.tier.held}
    cache.hint(keys(2), OVER)
    cache.request(keys(5))
    assert {*keys(1)} <= {*cache.tier.held}, "it is older, but its session may go on"
    assert not {*keys(2)} & {*cache.tier.held}


def test_a_hint_for_which_too_much_was_used_to_remember_it_marks_nothing():
    cache = Cache(2, below=2)
    run = keys(1, 2)
    cache.request(run)
    cache.store.hint(run, OVER)
    for token in range(10, 20):
        cache.store.load(keys(token)).close()
    cache.spare.run()
    assert not cache.store._directory._over
    cache.request(run)
    cache.hint(run, OVER)
    assert cache.store._directory._over == {*run}, "the next hint does"


def test_a_session_can_be_closed_by_its_name():
    cache = Cache(8)
    cache.request(keys(1, 2), "one")
    cache.request(keys(1, 2, 3), "one")
    cache.request(keys(4, 5), "two")
    cache.hint([], OVER, "one")
    assert cache.store._directory._over == {*keys(1, 2, 3)}
    cache.hint([], OVER, "nobody knows it")
    cache.store.check(idle=True)


def test_a_wrong_hint_costs_one_recompute():
    cache = Cache(6, below=6)
    run = keys(1, 2, 3)
    cache.request(run)
    cache.hint(run, OVER)
    cache.request(keys(7, 8, 9, 10, 11, 12))
    assert cache.request(run) == 0
    cache.request(keys(13, 14))
    assert cache.request(run) == 3


def test_wrong_hints_of_one_client_change_nothing_for_another():
    cache = Cache(4)
    for number in range(120):
        wrong = keys(1000 + number)
        cache.request(wrong)
        cache.hint(wrong, OVER)
        if number % 10 == 0:
            cache.request([*wrong, *keys(5000 + number)])
    ended = keys(1, 2)
    cache.request(ended)
    cache.hint(ended, OVER)
    for token in (7, 8, 9, 10):
        cache.request(keys(token))
    assert not cache.in_ram & {*ended} and not set(cache.tier.held) & {*ended}


@pytest.mark.parametrize("policy", [Segments, KEEPING])
def test_what_is_kept_outlives_what_came_later_until_its_time_is_over(policy):
    cache = Cache(6, policy)
    run = keys(1, 2, 3)
    cache.request(run)
    cache.hint(run, Hint(keep_s=60))
    for number in range(10):
        cache.request(keys(100 + number, 200 + number))
        cache.clock.now += 5
    assert cache.in_ram >= {*run}
    cache.request(run)
    cache.clock.now += 40
    cache.request(keys(300, 301))
    assert cache.in_ram >= {*run}, "the time begins anew with each use"
    cache.clock.now += 61
    for number in range(10):
        cache.request(keys(400 + number, 500 + number))
    assert not cache.in_ram & {*run}


def test_no_more_than_half_is_kept_and_a_full_cache_still_takes_new_chunks():
    cache = Cache(8)
    for number in range(8):
        run = keys(100 + number)
        cache.request(run)
        cache.hint(run, Hint(keep_s=1000))
    assert list(cache.store._directory.order.kept) == [
        keys(100 + number)[0] for number in (4, 5, 6, 7)
    ]
    new = keys(*range(20, 28))
    cache.request(new)
    assert cache.in_ram == {*new}, "kept is no pin"


def test_hints_are_dropped_and_counted_rather_than_queued_without_end():
    cache = Cache(8)
    for _ in range(300):
        cache.store.hint(keys(1), OVER)
    assert cache.store.stats()["hints_dropped"] == 300 - 256
    cache.spare.run()
    assert cache.store.stats()["hints_followed"] == 256


@pytest.mark.parametrize(
    ("given", "hint", "bad"),
    [
        ({}, NO_HINT, 0),
        ({"over": True}, OVER, 0),
        ({"keep_s": 30}, Hint(keep_s=30.0), 0),
        ({"keep_s": 10**9}, Hint(keep_s=LONGEST_KEEP_S), 0),
        ({"priority": 5}, Hint(keep_s=PRIORITY_KEEP_S), 0),
        ({"priority": -1}, NO_HINT, 0),
        ({"priority": 1, "keep_s": 900.5}, Hint(keep_s=900.5), 0),
        ({"over": "yes", "keep_s": -1, "priority": None, "colour": 1}, NO_HINT, 4),
        ({"keep_s": True}, NO_HINT, 1),
        ({"keep_s": float("nan")}, NO_HINT, 1),
        ({"keep_s": 10**400}, NO_HINT, 1),
        ({"keep_s": "5m", "over": True}, OVER, 1),
    ],
)
def test_words_are_read_and_bad_ones_counted(given, hint, bad):
    assert read(given) == (hint, bad)


PROMPTS = st.sampled_from(
    [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 1), (1, 0, 1), (2,), (3, 3, 3, 3)]
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load", "save", "over", "keep", "turn", "lanes", "forget", "time"]),
            PROMPTS,
        ),
        max_size=60,
    ),
    st.sampled_from([*(partial(Segments, setting=each) for each in SETTINGS), None]),
)
@example([("load", (0,)), ("over", (0,)), ("save", (0,)), ("turn", (0,))], Segments)
@example(
    [("load", (0, 0)), ("load", (0,)), ("save", (0, 0)), ("over", (0,)), ("turn", (0,))], Segments
)
def test_a_mark_never_outlives_a_later_use(steps, policy):
    adaptive = Adaptive() if policy is None else None
    cache = Cache(5, policy or Segments, below=3, adaptive=adaptive)
    touched: dict[ChunkKey, int] = {}
    hinted: dict[int, int] = {}
    """When each session was over: the ends of its earlier prompts are over with it."""
    session: dict[ChunkKey, int] = {}
    for now, (step, prompt) in enumerate(steps, 1):
        run = keys(*prompt)
        session.update(dict.fromkeys(run, prompt[0]))
        if step == "load":
            cache.store.load(run, asker=Asker(str(prompt[0]))).close()
            touched.update(dict.fromkeys(run, now))
        elif step == "save":
            with cache.store.save(run) as lease:
                lease.commit()
            touched.update(dict.fromkeys(run, now))
        elif step == "over":
            cache.store.hint(run, OVER)
            hinted[prompt[0]] = now
        elif step == "keep":
            cache.store.hint(run, Hint(keep_s=random.Random(now).choice([1, 100])))
        elif step == "forget":
            cache.store.invalidate(run[-1:])
        elif step == "time":
            cache.clock.now += 50
        elif step == "turn":
            cache.spare.run()
        else:
            cache.lane.run()
        cache.store.check()
        for key in cache.store._directory._over:
            assert hinted[session[key]] > touched[key], "it was used after it was said to be over"
    cache.lane.run()
    cache.store.check(idle=True)


WORDS = st.text(alphabet='ab"\\,[] ', max_size=4)
NAMES = st.tuples(st.none() | WORDS, WORDS)


@given(NAMES, NAMES)
@example(("a", "bc"), ("ab", "c"))
@example(("", "abc"), ("abc", ""))
def test_sessions_have_one_name_only_when_salt_and_session_are_the_same(one, other):
    same = ((one[0] or "", one[1]) == (other[0] or "", other[1])) or not (one[1] or other[1])
    assert (session_name(*one) == session_name(*other)) == same


def test_a_server_is_told_of_the_salt_of_a_client_that_keeps_a_prompt():
    store = Store(Pool(8, SLOT))
    session = Session(store, 1)
    with store.save(run := keys(1, 2), 1) as lease:
        lease.commit()
    salt = salt_name("s3cret \ud800")
    assert len(salt) == 16 and salt != salt_name("s3cret")
    assert (salt_name(None), salt_name("")) == ("", "")
    name = session_name("s3cret", "chat")
    assert without_salt(with_salt(name, salt)) == (name, salt)
    assert without_salt(with_salt(name, "")) == (name, "")
    session.answer(wire.HintCall(wire.joined(run), False, 60.0, with_salt(name, salt)))
    store.follower.work(lambda: None)
    assert {stay.salt for stay in store._directory.order.kept.stays.values()} == {salt}
