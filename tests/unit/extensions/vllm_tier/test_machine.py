"""vLLM's TieringOffloadingManager over KVTierTier and a real server: whatever happens, no wrong
byte is loaded, every job is reported, and no chunk of vLLM's RAM stays pinned."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.child_process import wait_for
from tests.unit.extensions.vllm_tier.tiering import OURS, chunk_keys, engine_config, tiering

KINDS = ["store", "find", "find", "step", "reset", "leave", "gone", "kill"]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(1, 10)),
    min_size=40,
    max_size=60,
)


@pytest.fixture(scope="module")
def steps(model, server):
    times = {"server_timeout_ms": 200, "load_timeout_ms": 2000}
    ours = OURS | {"server": str(server.address)} | times
    with tiering(engine_config(model, [ours])) as found:
        yield found


def test_a_chunk_that_left_vllms_ram_comes_back_from_the_server(steps):
    context, runs = steps.context(), [chunk_keys(prompt, 12) for prompt in (10, 11, 12)]
    for keys in runs:
        assert len(steps.store(context, keys)) == 12
        steps.settle()
    for keys in runs:
        assert steps.found(context, keys) == 12, "RAM has 16 chunks"
    steps.manager.on_request_finished(context)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(OPERATIONS)
def test_no_slot_stays_pinned_and_no_byte_is_wrong(steps, server, operations):
    live: list[Any] = [steps.context()]
    for kind, prompt, count in operations:
        keys = chunk_keys(prompt, count)
        if kind == "store":
            steps.store(live[-1], keys)
        elif kind == "find":
            assert steps.found(live[-1], keys) <= count
        elif kind == "step":
            steps.step()
            live.append(steps.context())
        elif kind == "reset":
            steps.manager.reset_cache()
        elif kind == "leave" and len(live) > 1:
            steps.manager.on_request_finished(live.pop(0))
        elif kind == "gone":
            steps.tier._server.invalidate(steps.tier._named(keys[::2]))
        elif kind == "kill" and count == 1:
            server.kill()
            server.start()
            wait_for(lambda: steps.tier._server._client.pool is not None, "attached again")
    for context in live:
        steps.manager.on_request_finished(context)
    steps.settle()
    assert steps.pinned() == 0
    assert not steps.tier._lookups._verdicts, "nothing is remembered of requests that ended"
