"""What the scheduler's half has saved of a model with recurrent states on two ranks, which blocks
jobs name, and when an engine computes on while workers still read the blocks that they save."""

from collections import Counter
from types import SimpleNamespace

import pytest

from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.load_policy.decide import LoadPolicy
from kvtier.load_policy.prefill import Prefill, PrefillTime
from kvtier.store.store import Store
from tests.clock import Clock
from tests.unit.scheduler_half import scheduler_half
from tests.unit.vllm_request import planned, vllm_request

groups = pytest.importorskip("kvtier.connectors.vllm.groups")
metadata = pytest.importorskip("kvtier.connectors.vllm.metadata")
tables = pytest.importorskip("kvtier.connectors.vllm.tables")

pytestmark = pytest.mark.vllm
SLOT, BLOCK, CHUNK = 4096, 16, 32
LAYOUT = ChunkLayout(fingerprint({"model": "states"}), CHUNK, BLOCK, (SLOT,))
FULL, STATE = groups.Group(0, groups.Kind.FULL, BLOCK), groups.Group(1, groups.Kind.STATE, BLOCK)
GEOMETRY = groups.Geometry((FULL, STATE), CHUNK)
WINDOW = groups.Group(1, groups.Kind.WINDOW, BLOCK, BLOCK)
TOKENS = [*range(100, 100 + 3 * CHUNK + 5)]
ATTENTION, STATES = [*range(1, 9)], [*range(21, 29)]


def made(geometry, ranks, **duty):
    """A store, and the scheduler's half over it."""
    clock = Clock(100.0)
    store = Store(Pool(16, SLOT), clock=clock)
    policy = LoadPolicy(60.0, always=True, prefill=Prefill(PrefillTime(1.0)), clock=clock)
    part = ((0, True),) * len(geometry.groups)
    return store, scheduler_half(store, LAYOUT, geometry, (part,) * ranks, policy, **duty)


class Told:
    """vLLM's block tables of one request, and where this step leaves its states."""

    def __init__(self, states):
        self.boundary_state_offloads = {"one": states}

    def get_block_ids(self, request_id):
        return ATTENTION, STATES


class Two:
    """The scheduler's half of an engine with two ranks."""

    def __init__(self, geometry=GEOMETRY, **duty):
        self.store, self.half = made(geometry, ranks=2, **duty)
        self.request = vllm_request(TOKENS)
        assert self.half.matched(self.request, 0) == (0, False)

    def step(self, computed, more, states, resumed=(), drafts=()):
        """One step that computes ``more`` tokens, the last of them for ``drafts``."""
        self.request.num_computed_tokens = computed
        cached = {"num_computed_tokens": [computed], "resumed_req_ids": set(resumed)}
        plan = planned((), {"one": more}, Told(states), req_ids=["one"], **cached)
        plan.scheduled_spec_decode_tokens = {"one": list(drafts)}
        return self.half.step(plan)


def blocks(jobs, place):
    """The blocks of one group that the jobs of a step save."""
    return [
        block for job in jobs for move in job.moves if move.group == place for block in move.blocks
    ]


@pytest.mark.parametrize(
    ("block", "tokens", "drafts", "kept"),
    [
        (STATES[3], 2 * CHUNK, (), [[STATES[3]], []]),
        (STATES[3], 2 * CHUNK, (7, 8), [[], [STATES[3]]]),
        (99, 2 * CHUNK, (), [[], []]),
        (STATES[3], 2 * CHUNK + 8, (), [[], []]),
    ],
    ids=["saved", "when drafts are chosen", "its block is another one by now", "inside a chunk"],
)
def test_a_state_at_a_chunks_end_is_saved_from_the_block_in_which_vllm_left_it(
    block, tokens, drafts, kept
):
    engine = Two()
    first = engine.step(0, 3 * CHUNK, [(1, block, tokens)], drafts=drafts).saves
    assert [blocks(first, 1), blocks(engine.step(3 * CHUNK, 1, []).saves, 1)] == kept
    assert blocks(first, 0) == ATTENTION[:6]


