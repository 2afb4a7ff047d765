"""Hits that come in parts, over a real Store with hand-turned lanes and clock: what is promised of
them, and what vLLM is told in the end."""

from collections import Counter
from typing import Any, NamedTuple

import pytest

from kvtier.connectors.vllm.metadata import StepReport
from tests.unit.connectors.test_vllm_scheduler import BLOCK, CHUNK, LAYOUT, Bench, done, prompt
from tests.unit.vllm_request import planned

pytestmark = pytest.mark.vllm

LONG = 32
"""Chunks of a hit that is four times larger than RAM."""
BLOCKS = CHUNK // BLOCK


class Ended(NamedTuple):
    """What vLLM is told of a load: the blocks that it computes."""

    number: int
    request_id: str
    left: list[int]


class Engine(Bench):
    """Its workers confirm what the test says."""

    def __init__(self, **more):
        super().__init__(**{"in_parts": True} | more)
        self.ranks = more.get("ranks", 1)
        self.copied: list[int] = []
        """First blocks of the parts that workers were given."""
        self.jobs = dict[int, Any]()
        self.bad = list[int]()
        """Blocks whose copies have failed."""
        self.ends: list[Ended] = []
        self.most_held = 0

    def asked(self, request, read_s=0.1, **more):
        """The tier holds all of the request, and it is asked for until vLLM is told something."""
        self.hold(request.all_token_ids[:-1], read_s, **more)
        return self.waits_until_idle(request)

    def waits_until_idle(self, request):
        """Between two questions vLLM plans a step."""
        while (tokens := self.matched(request)) is None:
            assert len(self.lane), "it waits for nothing"
            self.lane.turn()
            self.confirm(*self.given())
        return tokens

    def given(self):
        """The numbers of the jobs of one step."""
        metadata = self.half.step(planned())
        assert all(job.request_id is None for job in metadata.loads), "vLLM is told of no part"
        self.copied += [job.blocks[0] for job in metadata.loads]
        self.jobs |= {job.number: job for job in metadata.loads}
        for end in metadata.ends:
            self._over(end)
        self.most_held = max(self.most_held, sum(one.held for one in self.loads))
        return [job.number for job in metadata.loads]

    @property
    def loads(self):
        return list(self.half.extensions[-1]._loads.values())

    def confirm(self, *numbers, failed=False):
        told = Counter(dict.fromkeys(numbers, self.ranks))
        jobs = [self.jobs[number] for number in numbers if number in self.jobs]
        if failed:
            self.bad += [block for job in jobs for block in job.blocks]
        over = Counter({job.end.number: self.ranks for job in jobs if job.end is not None})
        for job in jobs:
            if job.end is not None:
                self._over(job.end)
        self.half.report(
            StepReport(done=over, failed=told) if failed else StepReport(done=told + over)
        )

    def _over(self, end):
        left = {*end.blocks[end.kept :], *(block for block in self.bad if block in end.blocks)}
        self.ends.append(Ended(end.number, end.request_id, sorted(left)))

    def goes_on(self, steps=200):
        """Reads and copies until the load has ended. Returns the end that workers were told."""
        for _ in range(steps):
            self.confirm(*self.given())
            if self.ends:
                (end,) = self.ends
                self.confirm(end.number)
                return end
            if len(self.lane):
                self.lane.turn()
        raise AssertionError("the load does not end")


def blocks_from(chunk):
    """The blocks behind so many chunks of a request of :data:`LONG`, as :meth:`Bench.granted`
    gives them."""
    return [*range(1 + chunk * BLOCKS, 1 + LONG * BLOCKS)]


def loading(**more):
    """An engine that has begun to load a hit in parts."""
    engine, request = Engine(**more), prompt(LONG)
    assert engine.asked(request) == LONG * CHUNK
    engine.granted(request, LONG * CHUNK)
    return engine, request


def test_a_hit_larger_than_ram_is_loaded_whole_in_parts():
    engine, request = loading()
    end = engine.goes_on()
    assert (end.request_id, end.left) == ("one", [])
    assert engine.copied == blocks_from(0)[::BLOCKS], "each part into its own blocks, in order"
    assert engine.most_held == 4, "half of a RAM as small at any time"
    assert engine.half.counts() == {"loaded_dict": LONG}
    assert engine.half.sources(request) == {"dict": LONG * CHUNK}
    assert not engine.half._pending and not engine.half._under_way
    done(engine, request)


