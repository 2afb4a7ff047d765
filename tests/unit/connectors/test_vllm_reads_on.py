"""When an engine computes on while workers still read the blocks that they save."""

import warnings
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

with warnings.catch_warnings():  # importing vLLM warns
    warnings.simplefilter("ignore")
    groups = pytest.importorskip("kvtier.connectors.vllm.groups")
    pytest.importorskip("kvtier.connectors.vllm.scheduler_side.scheduler")

pytestmark = pytest.mark.vllm
SLOT, BLOCK, CHUNK = 4096, 16, 32
LAYOUT = ChunkLayout(fingerprint({"model": "long prompts"}), CHUNK, BLOCK, (SLOT,))
FULL = groups.Group(0, groups.Kind.FULL, BLOCK)
WINDOW = groups.Group(1, groups.Kind.WINDOW, BLOCK, BLOCK)
PROMPT = 4 * CHUNK


class Engine:
    """The scheduler's half of an engine whose requests have four chunks each."""

    def __init__(self, *kinds):
        clock = Clock(100.0)
        store = Store(Pool(16, SLOT), clock=clock)
        policy = LoadPolicy(60.0, always=True, prefill=Prefill(PrefillTime(1.0)), clock=clock)
        geometry = groups.Geometry(kinds or (FULL,), CHUNK)
        self.half = scheduler_half(store, LAYOUT, geometry, (((0, True),),), policy)
        self.computed: dict[str, int] = {}
        self.requests = {}

    def get_block_ids(self, request_id):
        begin = 1 + 20 * [*self.computed].index(request_id)
        return [*range(begin, begin + 2 * PROMPT // BLOCK)], [*range(begin + 100, begin + 116)]

    def step(self, scheduled, resumed=frozenset()):
        """One step that computes so many tokens of each request. The new ones are new to vLLM
        too."""
        new = [name for name in scheduled if name not in self.computed]
        for number, name in enumerate(new):
            begin = 1000 * (len(self.computed) + number)
            request = vllm_request([*range(begin, begin + PROMPT)], name)
            assert self.half.matched(request, 0) == (0, False)
            self.requests[name] = request
        old = [name for name in scheduled if name in self.computed]
        self.computed = self.computed | dict.fromkeys(new, 0)
        state = SimpleNamespace(boundary_state_offloads={}, get_block_ids=self.get_block_ids)
        began = [SimpleNamespace(req_id=one, num_computed_tokens=0) for one in new]
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
    assert told(engine.step({"a": PROMPT - 2 * CHUNK - 5})) == (True, False, False)
    assert told(engine.step({"a": 1})) == (False, False, False)


def test_a_request_that_ends_its_prompt_beside_a_longer_one_is_waited_for():
    engine = Engine()
    assert told(engine.step({"a": CHUNK, "b": PROMPT})) == (True, False, False)
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