@pytest.mark.parametrize(
    ("chunks", "loaded"), [(3, [ATTENTION[:6], [STATES[5]]]), (2, [[tables.NULL_BLOCK]])]
)
def test_a_hit_of_which_vllm_takes_a_part_is_loaded_into_no_block(chunks, loaded):
    engine, again = Two(), vllm_request(TOKENS, "again")
    for job in engine.step(0, 3 * CHUNK, [(1, STATES[5], 3 * CHUNK)]).saves:
        engine.half.report(metadata.StepReport(done=Counter({job.number: 2})))
    assert engine.half.matched(again, 0) == (3 * CHUNK, True)
    given = SimpleNamespace(get_block_ids=lambda: (ATTENTION, STATES))
    engine.half.allocated(again, given, chunks * CHUNK)
    (job,) = engine.half.step(planned()).loads
    assert [move.blocks for move in job.moves] == loaded


@pytest.mark.parametrize(("resumed", "kept"), [((), [STATES[3]]), (("one",), [])])
def test_a_state_that_waits_for_its_tokens_is_forgotten_with_its_requests_blocks(resumed, kept):
    engine = Two()
    assert blocks(engine.step(0, CHUNK, [(1, STATES[3], 2 * CHUNK)]).saves, 1) == []
    assert blocks(engine.step(CHUNK, CHUNK, [], resumed).saves, 1) == kept


def test_a_save_that_failed_is_offered_again_in_a_step_that_finishes_nothing():
    engine = Two(groups.Geometry((FULL,), CHUNK))
    assert not engine.step(0, CHUNK - 1, []).saves
    (job,) = engine.step(CHUNK - 1, 2, []).saves
    assert not engine.step(CHUNK + 1, 1, []).saves
    engine.half.report(metadata.StepReport(failed=Counter({job.number: 2})))
    (again,) = (job for _ in range(16) for job in engine.step(CHUNK + 2, 1, []).saves)
    assert blocks([again], 0) == blocks([job], 0) == ATTENTION[:2]


@pytest.mark.parametrize(("save_decode", "kept"), [(True, ATTENTION[6:8]), (False, [])])
def test_a_chunk_that_an_answer_finishes_is_kept_if_answers_are(save_decode, kept):
    """Of a model with states every step is looked at."""
    engine = Two(save_decode=save_decode)
    engine.step(0, len(TOKENS), [])
    engine.request.num_tokens = 4 * CHUNK
    engine.request.all_token_ids = [*range(100, 100 + 4 * CHUNK)]
    saves = engine.step(len(TOKENS), 4 * CHUNK - len(TOKENS), []).saves
    assert blocks(saves, 0) == kept


def test_workers_are_told_of_other_memory_in_the_step_that_saves_into_it(monkeypatch):
    engine, renewed = Two(), list[int]()
    save, pool = engine.store.save, engine.store.pool

    def saving(keys):
        lease = save(keys)
        renewed.extend(lease.slots)
        return lease

    monkeypatch.setattr(engine.store, "save", saving)
    monkeypatch.setattr(pool, "take_renewed", lambda: [renewed.pop() for _ in [*renewed]])
    monkeypatch.setattr(pool, "witness_path", "a server has it")
    step = engine.step(0, 2 * CHUNK, [])
    (job,) = step.saves
    assert {where: sorted(slots) for where, slots in step.renewed.items()} == {
        job.pool: sorted(slot for move in job.moves for slot in move.slots)
    }
    assert not engine.step(2 * CHUNK, 1, []).renewed, "once"