def test_blocks_are_asked_for_when_the_first_part_is_in_ram():
    engine, request = Engine(), prompt(LONG)
    engine.hold(request.all_token_ids[:-1], 0.1)
    assert engine.matched(request) is None
    assert len(engine.lane) == 4, "no more of the rest than there is room for"
    engine.lane.turn()
    assert engine.matched(request) == LONG * CHUNK
    assert len(engine.lane) == 3, "the disk has work until the request has blocks"
    engine.granted(request, LONG * CHUNK)
    engine.lane.run()
    engine.confirm(*engine.given())
    assert engine.copied == blocks_from(0)[: 4 * BLOCKS : BLOCKS], "what was read ahead is used"
    assert engine.goes_on().left == []
    assert engine.half.counts() == {"loaded_dict": LONG}
    done(engine, request)


def test_a_guess_whose_first_part_does_not_come_was_the_only_one():
    """A plan says that a token is computed in 10 ms. The tier takes 5 s a chunk."""
    engine = Engine(known=False)
    engine.load_policy.prefill.at_most(0.01)
    for name, found in (("one", None), ("two", 0)):
        request = prompt(LONG, name)
        engine.hold(request.all_token_ids[:-1], 5.0)
        assert engine.matched(request) == found
        engine.given()
        engine.clock.now += 61.0
        assert engine.matched(request) == 0, "one time-out, and not one more for what RAM holds"
        done(engine, request)


@pytest.mark.parametrize(
    ("more", "read_s"),
    [({"in_parts": False}, 0.1), ({"blocks": LONG * BLOCKS}, 0.1), ({}, 0.3)],
    ids=["vllm cannot", "blocks are short", "no faster than twice its estimate"],
)
def test_otherwise_ram_bounds_a_hit_as_before(more, read_s):
    engine, request = Engine(**more), prompt(LONG)
    found = engine.asked(request, read_s)
    assert found is not None
    assert found <= 8 * CHUNK
    assert not engine.loads
    done(engine, request)


def test_blocks_that_other_requests_may_come_to_need_are_counted():
    engine, request, other = Engine(blocks=LONG * BLOCKS + 20), prompt(LONG), prompt(9, "other")
    assert engine.matched(other) == 0
    engine.given()
    assert engine.asked(request) == 8 * CHUNK
    engine.half.finished(other)
    engine.half.finished(request)
    again = prompt(LONG, "again")
    assert engine.waits_until_idle(again) == LONG * CHUNK
    done(engine, again)


def test_a_chunk_that_left_meanwhile_ends_the_load_before_it():
    engine, request = loading()
    engine.store.invalidate([LAYOUT.keys(request.all_token_ids)[10]])
    assert engine.goes_on().left == blocks_from(10)
    assert engine.half.counts() == {"loaded_dict": 10, "declined_refused": LONG - 10}
    done(engine, request)


def test_at_the_deadline_what_has_arrived_is_kept():
    engine, request = loading()
    for _ in range(6):
        engine.confirm(*engine.given())
        engine.lane.turn()
    engine.clock.now += 20.0
    held = engine.loads[0].parts.kept
    assert 0 < held < LONG
    end = engine.goes_on()
    assert end.left == blocks_from(len(engine.copied))
    assert engine.half.counts()["declined_deadline"] == LONG - len(engine.copied)
    done(engine, request)


def test_a_tier_that_stalls_is_left_after_the_longest_wait():
    engine, request = loading(always=True)
    engine.confirm(*engine.given())
    engine.clock.now += 59.0
    engine.given()
    assert engine.loads, "it may come yet"
    engine.clock.now += 2.0
    engine.given()
    (end,) = engine.ends
    assert end.left == blocks_from(1)
    engine.confirm(end.number)
    done(engine, request)


def test_parts_that_keep_coming_are_waited_for_however_long_all_of_them_take():
    engine, request = loading(always=True)
    for _ in range(LONG):
        engine.confirm(*engine.given())
        engine.clock.now += 36.0  # of a time-out of 60
        engine.lane.turn() if len(engine.lane) else None
    assert engine.goes_on().left == []
    done(engine, request)


