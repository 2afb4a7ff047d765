"""The block tables of requests as vLLM tells them: whole, and before 0.32 what was added in each
step."""

from types import SimpleNamespace

import pytest

from kvtier.connectors.vllm.tables import BlockTables
from tests.unit.vllm_request import planned

pytestmark = pytest.mark.vllm


def step(new=None, added=None, resumed=()):
    """A step that computes request "one", for the first time (``new``) or again (``added``)."""
    first = [] if new is None else [SimpleNamespace(req_id="one", block_ids=(list(new),))]
    again = [] if new is not None else ["one"]
    blocks = [None if added is None else (list(added),)] * len(again)
    return planned(first, req_ids=again, new_block_ids=blocks, resumed_req_ids=set(resumed))


def test_lists_of_new_requests_are_not_made_again_and_hold_for_their_step_alone():
    tables, asked = BlockTables(), []

    def resolve(name):
        asked.append(name)
        return ([4, 7, 9],) if name == "one" else None

    state = SimpleNamespace(get_block_ids=resolve)
    tables.begin(planned([SimpleNamespace(req_id="one", block_ids=([4, 7],))], state=state))
    assert (tables.of("one"), asked) == (([4, 7],), [])
    tables.end()
    tables.begin(planned(req_ids=["one"], new_block_ids=[None], state=state))
    assert [tables.of("one"), tables.of("two")] == [([4, 7, 9],), None]


def test_a_table_grows_at_its_end():
    tables = BlockTables()
    tables.begin(step(new=[4, 7]))
    tables.end()
    tables.begin(step(added=[9]))
    tables.begin(step())
    assert tables.of("one") == ([4, 7, 9],)
    assert tables.of("two") is None


def test_a_request_that_was_preempted_has_only_the_blocks_it_got_after_that():
    tables = BlockTables()
    tables.begin(step(new=[4, 7]))
    tables.begin(step(added=[5, 6, 8], resumed={"one"}))
    assert tables.of("one") == ([5, 6, 8],)


def test_an_ended_request_has_no_table():
    tables = BlockTables()
    tables.begin(step(new=[4, 7]))
    tables.forget("one")
    assert tables.of("one") is None
