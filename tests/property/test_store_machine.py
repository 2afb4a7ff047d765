"""A model of the Store driven at random: whatever the order of saves, loads, evictions, faults and
lane work, no byte is served that was not saved for that key, and nothing leaks."""

import hashlib
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.lookup import RAM_PLACE
from kvtier.core.pool import Pool
from kvtier.core.tenant import UNOWNED
from kvtier.eviction.order import SETTINGS
from kvtier.store.lease import LoadLease, SaveLease
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.lower.write_budget import WriteBudget
from kvtier.testing import DictTier, ManualLane
from tests.trust.clients import PROMPTS, opened

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "machine"}), 4, 4, (SLOT,))
PROMPT = st.sampled_from(PROMPTS)


def keys_of(prompt):
    return LAYOUT.keys([token for chunk in prompt for token in [chunk] * 4])


def content(key):
    return hashlib.sha256(key).digest() * (SLOT // 32)


class RottenTier(DictTier):
    """Fails as the test says: a read or write that fails, as a value. Content is never wrong when
    it says True.

    ``during`` is called in the middle of every call, where a real tier takes its time and other
    threads run.
    """

    def __init__(self, capacity, shared):
        super().__init__(capacity, name="shared" if shared else "rotten")
        self.shared = shared
        self.failing = self.ever_failed = self.away = False
        self.during: Callable[[], None] = lambda: None
        self.whole, self.gone = capacity, False
        self.aside: dict[ChunkKey, bytes] = {}
        self.lost, self.back = list[ChunkKey](), list[ChunkKey]()

    def lose_a_disk(self, gone):
        """Half of what it holds, with its room, until it comes back."""
        if gone and not self.gone:
            going = [key for key in self.held if key[-1] % 2]
            self.aside = {key: self.held.pop(key) for key in going}
            self.capacity = self.whole - len(going)
            self.lost += going
            self.back = [key for key in self.back if key in self.held]
        elif self.gone and not gone:
            self.back += [key for key in self.aside if key not in self.held]
            self.held |= self.aside
            self.capacity, self.aside = self.whole, {}
        self.gone = gone

    def lost_and_found(self):
        told, self.lost, self.back = (self.lost, self.back), [], []
        return told

    def find(self, keys):
        found = super().find(keys)
        self.during()
        return found

    def delete(self, key):
        self.during()
        self.aside.pop(key, None)
        super().delete(key)

    def write(self, key, data, owner=UNOWNED):
        self.during()
        return not (self.failing or self.away) and super().write(key, data, owner)

    def read(self, key, into):
        self.during()
        if self.away or key in self.aside:
            into[:] = b"\xee" * len(into)
            return None
        if self.failing:
            into[:] = b"\xee" * len(into)
            self.delete(key)
            return False
        return super().read(key, into)


class StoreMachine(RuleBasedStateMachine):
    saves = Bundle("saves")
    loads = Bundle("loads")

    @initialize(
        slots=st.integers(1, 5),
        capacity=st.integers(1, 6),
        tiers=st.integers(1, 2),
        bound=st.integers(2, 8),
        on_evict=st.booleans(),
        budgeted=st.booleans(),
        setting=st.sampled_from(SETTINGS),
    )
    def start(self, *, slots, capacity, tiers, bound, on_evict, budgeted, setting):
        self.tiers = [RottenTier(capacity + index, shared=index == 1) for index in range(tiers)]
        self.lanes = [ManualLane(urgent_bound=bound, bound=bound) for _ in self.tiers]
        self.now = 0.0
        budget = (
            WriteBudget(86_400 * SLOT // 60, SLOT) if budgeted else None
        )  # ten chunks, then one a minute
        places = [TierSpec(*each) for each in zip(self.tiers, self.lanes, strict=True)]
        places[0] = places[0]._replace(budget=budget, on_evict=on_evict)
        self.store = opened(Pool(slots, SLOT), places, setting, lambda: self.now)
        self.watched = self.store.watch()
        self.told: set[tuple[int, ChunkKey]] = set()
        """What the changes so far amount to: places and chunks."""
        self.saved: set[ChunkKey] = set()
        self.meanwhile: list[list[int]] = []
        for tier in self.tiers:
            tier.during = self.do_meanwhile
        self.filling: dict[int, ChunkKey] = {}
        self.open_loads: list[LoadLease] = []
        self.open_saves: list[SaveLease] = []

    @rule(target=saves, prompt=PROMPT)
    def save(self, prompt):
        lease = self.store.save(keys_of(prompt))
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            assert slot not in self.filling, "a slot has two writers"
            self.filling[slot] = key
        self.open_saves.append(lease)
        return lease

    @rule(lease=consumes(saves), commit=st.booleans())
    def end_save(self, lease, commit):
        for key, slot, view in zip(lease.keys, lease.slots, lease.views(), strict=True):
            view[:] = content(key)
            del self.filling[slot]
        self.open_saves.remove(lease)
        if commit:
            lease.commit()
            self.saved.update(lease.keys)
        else:
            for view in lease.views():
                view[:] = b"\xdd" * SLOT
            lease.close()

    @rule(prompt=PROMPT)
    def save_whole(self, prompt):
        """The common case in one step, so that walks get deep."""
        keys = keys_of(prompt)
        before = self.store.lookup(keys).ready
        with self.store.save(keys) as lease:
            for key, slot, view in zip(lease.keys, lease.slots, lease.views(), strict=True):
                assert slot not in self.filling, "a slot has two writers"
                view[:] = content(key)
            lease.commit()
            self.saved.update(lease.keys)
        after = self.store.lookup(keys)
        if len(keys) <= self.store.most_held:
            assert after.ready >= before, "a run pushed out its own chunks"
        assert after.known >= before, "a longer one pushes out what lies below, and no more"

    @rule(prompts=st.lists(PROMPT, max_size=3))
    def plan_meanwhile(self, prompts):
        """What other threads will do in the middle of the next calls of a tier."""
        self.meanwhile = prompts

    def do_meanwhile(self):
        self.store.check()
        if self.meanwhile:
            prompt = self.meanwhile.pop()
            self.save_whole(prompt)
            self.store.invalidate(keys_of(prompt)[:1] if len(prompt) == 1 else [])
            self.store.check()

    @rule(target=loads, prompt=PROMPT, start=st.integers(0, 1), most=st.none() | st.integers(0, 3))
    def load(self, prompt, start, most):
        lease = self.store.load(keys_of(prompt), start, most=most)
        assert most is None or sum(lease.poll()) <= most
        self.open_loads.append(lease)
        return lease

    @rule(target=loads, prompt=PROMPT, start=st.integers(0, 1))
    def load_ready(self, prompt, start):
        keys = keys_of(prompt)
        is_ready = self.store.lookup(keys[start:]).ready == len(keys[start:])
        lease = self.store.load_ready(keys, start)
        assert (lease is not None) == is_ready
        if lease is None:
            lease = self.store.load(keys, start)
        self.open_loads.append(lease)
        return lease

    @rule(prompt=PROMPT, start=st.integers(0, 1))
    def load_unknown(self, prompt, start):
        keys = keys_of(prompt)
        result = self.store.lookup(keys[start:])
        found = self.store.load_unknown(keys, start)
        nothing = len(keys) > start and not result.known and result.asking is None
        assert (found is not None) == nothing
        if found is not None:
            assert found[0] == result
            found[1].close()

    @rule(lease=loads)
    def poll(self, lease):
        before = lease.ready
        ready, _ = lease.poll()
        assert ready >= before or not lease.open
        self.serves_only_what_was_saved(lease)

    @rule(lease=consumes(loads))
    def end_load(self, lease):
        self.serves_only_what_was_saved(lease)
        lease.close()
        lease.close()
        self.open_loads.remove(lease)

    @rule(prompt=PROMPT)
    def forget(self, prompt):
        keys = keys_of(prompt)
        self.store.invalidate(keys[-1:])

    @rule(prompt=PROMPT)
    def match(self, prompt):
        keys = keys_of(prompt)
        ready, coming = self.store.lookup(keys).progress
        assert ready + coming <= len(keys)
        assert set(keys[:ready]) <= self.saved
        result = self.store.lookup(keys)
        assert (result.ready, result.known) == (ready, ready + coming)
        assert all(seconds is None or seconds >= 0 for _, seconds in result.steps)

    @rule(prompt=PROMPT)
    def decline(self, prompt):
        """Time passes, so that a trial read is due."""
        self.now += 60
        self.store.decline(keys_of(prompt), "slower")

    @rule(lane=st.integers(0, 1), index=st.integers(0, 3))
    def turn(self, lane, index):
        if lane < len(self.lanes) and len(self.lanes[lane]) > index:
            self.lanes[lane].turn(index)

    @rule()
    def run_lanes(self):
        for lane in [*self.lanes, *self.lanes]:
            lane.run()

    @rule(tier=st.integers(0, 1), failing=st.booleans(), away=st.booleans())
    def break_or_mend(self, tier, failing, away):
        if tier < len(self.tiers):
            self.tiers[tier].failing, self.tiers[tier].away = failing, away
            self.tiers[tier].ever_failed |= failing

    @rule(gone=st.booleans())
    def lose_a_disk_or_get_it_back(self, gone):
        self.tiers[0].lose_a_disk(gone)

    @invariant()
    def rules_hold(self):
        self.store.check()
        for tier in self.tiers:
            assert len(tier.held) <= tier.capacity

    @invariant()
    def changes_amount_to_what_is_held(self):
        saved: ChunkKey | None = None
        for place, key, there in self.watched.changes() or ():
            saved = key if place == RAM_PLACE and there else saved if key == saved else None
            again = place != RAM_PLACE and there and key == saved
            assert again or ((place, key) in self.told) != there, "a change that changes nothing"
            (self.told.add if there else self.told.discard)((place, key))
        every = list(set(self.store.every_key()))
        places = zip(every, self.watched.places(every), strict=True)
        assert self.told == {(place, key) for key, found in places for place in found}

    def serves_only_what_was_saved(self, lease):
        for key, slot, view in zip(lease.keys, lease.slots, lease.views(), strict=False):
            assert slot not in self.filling, "a slot is read and written at once"
            assert key in self.saved
            assert bytes(view) == content(key)

    def teardown(self):
        """Whatever happened: when every owner has let go and the lanes are empty, nothing is left
        in between."""
        if not hasattr(self, "store"):
            return
        for lane in [*self.lanes, *self.lanes]:
            lane.run()
        for lease in self.open_loads:
            coming = lease.poll().coming
            assert coming == 0, "a lane has run dry, so nothing can be on its way"
            self.serves_only_what_was_saved(lease)
            lease.close()
        for save in self.open_saves:
            save.close()
        self.filling.clear()
        for lane in [*self.lanes, *self.lanes]:
            lane.run()
        for gone in (self.tiers[0].gone, False):
            self.tiers[0].lose_a_disk(gone)
            self.store.lower[0].sweep()
            assert self.store.stats()["rotten_held"] <= self.tiers[0].capacity
        self.store.check(idle=True)
        for index, tier in enumerate(self.tiers):
            held = set(tier.held)
            known = self.store.stats()[f"{tier.name}_held"]
            assert known <= tier.capacity and len(held) <= tier.capacity, index
            if not tier.ever_failed:
                assert known == len(held), "the index and the tier disagree"
        self.store.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=300, stateful_step_count=60)
