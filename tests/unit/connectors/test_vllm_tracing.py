"""vLLM's own Scheduler and vLLM's own tracing: what a lookup and a load tell a real receiver."""

import os
from unittest.mock import patch

import pytest

from kvtier.connectors.vllm.extensions.outcomes import LOAD, LOOKUP, Traces
from tests.otlp_receiver import HTTP, PARENT, TRACE, TRACEPARENT, attributes, receiving
from tests.unit.real_scheduler import BLOCK, CHUNK, Core

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 4 * CHUNK + 1))
HEADERS = {"traceparent": TRACEPARENT}


@pytest.fixture(scope="module")
def receiver():
    """A process has one tracer, so the tests share it."""
    from opentelemetry.trace import get_tracer_provider
    from vllm.tracing import init_tracer

    with receiving() as received, patch.dict(os.environ, HTTP):
        init_tracer("vllm.engine_core", received.url)
        yield received
        get_tracer_provider().shutdown()  # type: ignore[attr-defined]


@pytest.fixture
def traced(receiver, scheduled_model):
    return Core(scheduled_model, otlp_traces_endpoint=receiver.url)


@pytest.fixture
def told(receiver):
    """Spans of one request, by name."""
    from opentelemetry.trace import get_tracer_provider

    def of(name, request):
        get_tracer_provider().force_flush()  # type: ignore[attr-defined]
        spans = receiver.named(name)
        return [span for span in spans if attributes(span)["kvtier.request_id"] == request]

    return of


def served(core, name, *, failed=False, **more):
    """A request from its beginning to its end. vLLM's own cache is empty."""
    assert core.scheduler.reset_prefix_cache()
    core.add(core.request(name, PROMPT[:], **more))
    core.step(failed=failed)
    core.run(name)


def test_a_lookup_that_finds_nothing_says_why(traced, told):
    served(traced, "nothing")
    (lookup,) = told(LOOKUP, "nothing")
    assert attributes(lookup) == {
        "kvtier.request_id": "nothing",
        "kvtier.prompt_tokens": len(PROMPT),
        "kvtier.hit_tokens": 0,
        "kvtier.tiers": [],
        "kvtier.miss_reason": "cold",
    }
    assert told(LOAD, "nothing") == []


def test_a_hit_is_a_lookup_and_a_load_in_the_clients_trace(traced, told):
    served(traced, "saved")
    served(traced, "hit", trace_headers=HEADERS)
    (lookup,), (load,) = told(LOOKUP, "hit"), told(LOAD, "hit")
    hit = {"kvtier.hit_tokens": 4 * CHUNK, "kvtier.tiers": ["ram"], "kvtier.request_id": "hit"}
    assert attributes(lookup) == hit | {"kvtier.prompt_tokens": len(PROMPT)}
    told_of_load = attributes(load)
    seconds = told_of_load.pop("kvtier.seconds")
    slot = traced.rank.block_bytes[0] * CHUNK // BLOCK
    assert told_of_load == hit | {"kvtier.bytes": 4 * slot, "kvtier.failed": False}
    lasted = load.end_time_unix_nano - load.start_time_unix_nano
    assert 0 < seconds * 1e9 <= lasted + 1e3
    assert lookup.start_time_unix_nano < lookup.end_time_unix_nano <= load.start_time_unix_nano
    for span in (lookup, load):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_a_client_without_a_trace_begins_one_for_each_span(traced, told, monkeypatch):
    """An engine inherits the trace of its own start, to which no request belongs."""
    monkeypatch.setenv("traceparent", TRACEPARENT)
    served(traced, "alone")
    (lookup,) = told(LOOKUP, "alone")
    assert lookup.parent_span_id == b"" and lookup.trace_id.hex() != TRACE


def test_a_load_that_fails_says_so_and_is_looked_up_once(traced, told):
    served(traced, "before")
    served(traced, "broken", failed=True)
    (load,) = told(LOAD, "broken")
    assert attributes(load)["kvtier.failed"] is True
    assert len(told(LOOKUP, "broken")) == 1, "it is promised nothing any more"


def test_without_the_flag_there_is_nothing_that_traces(core):
    assert not any(isinstance(each, Traces) for each in core.connector._scheduler.extensions)
