"""kvtier under vLLM's MultiConnector. After the name of each test stands what vLLM calls the
case."""

import pytest

from tests.trust.engine.cells import CHUNK, words
from tests.trust.engine.ported.prompts import PROMPT

pytestmark = pytest.mark.vllm
PLACES = pytest.mark.parametrize("place", ["first", "last"])


@PLACES
def test_one_connector_loads_and_the_other_saves(make, place):
    """test_multi_example_connector_consistency: what the other has brought is saved, and from then
    on it is loaded here."""
    engine = make(beside=place)
    name = engine.answer(PROMPT, 3, elsewhere=True)
    assert not engine.loads[name] and engine.saves[name]
    engine.crowd_out()
    assert engine.loaded(engine.answer(PROMPT, 3)) == [5 * CHUNK]


@PLACES
def test_what_the_other_brings_is_not_loaded_here(make, place):
    """test_multi_example_connector_consistency: both have it, and one of them loads."""
    engine = make(beside=place)
    engine.answer(PROMPT, 3)
    engine.crowd_out()
    name = engine.answer(PROMPT, 3, elsewhere=True)
    assert not engine.loads[name]


@PLACES
def test_a_load_fails_beside_another_connector(make, place):
    """test_async_load_failure, under MultiConnector."""
    engine = make(beside=place)
    engine.answer(PROMPT, 3)
    engine.crowd_out()
    engine.broken = lambda rank, blocks: True
    names = [engine.ask(PROMPT, 3), engine.ask(words(80, 5), 3, elsewhere=True)]
    engine.idle()
    assert all(engine.is_answered(name) for name in names)
    assert engine.counts["faults"] == 1 and engine.loaded(names[0]) == [5 * CHUNK]


@PLACES
def test_a_request_is_preempted_beside_another_connector(make, place):
    """test_multi_connector_handle_preemptions_integration."""
    engine = make(beside=place)
    name = engine.ask(PROMPT, 40)
    engine.until(lambda: engine.asked[name].num_output_tokens > 8)
    engine.preempt(name)
    engine.give_back()
    engine.idle()
    assert engine.is_answered(name) and engine.loaded(name) == [5 * CHUNK]
