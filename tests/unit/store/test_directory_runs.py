"""Chunks of a run are reserved and filled together with the same effect as one after the other."""

import random
from functools import partial

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.eviction.order import SETTINGS, Segments
from kvtier.store.directory import Directory
from kvtier.store.entry import Entry
from kvtier.store.observer import Left, Observer

ROOM = 24
KEYS = [ChunkKey(number.to_bytes(40)) for number in range(90)]


class Told(Observer):
    def __init__(self):
        self.events: list[tuple[int, ChunkKey, Left | None]] = []

    def came(self, place, key):
        self.events.append((place, key, None))

    def left(self, place, key, how):
        self.events.append((place, key, how))


class Place:
    """A Directory, and what goes on there."""

    def __init__(self, policy, share, *, together):
        self.directory = Directory(ROOM, (100,), policy, share, keep=0.3)
        self.told, self.together = Told(), together
        self.directory.observers.add(self.told)
        self.filling = list[list[Entry]]()
        self.read = list[Entry]()
        self.written = list[Entry]()

    def reserve(self, run, owner):
        directory, keep, made = self.directory, frozenset(run), list[Entry]()
        directory.ordered(run)
        absent = directory.absent(run)
        if self.together:
            made = directory.reserve_run(absent, keep, owner)
        else:
            for key in absent:
                entry = directory.reserve(key, keep, None, owner)
                if entry is None:
                    break
                made.append(entry)
        self.filling.append(made)

    def filled(self):
        made = self.filling.pop(0) if self.filling else []
        if self.together:
            self.directory.filled(made)
        for entry in () if self.together else made:
            self.directory.filled((entry,))

    def step(self, draw):
        first = draw.randrange(len(KEYS) - 12)
        run = KEYS[first : first + draw.randint(1, 12)]
        draw.choice(
            (
                *3 * (lambda: self.reserve(run, draw.randrange(3)),),
                *2 * (self.filled,),
                lambda: self.read_(run),
                self.let_go,
                lambda: self.write(draw.randrange(4)),
                lambda: self.directory.keep(run, 9.0),
                lambda: self.directory.over(run),
                lambda: self.directory.invalidate(run[0]),
                lambda: self.resize(draw.choice((ROOM // 2, ROOM)), draw.randrange(3)),
            )
        )()

    def read_(self, run):
        self.directory.used(run)
        self.read += self.directory.pin_ready(run)

    def let_go(self):
        while self.read:
            self.directory.unpin((self.read.pop(),))

    def write(self, most):
        for entry in self.written:
            self.directory.spill_ended(entry, 0, stored=True)
        named = self.directory.next_out()[:most]
        self.written = [each for each in named if self.directory.spill_begun(each, 0) is not None]

    def resize(self, slots, most):
        self.directory.resize(slots, most)
        self.directory.slots.gave_back(self.directory.slots.leaving(9))

    def state(self):
        directory = self.directory
        return (
            list(directory.order),
            self.told.events,
            directory.usage(),
            directory.crowded,
            directory.evicted,
            directory.evicted_unoffered,
            directory.order.owners(),
            [[entry.key for entry in made] for made in self.filling],
        )


@pytest.mark.parametrize("share", [None, 0.4], ids=["no quotas", "quotas"])
@pytest.mark.parametrize(
    "policy", [Segments, partial(Segments, setting=SETTINGS[1])], ids=["lru", "segments"]
)
def test_a_run_has_the_effect_of_its_chunks_one_after_the_other(policy, share):
    refused = passed_over = 0
    for seed in range(60):
        one, all_at_once = (Place(policy, share, together=each) for each in (False, True))
        drawn = random.Random(seed), random.Random(seed)
        for _ in range(120):
            for place, draw in zip((one, all_at_once), drawn, strict=True):
                place.step(draw)
                place.directory.check()
            assert all_at_once.state() == one.state()
            passed_over += bool(one.written and one.read and one.directory.evicted)
        refused += one.directory.crowded[0] > one.directory.evicted
    assert refused > 20 and passed_over > 50


@pytest.mark.parametrize("share", [None, 0.4], ids=["no quotas", "quotas"])
@pytest.mark.parametrize("run", [KEYS[:3], [KEYS[2], KEYS[3], KEYS[2]]], ids=["there", "twice"])
def test_a_run_with_a_chunk_that_is_there_or_named_twice_is_refused_whole(run, share):
    directory = Directory(ROOM, share=share)
    directory.reserve(KEYS[1], ())
    with pytest.raises(StateError, match="filling, ready or named twice"):
        directory.reserve_run(run, ())
    directory.check()
    assert directory.absent(KEYS[:4]) == [KEYS[0], KEYS[2], KEYS[3]]


def test_a_run_that_is_filled_twice_is_an_error():
    directory = Directory(ROOM)
    made = directory.reserve_run(KEYS[:3], ())
    directory.filled(made[:1])
    with pytest.raises(StateError, match="is ready, expected filling"):
        directory.filled(made)


def test_of_a_run_that_is_filled_what_has_gone_meanwhile_is_passed_over():
    directory = Directory(ROOM)
    made = directory.reserve_run(KEYS[:3], ())
    directory.fill_failed(made[1])
    directory.filled(made)
    directory.check(idle=True)


def test_an_owner_of_whose_run_nothing_is_left_has_no_order_of_its_own():
    directory = Directory(ROOM, share=0.5)
    made = directory.reserve_run(KEYS[:3], (), 7)
    for entry in made:
        directory.fill_failed(entry)
    directory.filled(made)
    directory.order.add([], 7)
    assert directory.order.owners() == set()
    directory.check(idle=True)


class Looked(Segments):
    """Counts the keys that are looked at."""

    count = 0

    def __iter__(self):
        for key in super().__iter__():
            self.count += 1
            yield key


def test_no_chunk_is_looked_at_beyond_those_that_can_leave():
    order = Looked()
    directory = Directory(ROOM, policy=lambda room: order)
    directory.filled(directory.reserve_run(KEYS[:ROOM], ()))
    directory.pin_ready(KEYS[: ROOM - 2])
    assert len(directory.reserve_run(KEYS[ROOM : ROOM + 5], ())) == 2
    looked = order.count
    assert looked <= ROOM
    assert not directory.reserve_run(KEYS[ROOM + 5 : ROOM + 9], ())
    assert order.count == looked