@pytest.mark.parametrize("own", [0, 1])
def test_a_load_writes_the_blocks_between_vllms_own_and_the_promises_end(own):
    window = groups.Group(1, groups.Kind.WINDOW, BLOCK, 20)
    geometry = groups.Geometry((FULL, window), CHUNK)
    slots = [
        (groups.Piece(group, number), 2 * number) for group in (FULL, window) for number in (0, 1)
    ]
    move, last = tables.loading(geometry, slots, (ATTENTION, STATES), own * BLOCK, 48)
    assert (move.slots, move.blocks, move.first) == ([0, 2], ATTENTION[own:3], own)
    assert (last.slots, last.blocks, last.first) == ([0, 2], STATES[1:3], 1), "token 29 is needed"


# ---- blocks that workers still read --------------------------------------------------------------
LONG = 4 * CHUNK


class Engine:
    """The scheduler's half of an engine whose requests have four chunks each."""

    def __init__(self, *kinds):
        _, self.half = made(groups.Geometry(kinds or (FULL,), CHUNK), ranks=1)
        self.computed: dict[str, int] = {}
        self.requests = {}

    def get_block_ids(self, request_id):
        begin = 1 + 20 * [*self.computed].index(request_id)
        return [*range(begin, begin + 2 * LONG // BLOCK)], [*range(begin + 100, begin + 116)]

    def step(self, scheduled, resumed=frozenset()):
        """One step that computes so many tokens of each request. The new ones are new to vLLM
        too."""
        new = [name for name in scheduled if name not in self.computed]
        for number, name in enumerate(new):
            begin = 1000 * (len(self.computed) + number)
            request = vllm_request([*range(begin, begin + LONG)], name)
            assert self.half.matched(request, 0) == (0, False)
            self.requests[name] = request
        old = [name for name in scheduled if name in self.computed]
        self.computed = self.computed | dict.fromkeys(new, 0)
        state = SimpleNamespace(boundary_state_offloads={}, get_block_ids=self.get_block_ids)
        begun = {"num_computed_tokens": 0}
        began = [
            SimpleNamespace(req_id=one, block_ids=self.get_block_ids(one), **begun) for one in new
        ]
        cached = {"req_ids": old, "num_computed_tokens": [self.computed[one] for one in old]}
        cached["resumed_req_ids"] = resumed
        metadata = self.half.step(planned(began, dict(scheduled), state, **cached))
        for name, tokens in scheduled.items():
            self.computed[name] += tokens
            self.requests[name].num_computed_tokens += tokens
        return metadata


def told(metadata):
    """Whether it saves, whether the engine need not wait for that, whether it has to for earlier
    steps' saves."""
    return bool(metadata.saves), metadata.reads_on, metadata.may_reuse


def test_the_steps_of_a_long_prompt_wait_for_no_save_but_the_last():
    engine = Engine()
    assert told(engine.step({"a": CHUNK})) == (True, True, False)
    assert told(engine.step({"a": CHUNK})) == (True, True, False)
    assert told(engine.step({"a": 5})) == (False, False, False)
    assert told(engine.step({"a": LONG - 2 * CHUNK - 5})) == (True, False, False)
    assert told(engine.step({"a": 1})) == (False, False, False)


def test_a_request_that_ends_its_prompt_beside_a_longer_one_is_waited_for():
    engine = Engine()
    step = engine.step({"a": CHUNK, "b": LONG})
    assert told(step) == (True, False, False)
    assert len(step.saves) == 1, "both in one"
    assert told(engine.step({"a": CHUNK})) == (True, True, False)


@pytest.mark.parametrize(
    ("scheduled", "resumed"),
    [({}, set()), ({"b": 5}, set()), ({"a": CHUNK}, {"a"})],
    ids=["idle", "another is computed", "resumed"],
)
def test_a_request_that_may_have_lost_its_blocks_is_waited_for_once(scheduled, resumed):
    engine = Engine()
    assert told(engine.step({"a": CHUNK})) == (True, True, False)
    assert engine.step(scheduled, resumed).may_reuse
    assert not engine.step({}).may_reuse or resumed


def test_all_earlier_requests_are_looked_at_and_not_only_the_last_steps():
    engine = Engine()
    engine.step({"a": CHUNK, "b": 5})
    assert told(engine.step({"a": 5, "b": CHUNK})) == (True, True, False)
    assert engine.step({"b": 5}).may_reuse, "a was preempted"


def test_blocks_that_leave_a_window_are_waited_for():
    engine = Engine(FULL, WINDOW)
    assert told(engine.step({"a": CHUNK})) == (True, False, False)


class Answering(Two):
    """An engine of full attention whose request has answered until its fourth chunk was whole."""

    def __init__(self, *more, **duty):
        super().__init__(groups.Geometry((FULL, *more), CHUNK), **duty)
        self.request.num_preemptions = 1  # before it had computed anything
        self.request.all_token_ids = [*range(100, 100 + 4 * CHUNK + 9)]
        self.jobs = self.step(0, len(TOKENS), []).saves
        for computed in range(len(TOKENS), 4 * CHUNK):
            self.request.num_tokens = computed + 1
            self.jobs += self.step(computed, 1, []).saves
        self.request.num_computed_tokens = 4 * CHUNK

    def idle(self):
        return self.half.step(planned())

    def saved(self, job):
        """How many of its chunks can be found when one rank has reported it, and when both have."""
        keys, found = self.half._pending[job.number].keys, list[int]()
        for _ in range(2):
            self.half.report(metadata.StepReport(done=Counter({job.number: 1})))
            found.append(self.store.lookup(keys).ready)
        return found


def test_answers_are_saved_in_one_step_of_eight_and_what_waits_when_they_end():
    engine = Answering()
    assert blocks(engine.jobs, 0) == ATTENTION[:6], "its fourth chunk waits"
    engine.half.finished(engine.request, (ATTENTION, []))
    assert engine.half.expects_reports()
    step = engine.idle()
    (job,) = step.ended_saves
    assert (blocks([job], 0), step.saves) == (ATTENTION[6:8], [])
    assert engine.saved(job) == [0, 1]
    assert not engine.idle().ended_saves, "once"
    going_on = Answering()
    for computed in range(4 * CHUNK, 4 * CHUNK + 8):
        going_on.request.num_tokens = computed + 1
        going_on.jobs += going_on.step(computed, 1, []).saves
    assert blocks(going_on.jobs, 0) == ATTENTION
    going_on.half.finished(going_on.request, (ATTENTION, []))
    assert not going_on.idle().ended_saves, "nothing waits"


def test_an_answer_is_saved_when_it_finishes_a_chunk_whose_blocks_may_leave_a_window():
    """Drafts may add two tokens a step, and none was right."""
    assert blocks(Answering(WINDOW, answer_tokens=2).jobs, 0) == ATTENTION[:8]


def test_blocks_that_a_request_has_lost_are_not_saved_at_its_end():
    engine = Answering()
    engine.half.allocated(engine.request, None, 0)  # others, since it was preempted
    engine.half.finished(engine.request, (ATTENTION, []))
    assert not engine.idle().ended_saves


def test_an_answer_that_its_turn_finds_outside_of_the_step_is_looked_at_in_the_next():
    """As where pipeline stages take turns."""
    engine = Answering()
    assert not any(engine.idle().saves for _ in range(8))
    engine.request.num_tokens = 4 * CHUNK + 1
    assert blocks(engine.step(4 * CHUNK, 1, []).saves, 0) == ATTENTION[6:8]


@pytest.mark.parametrize("cleared", [False, True])
def test_what_is_being_saved_at_a_clear_or_when_weights_are_replaced_is_not_found(cleared):
    engine = Answering()
    engine.half.finished(engine.request, (ATTENTION, []))
    if cleared:
        engine.half.clear()
    else:
        engine.half.report(metadata.StepReport(replacements=Counter({0: 1})))
    (job,) = engine.idle().ended_saves
    assert engine.saved(job) == [0, 0]