@pytest.mark.parametrize("promised", [False, True])
def test_a_hit_is_promised_anew_where_vllm_has_another_beginning_of_it(promised):
    """Another request has computed it meanwhile, or its blocks have left."""
    engine, request = Engine(), prompt(LONG)
    engine.hold(request.all_token_ids[:-1], 0.1)
    if promised:
        assert engine.waits_until_idle(request) == LONG * CHUNK
    else:
        assert engine.matched(request) is None
    for begin in (3, 0, 5):
        while (told := engine.half.matched(request, begin * CHUNK))[0] is None:
            assert len(engine.lane), "it waits for nothing"
            engine.lane.turn()
        assert told == ((LONG - begin) * CHUNK, True)
    engine.granted(request, (LONG - begin) * CHUNK)
    assert engine.goes_on().left == []
    assert engine.copied == blocks_from(begin)[::BLOCKS], "nothing is written over what is there"
    done(engine, request)


def test_a_slot_stays_until_every_rank_has_copied_it():
    engine, request = loading(ranks=2)
    (number,) = engine.given()
    engine.half.report(StepReport(done=Counter({number: 1})))
    engine.lane.run()
    others = engine.given()
    assert len(others) == 3
    assert engine.loads[0].held == 4 and not len(engine.lane), "there is no slot for a fifth part"
    engine.half.report(StepReport(done=Counter({number: 1})))
    engine.given()
    assert len(engine.lane) == 1
    engine.confirm(*others)
    assert engine.goes_on().left == []
    done(engine, request)


def test_after_a_copy_that_failed_only_what_is_before_it_counts():
    engine, request = loading()
    (first,) = engine.given()
    engine.lane.turn()
    (second,) = engine.given()
    engine.confirm(second, failed=True)
    assert not engine.given() and not engine.ends, "the first part is not confirmed yet"
    engine.confirm(first)
    assert engine.goes_on().left == blocks_from(1)
    assert engine.matched(request) == 0, "its chunks could fail again without end"
    done(engine, request)


def last_two_parts():
    """The last two parts are being copied, and workers know that the load ends with them."""
    engine, request = loading()
    while len(engine.jobs) < LONG - 2:
        engine.confirm(*engine.given())
        engine.lane.turn()
    engine.confirm(*engine.jobs)
    numbers = [*engine.given()]
    engine.lane.run()
    numbers += engine.given()
    assert len(numbers) == 2 and engine.jobs[numbers[1]].end is not None
    return engine, request, numbers


@pytest.mark.parametrize("which", [0, 1])
def test_a_copy_that_fails_after_the_end_was_told_leaves_what_is_behind_it(which):
    engine, request, numbers = last_two_parts()
    engine.confirm(numbers[which], failed=True)
    assert bool(engine.ends) == bool(which) and engine.loads
    engine.confirm(numbers[1 - which])
    assert not engine.loads and not engine.half._pending and not engine.half._under_way
    (end,) = engine.ends
    assert min(end.left) == min(blocks_from(LONG - 2 + which))
    assert engine.half.counts() == {"loaded_dict": LONG - 2 + which, "declined_refused": 2 - which}
    assert not engine.given() and len(engine.ends) == 1, "it is told once"
    done(engine, request)


def test_an_aborted_request_ends_once_no_rank_copies_for_it():
    engine, request = loading()
    (number,) = engine.given()
    engine.half.finished(request)
    engine.lane.run()
    assert not engine.given() and not engine.ends
    engine.confirm(number)
    assert engine.goes_on().request_id == "one", "vLLM has its blocks back"
    assert engine.tier.reads <= 2, "nothing more is read for it"
    assert not engine.half._pending and not engine.half._under_way
    engine.store.check(idle=True)


def test_an_engine_with_other_weights_keeps_nothing_of_it():
    engine, request = loading()
    engine.confirm(*engine.given())
    engine.lane.turn()
    engine.half.report(StepReport(replacements=Counter({0: 1})))
    assert engine.goes_on().left == blocks_from(0)
    done(engine, request)


