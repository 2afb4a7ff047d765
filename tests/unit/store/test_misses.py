"""What a Store says of chunks it cannot give: each miss under one reason, in its counts and in its
forecasts."""

import pytest

from kvtier.core.lookup import Served
from kvtier.testing import DictTier
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from tests.stores import SLOT, AwayTier, held, keys, over, save


class Bench:
    def __init__(self, *tiers, slots=4):
        self.store, self.lanes = over(*tiers, slots=slots)

    def save(self, run):
        save(self.store, run, *self.lanes)

    def missed(self, run, most=None):
        """What loading the run adds to the counts."""
        before = self.store.stats()
        with self.store.load(run, most=most):
            for lane in self.lanes:
                lane.run()
        after = self.store.stats()
        return {
            name.removeprefix("missed_"): after[name] - before.get(name, 0)
            for name in after
            if name.startswith("missed_") and after[name] > before.get(name, 0)
        }


def test_cold_evicted_forgotten_and_saving():
    bench = Bench(slots=2)
    assert bench.store.lookup(keys(1, 2)).why == "cold"
    assert bench.missed(keys(1, 2)) == {"cold": 2}
    bench.save(keys(1, 2))
    assert bench.store.lookup(keys(1, 2)).why == ""
    assert bench.missed(keys(1, 2, 3)) == {"cold": 1}
    bench.save(keys(8, 9))
    assert bench.store.lookup(keys(1, 2)).why == "evicted"
    assert bench.missed(keys(1, 2)) == {"evicted": 2}
    bench.store.invalidate_all()
    assert bench.missed(keys(8, 9)) == {"forgotten": 2}
    with bench.store.save(keys(5)):
        assert bench.missed(keys(5, 6)) == {"saving": 2}


def test_the_last_departure_from_the_last_place_counts():
    bench = Bench(DictTier(3), slots=2)
    bench.save(keys(1, 2))
    bench.save(keys(8))
    assert bench.missed(keys(1, 2)) == {}, "it left RAM, and lies below"
    bench.save(keys(8, 9))
    bench.save(keys(5, 6))
    assert bench.missed(keys(1, 2)) == {"evicted": 2}


def test_what_the_disk_gives_back_wrong_is_corrupt(tmp_path):
    bench = Bench(DiskSet([DiskPlace(tmp_path, 1 << 17, 1)], SLOT), slots=1)
    bench.save(keys(1))
    bench.save(keys(2))
    slots = tmp_path / "slots.kvtier"
    slots.write_bytes(bytes(slots.stat().st_size))
    assert bench.missed(keys(1)) == {}, "it was there when it was asked for"
    assert bench.store.lookup(keys(1)).why == "corrupt"
    assert bench.missed(keys(1)) == {"corrupt": 1}
    bench.store.close()


def test_a_tier_that_does_not_answer_is_told_from_a_miss():
    tier = AwayTier(8)
    bench = Bench(tier, slots=1)
    bench.save(keys(1))
    bench.save(keys(2))
    tier.away = True
    for _ in range(3):
        bench.missed(keys(1))
    assert bench.store.lookup(keys(1, 3)).why == "tier_down"
    assert bench.missed(keys(1, 3)) == {"tier_down": 2}
    assert bench.missed(keys(7)) == {"cold": 1}, "nobody else writes there: we would know"


@pytest.mark.parametrize(("away", "why"), [(True, "tier_down"), (False, "cold")])
def test_nobody_knows_what_a_shared_tier_has_while_it_is_away(away, why):
    tier = AwayTier(8, shared=True)
    bench = Bench(tier)
    for _ in range(3 * away):
        tier.breakers[False].fault()
    assert bench.missed(keys(1, 2, 3)) == {why: 3}


def test_a_run_that_a_shared_tier_has_in_part_is_counted_when_it_has_answered():
    tier = DictTier(8, shared=True)
    bench = Bench(tier)
    tier.held = held(keys(1, 2))
    assert bench.missed(keys(1, 2, 3, 4)) == {"cold": 2}


def test_what_lies_behind_declined_chunks_is_not_counted():
    bench = Bench()
    bench.save(keys(1, 2))
    assert bench.missed(keys(1, 2, 3), most=1) == {}
    assert bench.missed(keys(1, 2, 3), most=2) == {"cold": 1}


def test_an_ideal_cache_hits_what_left_for_want_of_room_and_no_more():
    bench = Bench(slots=2)

    def ideal(run, asked, hits=0, end=0):
        before = bench.store.stats()["ideal_tokens"]
        bench.store.served(Served(asked, {"ram": hits}, run, 10, end))
        return bench.store.stats()["ideal_tokens"] - before

    assert ideal(keys(1, 2, 3), 30) == 0, "they are seen for the first time"
    bench.save(keys(1, 2))
    assert ideal(keys(1, 2, 3), 30) == 20, "they are there"
    bench.save(keys(8, 9))
    assert bench.store.lookup(keys(1, 2)).why == "evicted"
    assert ideal(keys(1, 2, 3), 30) == 20, "they were there"
    assert ideal(keys(1, 2, 3), 26, end=4) == 16, "the engine has a part of the first"
    assert ideal(keys(1, 2, 3), 15) == 15, "never more than was asked for"
    assert ideal(keys(1, 2)[1:], 20, hits=10) == 20, "hits count too"
    bench.store.invalidate_all()
    assert ideal(keys(8, 9), 20) == 0, "what was cleared is gone for any cache"
    status = bench.store.status()
    assert (status.asked_tokens, status.tiers[0].hit_tokens) == (30 + 30 + 30 + 26 + 15 + 40, 10)
