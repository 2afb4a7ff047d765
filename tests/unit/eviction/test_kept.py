"""What is kept by hints: at most a part of each place for each tenant, in lower tiers too, and the
part is configured."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.eviction.hints import Hint
from kvtier.eviction.kept import Kept
from kvtier.eviction.order import SETTINGS, Owned, Segments
from kvtier.store.directory import Directory
from kvtier.testing import DictTier
from tests.stores import SLOT, assembled, filled, keys, over, save
from tests.unit.eviction.test_hints import Cache


def key(number):
    return keys(number)[0]


def keep_some(directory, owner, first, count, salt=""):
    """``count`` prompts of one chunk each, all of which their owner wants to keep."""
    for number in range(first, first + count):
        entry = filled(directory, key(number), owner=owner)
        directory.keep([entry.key], 60.0, salt)
        directory.check(idle=True)


def kept_by(directory, owner):
    return [*directory.order.kept.of(owner)]


def test_each_tenant_has_a_bound_of_its_own():
    directory = Directory(20, keep=0.25)
    keep_some(directory, 1, 100, 8)
    keep_some(directory, 2, 200, 8)
    assert kept_by(directory, 1) == [key(number) for number in range(103, 108)]
    assert kept_by(directory, 2) == [key(number) for number in range(203, 208)]


def test_of_a_quota_as_large_a_part_is_kept_as_of_the_whole():
    directory = Directory(16, share=0.5)
    keep_some(directory, 1, 100, 8)
    assert kept_by(directory, 1) == [key(number) for number in (104, 105, 106, 107)]
    for number in range(300, 304):
        filled(directory, key(number), owner=1)
    assert all(directory.get(key(number)) for number in (104, 105, 106, 107)), "others left first"


def test_of_two_clients_with_salts_the_one_that_keeps_more_gives_way():
    directory = Directory(128)
    keep_some(directory, 1, 100, 30, "quiet")
    keep_some(directory, 1, 300, 90, "greedy")
    keep_some(directory, 1, 500, 2, "late")
    kept = set(kept_by(directory, 1))
    assert len(kept) == 64 and kept >= {key(number) for number in [*range(100, 130), 500, 501]}
    assert kept - {key(number) for number in [*range(100, 130), 500, 501]} == {
        key(number) for number in range(358, 390)
    }, "of the greedy one's the coldest left"


def test_a_client_alone_may_keep_what_its_tenant_may():
    directory = Directory(16)
    keep_some(directory, 1, 100, 12, "alone")
    assert kept_by(directory, 1) == [key(number) for number in range(104, 112)]


def test_what_a_salt_keeps_in_ram_it_keeps_in_the_tiers_too():
    store, (lane,) = over(DictTier(32), slots=32)
    save(store, keys(1), owner=1)
    store._directory.keep([key(1)], 60.0, "salt")
    lane.run()
    assert [place.kept.stays[key(1)].salt for place in store._directory._orders] == ["salt"] * 2


def test_who_keeps_nothing_has_a_quarter_left():
    directory = Directory(16)
    keep_some(directory, 1, 100, 7)
    for owner in (2, 3, 4):
        keep_some(directory, owner, 100 * owner, 4)
    kept = [len(kept_by(directory, owner)) for owner in (1, 2, 3, 4)]
    assert sum(kept) == 12
    assert max(kept) - min(kept) <= 1, "who keeps most gives way"


def test_each_chunk_gets_its_turn_to_be_looked_at():
    order = Owned(Segments(40), False, Kept(40))
    long, short = [[key(number) for number in part] for part in (range(12), range(12, 16))]
    for each in (*long, *short):
        order.add((each,))
    order.keep(long, 1000.0)
    order.keep(short, 10.0)
    for _ in range(3):
        order.tick(20.0)
    assert {*order.kept.stays} == {*long}


def test_the_time_begins_anew_with_each_use():
    order = Owned(Segments(40), False, Kept(40))
    used, unused = key(1), key(2)
    for each in (used, unused):
        order.add((each,))
        order.keep([each], 10.0)
    order.tick(9.0)
    order.used([used])
    order.tick(11.0)
    assert {*order.kept.stays} == {used}
    order.tick(19.0)
    assert not order.kept.stays


@pytest.mark.parametrize("on_evict", [False, True])
def test_a_tier_keeps_it_too_whenever_it_is_written(on_evict):
    cache = Cache(4, below=6, keep=1.0, on_evict=on_evict)
    for number in (1, 2, 3):
        cache.request(keys(number))
        cache.hint(keys(number), Hint(keep_s=60))
    cache.request(keys(4))
    for number in range(100, 130):
        cache.request(keys(number, number + 1000, number + 2000, number + 3000))
    assert cache.store.lookup([key(1)]).ready == 0, "it had to leave RAM"
    assert key(1) in cache.tier.held
    assert cache.request(keys(1)) == 1
    assert key(1) in cache.store._directory.order.kept.stays, "in RAM it is kept again"
    cache.store.check(idle=True)


def test_what_is_over_is_kept_nowhere():
    cache = Cache(4, below=6, on_evict=False)
    cache.request(keys(1))
    cache.hint(keys(1), Hint(keep_s=60))
    cache.hint(keys(1), Hint(over=True))
    for number in range(100, 106):
        cache.request(keys(number))
    assert cache.store.lookup([key(1)]).known == 0
    assert key(1) not in cache.tier.held


@pytest.mark.parametrize(("given", "kept"), [({"keep_percent": 25}, 4), ({}, 8)])
def test_it_is_configured(given, kept):
    store = assembled(ram_bytes=16 * SLOT, **given)
    for number in range(16):
        save(store, keys(number))
        store._directory.keep(keys(number), 60.0)
    assert len(store._directory.order.kept) == kept
    assert store.close()


@pytest.mark.parametrize("bad", ["0", "101", "half", "50 %"])
def test_what_is_no_part_is_told_in_words(bad, monkeypatch):
    monkeypatch.setenv("KVTIER_KEEP_PERCENT", bad)
    with pytest.raises(ConfigError, match="a whole number from 1 to 100"):
        load()


def test_a_file_has_it_in_the_section_of_the_engine(tmp_path):
    path = tmp_path / "kvtier.yaml"
    path.write_text("engine:\n  keep_percent: 30\n")
    assert load(str(path)).engine.keep_percent == 30
    assert Config().engine.keep_percent == 50


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "keep", "use", "cool", "leave", "lose", "time", "room"]),
        st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True),
        st.integers(1, 3),
    ),
    max_size=80,
)


class Model:
    """What an order of 12 chunks has to hold, beside the order."""

    def __init__(self, order):
        self.order, self.now = order, 0.0
        self.owners: dict[ChunkKey, int] = {}
        self.longest: dict[ChunkKey, float] = {}
        """No chunk may be kept longer than this."""

    def step(self, step, run, number):
        getattr(self, step)(run, number)

    def add(self, run, number):
        for each in run:
            if each not in self.owners:
                self.owners[each] = number
                self.order.add((each,), number)

    def keep(self, run, number):
        self.order.keep(run, 10.0 * number, f"salt {number % 2}")
        self.longest |= dict.fromkeys(run, self.now + 10.0 * number)

    def use(self, run, number):
        self.order.used(run)
        stays = [stay for each in run if (stay := self.order.kept.stays.get(each)) is not None]
        assert all(stay.until == self.now + stay.seconds for stay in stays)
        self.longest |= dict.fromkeys(run, self.now + 30.0)

    def cool(self, run, number):
        self.order.cool(run)
        assert not {*run} & {*self.order.kept.stays}

    def leave(self, run, number):
        self.order.evicted((run[0],))
        self.owners.pop(run[0], None)

    def lose(self, run, number):
        self.order.discard(run[0])
        self.owners.pop(run[0], None)

    def time(self, run, number):
        self.now += 10.0 * number
        for _ in range(3):
            self.order.tick(self.now)
        assert all(self.longest[each] > self.now for each in self.order.kept.stays)

    def room(self, run, number):
        self.order.resize(4 * number)

    def check(self, split):
        order, held = self.order, self.owners.keys()
        assert order.kept.check() == []
        assert sorted(order) == sorted(held) == sorted(order.keys())
        assert [*order][len(order) - len(order.kept) :] == [*order.kept], "what is kept is last"
        assert all(order.owner(each) == owner for each, owner in self.owners.items())
        for one in (1, 2, 3) if split else ():
            own = {each for each, owner in self.owners.items() if owner == one}
            assert {*order.part(one)} == own and order.count(one) == len(own)


@given(
    STEPS,
    st.sampled_from([Segments, partial(Segments, setting=SETTINGS[1])]),
    st.booleans(),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_no_owner_ever_keeps_more_than_its_part_and_no_key_is_lost(steps, policy, split, part):
    model = Model(Owned(policy(12), split, Kept(12, part)))
    for step, numbers, number in steps:
        model.step(step, [key(each) for each in numbers], number)
        model.check(split)
