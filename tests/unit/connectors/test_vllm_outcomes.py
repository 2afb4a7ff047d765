"""vLLM's own Scheduler: the log says of each request that was loaded how much, from where, and
vLLM's own tracing tells a real receiver of lookups and loads."""

import logging
import os
import re
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import pytest

from kvtier.connectors.vllm.extensions import outcomes
from kvtier.connectors.vllm.extensions.outcomes import LOAD, LOOKUP, HitLog, Traces
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.protocol.wire import Reason
from kvtier.server.strangers import LogLimit
from tests.clock import Clock
from tests.otlp_receiver import HTTP, PARENT, TRACE, TRACEPARENT, attributes, receiving
from tests.unit.real_scheduler import BLOCK, CHUNK, Core

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 4 * CHUNK + 1))


@pytest.fixture(autouse=True)
def lines(caplog):
    """The loggers are the process's own, and so is the bound on their lines."""
    ours, before = outcomes.hits_logger, outcomes.hits_logger.filters
    ours.filters, ours.propagate = [LogLimit(5, 10.0, Clock(), again_s=0.0)], False
    ours.addHandler(caplog.handler)
    ours.setLevel(logging.INFO)
    yield caplog
    ours.removeHandler(caplog.handler)
    ours.setLevel(logging.NOTSET)
    ours.filters, ours.propagate = before, True


def said(lines):
    return [one.getMessage() for one in lines.records if one.name == outcomes.hits_logger.name]


def serve(core, name, *, failed=False):
    """A request from its beginning to its end. vLLM's own cache is empty."""
    assert core.scheduler.reset_prefix_cache()
    core.add(core.request(name, PROMPT[:]))
    core.step(failed=failed)
    core.run(name)


def test_the_first_hit_of_an_engine_is_a_line_and_a_miss_is_none(core, lines):
    serve(core, "computed")
    assert said(lines) == []
    serve(core, "loaded")
    (line,) = said(lines)
    assert re.fullmatch(rf"{4 * CHUNK} of {len(PROMPT)} tokens from RAM in \d+ ms", line)


def test_a_load_that_failed_is_no_hit(core, lines):
    serve(core, "computed")
    serve(core, "broken", failed=True)
    assert said(lines) == []


def loaded(log, clock, tokens, number=1, **declined):
    """A request of 3,000 tokens that is loaded."""
    anything: Any = None
    prompt = Prompt(SimpleNamespace(num_tokens=3000), None)
    prompt.claim.declined = declined
    prompt.progress.sources = tokens
    log.asked(prompt, [])
    log.answered(prompt, [], 0)
    log.step(anything, [BegunLoad(number, prompt, 1)])
    clock.now += 0.012
    log.ended(Pending(number, ["one"], []), last_of=["one"])
    return prompt


def test_each_place_has_its_part_of_the_line(lines):
    log = HitLog(clock := Clock())
    loaded(log, clock, {"ram": 2048, "nvme": 768})
    assert said(lines) == ["2,816 of 3,000 tokens from RAM (2,048) and NVMe (768) in 12 ms"]


def test_the_line_says_why_a_hit_is_a_part(lines):
    log, hit = HitLog(clock := Clock()), {"nvme": 1536}
    loaded(log, clock, hit, deadline=2, unasked=0)
    loaded(log, clock, hit, slower=1, refused=1200)
    loaded(log, clock, hit, unasked=3)
    came = "1,536 of 3,000 tokens from NVMe in 12 ms"
    refused = "1,200 chunks could not be read or found no room (refused)"
    assert said(lines) == [
        f"{came}; 2 chunks came too late (deadline)",
        f"{came}; 1 chunk computed sooner (slower); {refused}",
        f"{came}; 3 chunks not asked for in a shared tier (unasked)",
    ]
    assert outcomes._WHY_A_PART.keys() == {*get_args(Reason)}


def test_many_hits_are_few_lines(lines):
    log = HitLog(clock := Clock())
    for number in range(100):
        loaded(log, clock, {"ram": 256}, number)
    assert len(said(lines)) == 5


def test_requests_that_are_over_leave_nothing(lines):
    log = HitLog(clock := Clock())
    assert not loaded(log, clock, {"ram": 256}).notes
    assert not loaded(log, clock, {}).notes, "computed, not loaded"
    assert not log._loads


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
