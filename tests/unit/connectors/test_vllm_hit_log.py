"""vLLM's own Scheduler: the log says of each request that was loaded how much, from where."""

import logging
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from kvtier.connectors.vllm.extensions import outcomes
from kvtier.connectors.vllm.extensions.outcomes import HitLog
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.protocol.wire import Reason
from kvtier.server.strangers import LogLimit
from tests.clock import Clock
from tests.unit.real_scheduler import CHUNK

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