@pytest.mark.parametrize(("slots", "held"), [(8, 4), (24, 12), (48, 16), (64, 16), (256, 64)])
def test_they_hold_a_quarter_of_ram_or_sixteen_slots_but_no_more_than_half(slots, held):
    assert Engine(slots=slots).half.extensions[-1]._most_held == held


def test_first_parts_that_wait_for_blocks_leave_room_for_loads():
    engine, request = loading()
    others = [prompt(LONG, f"other {first}", first=first) for first in (1, 2, 3)]
    for other in others:
        engine.hold(other.all_token_ids[:-1], 0.1)
    engine.lane.run()
    engine.confirm(*engine.given())
    assert [engine.matched(other) for other in others] == [None, None, None]
    assert engine.half.extensions[-1]._held_by_first == 2
    assert engine.goes_on().left == []
    for other in others:
        engine.half.finished(other)
    done(engine, request)


SHORT, ROOM = 8, 32
"""Chunks of such a hit; slots."""
COPY_S = 0.0025
"""Of a chunk: each is a part of its own."""


def coming(copy_s=COPY_S, read_s=0.1, **more):
    """An engine that has been asked for a hit that RAM holds. One of its chunks has arrived."""
    engine, request = Engine(slots=ROOM, **more), prompt(SHORT)
    engine.hold(request.all_token_ids[:-1], read_s)
    engine.load_policy._copy.add(copy_s / CHUNK, engine.clock())
    assert engine.matched(request) is None
    assert len(engine.lane) == SHORT, "all of it is being read"
    engine.lane.turn()
    return engine, request


@pytest.mark.parametrize(
    ("more", "copy_s", "read_s"),
    [
        ({"in_parts": False}, COPY_S, 0.1),
        ({"blocks": SHORT * BLOCKS}, COPY_S, 0.1),
        ({}, COPY_S / SHORT, 0.1),
        ({}, COPY_S, 0.3),
        ({"comes_whole": True}, COPY_S, 0.1),
    ],
    ids=["vllm cannot", "blocks are short", "nothing to gain", "not twice as fast", "comes whole"],
)
def test_otherwise_it_is_waited_for_in_ram(more, copy_s, read_s):
    engine, request = coming(copy_s, read_s, **more)
    assert engine.matched(request) is None
    assert engine.waits_until_idle(request) == SHORT * CHUNK
    engine.granted(request, SHORT * CHUNK)
    assert [job.request_id for job in engine.half.step(planned()).loads] == ["one"]
    assert not engine.loads
    engine.confirm(*engine.half._pending)
    done(engine, request)


def begun(**more):
    """An engine that loads a hit of which one chunk has arrived."""
    engine, request = coming(**more)
    assert engine.matched(request) == SHORT * CHUNK
    engine.granted(request, SHORT * CHUNK)
    return engine, request


def test_all_its_slots_stay_until_every_rank_has_copied_all_of_it():
    engine, request = begun(ranks=2)
    (first,) = engine.given()
    engine.half.report(StepReport(done=Counter({first: 1})))
    engine.lane.turn()
    (second,) = engine.given()
    engine.confirm(second)
    engine.half.report(StepReport(done=Counter({first: 1})))
    engine.lane.run()
    assert len(engine.given()) == SHORT - 2, "the other parts were not let go with the first"
    assert not engine.ends
    engine.confirm(*(job for job, one in engine.half._pending.items() if one.load is not None))
    assert engine.goes_on().left == []
    done(engine, request)


def test_its_slots_count_among_those_that_wait():
    engine, request = begun()
    assert engine.half._prompts["one"].claim.held == SHORT
    others = [prompt(SHORT, f"other {first}", first=first) for first in (1, 2)]
    for other in others:
        engine.hold(other.all_token_ids[:-1], 0.1)
    assert [engine.matched(other) for other in others] == [None, None]
    assert [engine.half._prompts[other.request_id].claim.held for other in others] == [SHORT, 0]
    assert engine.goes_on().left == []
    assert not engine.half._prompts["one"].claim.held
    for other in others:
        engine.half.finished(other)
    done(engine, request)


def test_a_store_that_closes_while_parts_are_copied_keeps_their_slots():
    engine, _ = loading()
    engine.given()
    held = [pending.load for pending in engine.half._pending.values() if pending.load]
    engine.half.close()
    assert [lease.open for lease in held] == [True]
