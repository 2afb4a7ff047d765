"""Requests that lose their blocks while they run. After the name of each test stands what vLLM
calls the case."""

from __future__ import annotations

import pytest

from tests.trust.engine.cells import CHUNK, words

pytestmark = pytest.mark.vllm
_SCHEDULERS = {
    "one batch": {},
    "async": {"async_scheduling": True},
    "three in flight": {"async_scheduling": True, "pipeline": 2},
    "V1": {"v2": False},
    "V1, async": {"v2": False, "async_scheduling": True},
}
_KINDS: dict[str, dict[str, object]] = {
    "drafts": {"drafts": 3},
    "windows": {"groups": ("full", "window 40")},
    "states": {"groups": ("full", "state")},
}
_V1_KINDS = {f"V1, {name}": {"v2": False} | kind for name, kind in _KINDS.items()}
SCHEDULERS = pytest.mark.parametrize("mode", _SCHEDULERS.values(), ids=_SCHEDULERS.keys())
_MODES = _SCHEDULERS | _KINDS | _V1_KINDS
MODES = pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES.keys())
PROMPT = words(3 * CHUNK + 5)


@pytest.fixture
def v2():
    """V2's scheduler tells a resumed request as a new one. A mode says it if it is V1's."""
    return True


def preempted(engine, answer=40):
    """A request that had three whole chunks and part of its answer."""
    name = engine.ask(PROMPT, answer)
    engine.until(lambda: engine.asked[name].num_output_tokens > 8)
    engine.preempt(name)
    return name


@MODES
def test_what_a_preempted_request_had_is_loaded(make, mode):
    """test_request_preemption, and with async scheduling
    test_async_preempt_readmit_before_transfer_output_is_deferred and
    test_pending_transfer_defers_prefix_lookup: it comes back while saves are not confirmed."""
    engine = make(**mode)
    name = preempted(engine)
    engine.give_back()
    engine.idle()
    assert engine.is_answered(name)
    assert engine.loaded(name) and set(engine.loaded(name)) <= {3 * CHUNK, 4 * CHUNK}
    talk = engine.said(name)
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])) == [(len(talk) - 1) // CHUNK * CHUNK]


@SCHEDULERS
def test_a_preempted_request_is_saved_again_if_the_store_lost_it(make, mode):
    """test_resumed_from_preemption_without_load_still_saves,
    test_resumed_request_in_resumed_req_ids_replaces_blocks,
    test_running_request_not_in_resumed_req_ids_appends_blocks: it is saved from its new blocks,
    although it fills no further chunk."""
    engine = make(**mode)
    name = preempted(engine, 20)
    engine.half.clear()
    saves = len(engine.saves[name])
    engine.give_back()
    engine.idle()
    assert engine.is_answered(name) and not engine.loads[name]
    assert len(engine.saves[name]) > saves
    engine.crowd_out()
    assert engine.loaded(engine.answer([*engine.said(name), 7])) == [3 * CHUNK]


@MODES
def test_a_preempted_request_is_aborted(make, mode):
    """test_preemption_resets_tracker_before_request_finished,
    test_preemption_clears_stale_load_state."""
    engine = make(**mode)
    name = preempted(engine)
    engine.abort(name)
    engine.give_back()
    engine.idle()
    assert name not in engine.scheduler.requests and not engine.loads[name]


@SCHEDULERS
def test_running_requests_are_preempted_by_a_reset(make, mode):
    """test_reset_cache: everything is dropped under requests that run, and they are saved anew."""
    engine = make(**mode)
    name = engine.ask(PROMPT, 40)
    engine.until(lambda: engine.asked[name].num_output_tokens > 8)
    engine.reset(connector=True, running=True)
    engine.idle()
    assert engine.is_answered(name) and engine.asked[name].num_preemptions == 1
    talk = engine.said(name)
    engine.crowd_out()
    assert engine.loaded(engine.answer([*talk, 7])) == [(len(talk) - 1) // CHUNK * CHUNK]
