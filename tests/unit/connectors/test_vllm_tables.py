"""The block tables of requests as vLLM before 0.32 tells them: what was added in each step."""

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
