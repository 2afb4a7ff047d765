"""Documents whose first tokens are computed in place, in vLLM's own scheduler: two halves of a
load, the second of which all ranks begin in one step, and what becomes of those that fail."""

import logging
from collections import Counter

import pytest

from kvtier.spans import compose
from tests.unit.extensions.spans.test_vllm_spans import (
    ANCHOR,
    ANTS,
    CATS,
    DOGS,
    FIELD,
    QUESTION,
    ask,
    blend,
    counts,
    metadata,
    on,
    prompt,
    spans_of,
    told,
    totals,
    warm,
)
from tests.unit.real_scheduler import BLOCK, CHUNK

__all__ = ["on", "totals"]

NOTE = list(range(700, 707))


def test_the_pass_follows_the_copies_and_has_the_first_tokens_of_moved_spans(on, totals):
    warm(on, CATS, DOGS, ANTS)
    made = prompt(ANTS, CATS, DOGS)
    request = blend(on, "blended", made, first=5, max_tokens=5)
    on.step()
    (job,) = metadata(on).spans
    assert job.goes_on
    assert not metadata(on).passes
    on.step()
    (order,) = metadata(on).passes
    assert not metadata(on).spans
    assert (order.number, order.blocks) == (job.number, job.blocks)
    begins = [span.begin for span in made.ranges[2:]]
    assert [(run.begin, run.tokens) for run in order.runs] == [
        (begins[0], CATS[:5]),
        (begins[1], DOGS[:5]),
    ]
    assert request.status.name == "WAITING_FOR_REMOTE_KVS", "until the pass is through"
    on.step()
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert request.num_computed_tokens >= end
    assert told(on, request) == {
        "reused": end - 10,
        "computed": len(made.tokens) - end + 10,
        "missing": [],
    }
    found = counts(on, totals)
    assert found["spans_computed"] == 10
    assert found["spans_moved"] + found["spans_computed"] + found["spans_kept"] == end


def of_two_ranks(on):
    """Spans that wait for a second rank's reports."""
    spans = spans_of(on)
    spans._jobs._parts *= 2
    return spans


def test_nothing_is_ordered_before_the_last_rank_has_copied(on):
    """A rank that began earlier would wait for the others inside the model."""
    from kvtier.connectors.vllm.metadata import StepReport

    warm(on, CATS, DOGS)
    blend(on, "blended", prompt(CATS, DOGS), first=5)
    on.begin()
    (job,) = metadata(on).spans
    spans = of_two_ranks(on)
    spans.report(StepReport(done=Counter({job.number: 1})))
    assert spans._due() == []
    spans.report(StepReport(done=Counter({job.number: 1})))
    (order,) = spans._due()
    assert order.runs
    spans.report(StepReport(done=Counter({job.number: 1})))
    assert spans.waits, "one rank computes yet"
    spans.report(StepReport(failed=Counter({job.number: 1})))
    assert not spans.waits
    on.end()


def test_ranks_that_have_copied_end_together_with_one_that_could_not(on):
    """vLLM hears of a load from all ranks in one way, so they fail together."""
    from kvtier.connectors.vllm.metadata import StepReport

    warm(on, CATS, DOGS)
    blend(on, "blended", prompt(CATS, DOGS), first=5)
    on.begin()
    (job,) = metadata(on).spans
    spans, number = of_two_ranks(on), job.number
    spans.report(StepReport(done=Counter({number: 1}), failed=Counter({number: 1})))
    (order,) = spans._due()
    assert not order.runs
    spans.report(StepReport(failed=Counter({number: 2})))
    assert not spans.waits
    assert not spans.why_not_in_place, "no pass has failed"
    on.end()


def test_a_pass_that_fails_is_computed_exactly_and_after_three_it_is_off(on, totals, caplog):
    caplog.set_level(logging.ERROR, "kvtier")
    warm(on, CATS, DOGS)
    for time in range(3):
        made = prompt(CATS, DOGS)
        request = blend(on, f"fails {time}", made, first=5)
        on.step()
        on.step(failed=True)
        assert len(metadata(on).passes) == 1
        output = on.step()
        assert output.num_scheduled_tokens[request.request_id] == len(made.tokens)
        assert not metadata(on).spans
        on.run(request.request_id)
    assert counts(on, totals)["unblended_failed"] == 3
    (line,) = [record.getMessage() for record in caplog.records if "in place" in record.message]
    assert "failed 3 times, and is off in this process" in line
    blend(on, "declined", prompt(DOGS, CATS), first=5)
    on.step()
    assert not metadata(on).spans
    assert counts(on, totals)["unblended_unsupported"] == 1
    on.run("declined")
    assert on.scheduler.reset_prefix_cache()
    blend(on, "without", prompt(DOGS, CATS))
    on.step()
    assert len(metadata(on).spans) == 1, "moving goes on"


def test_weights_that_are_replaced_are_no_fault_of_the_pass(on):
    warm(on, CATS, DOGS)
    spans = spans_of(on)
    for time in range(3):
        blend(on, f"stale {time}", prompt(CATS, DOGS), first=5)
        on.step()
        spans.report(replaced())
        on.step(failed=True)
        assert len(metadata(on).passes) == 1
        on.run(f"stale {time}")
    assert not spans.why_not_in_place


def replaced():
    """What a rank says whose weights were replaced."""
    from kvtier.connectors.vllm.metadata import StepReport

    return StepReport(replacements=Counter({0: 1}))


def test_a_request_that_is_aborted_between_the_halves_ends_with_its_pass(on):
    from vllm.v1.request import RequestStatus

    warm(on, CATS, DOGS)
    free = on.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    blend(on, "aborted", prompt(CATS, DOGS), first=5)
    on.step()
    on.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    pool = on.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() < free, "a worker will write to its blocks"
    assert spans_of(on).waits
    on.step()
    assert len(metadata(on).passes) == 1
    assert not spans_of(on).waits
    assert pool.get_num_free_blocks() == free


def test_a_step_computes_no_more_in_place_than_an_engine_computes_in_a_step(on):
    spans = spans_of(on)
    spans._most_in_place = 12
    warm(on, CATS, DOGS, ANTS)
    for name in ("a", "b"):
        blend(on, name, prompt(CATS, DOGS, ANTS), first=5)
    made = prompt(CATS, DOGS, ANTS)
    shorter = blend(on, "c", made, first=7, max_tokens=5)
    on.step()
    assert [job.request_id for job in metadata(on).spans] == ["a", "b", "c"]
    for name in ("a", "b", "c"):
        on.step()
        assert [order.request_id for order in metadata(on).passes] == [name]
    end = made.ranges[2].end // BLOCK * BLOCK
    assert told(on, shorter)["reused"] == end - 7, "the last document's would be too much"


def test_what_is_missing_between_documents_is_computed_in_place(on, totals):
    """A document without a home, and tokens that are in no range."""
    warm(on, CATS, DOGS)
    made = compose(lambda _: [], ANCHOR, [CATS, ANTS, NOTE, DOGS], QUESTION)
    ranges = [list(made.ranges[index]) for index in (0, 1, 2, 4)]
    request = on.request("holes", made.tokens, max_tokens=5)
    request.kv_transfer_params = {FIELD: ranges}
    on.add(request)
    on.step()
    (job,) = metadata(on).spans
    end = made.ranges[4].end // BLOCK * BLOCK
    hole = range(made.ranges[2].begin, made.ranges[3].end)
    places = [place for one in job.pieces for place in range(one.begin, one.begin + one.tokens)]
    assert places == [place for place in range(end) if place not in hole]
    assert job.tokens == end, "vLLM is promised one run of whole blocks"
    on.step()
    (order,) = metadata(on).passes
    (run,) = order.runs
    assert (run.begin, run.moved) == (hole.start, hole.stop)
    assert run.tokens == [*ANTS, *NOTE, DOGS[0]]
    on.step()
    assert told(on, request) == {
        "reused": end - len(run.tokens),
        "computed": len(made.tokens) - end + len(run.tokens),
        "missing": [2],
    }
    found = counts(on, totals)
    assert found["spans_computed"] == len(run.tokens)
    assert found["spans_moved"] + found["spans_computed"] + found["spans_kept"] == end


def test_a_document_of_which_only_the_beginning_is_there_is_completed(on):
    """Somebody asked of it behind the anchor, so whole chunks of it are there."""
    ask(on, "alone", [*ANCHOR, *ANTS, *QUESTION])
    warm(on, CATS, DOGS)
    there = (len(ANCHOR) + len(ANTS)) // CHUNK * CHUNK - len(ANCHOR)
    made = prompt(CATS, ANTS, DOGS)
    request = blend(on, "partly", made, max_tokens=5)
    on.step()
    on.step()
    (order,) = metadata(on).passes
    assert [run.tokens for run in order.runs] == [[*ANTS[there:], DOGS[0]]]
    on.step()
    assert told(on, request)["missing"] == [2]


def test_what_left_between_lookup_and_load_is_computed(on, monkeypatch):
    """A store may drop chunks at any time that nobody holds."""
    warm(on, CATS, DOGS, ANTS)
    made = prompt(CATS, DOGS, ANTS)
    request = blend(on, "asks", made, max_tokens=5)
    scheduler = on.connector._scheduler
    home = scheduler._prompts[request.request_id].notes[spans_of(on)].homes[1]
    store, lookup = scheduler.store, scheduler.store.lookup

    def dropped(keys):
        found = lookup(keys)
        if keys == home:
            store.invalidate(keys[-1:])
        return found

    monkeypatch.setattr(store, "lookup", dropped)
    on.step()
    (job,) = metadata(on).spans
    assert job.tokens == made.ranges[-1].end // BLOCK * BLOCK
    on.step()
    (order,) = metadata(on).passes
    there = (len(home) - 1) * CHUNK - len(ANCHOR)
    assert [run.tokens for run in order.runs] == [[*DOGS[there:], ANTS[0]]]
    on.step()
    assert told(on, request)["missing"] == [2]


def test_a_promise_does_not_end_in_a_hole(on):
    """Of the last document no whole block would be there."""
    short = DOGS[: BLOCK // 2]
    warm(on, CATS, DOGS, short)
    made = compose(lambda _: [], ANCHOR, [CATS, DOGS, ANTS[:62], short], QUESTION)
    assert made.ranges[4].end // BLOCK * BLOCK < made.ranges[4].begin
    request = on.request("ends", made.tokens)
    request.kv_transfer_params = {FIELD: [list(made.ranges[index]) for index in (0, 1, 2, 4)]}
    on.add(request)
    on.step()
    (job,) = metadata(on).spans
    assert job.tokens == made.ranges[2].end // BLOCK * BLOCK
    assert not job.goes_on


@pytest.mark.parametrize("most", [0, 20])
def test_what_is_too_much_to_be_computed_in_place_ends_it(on, most):
    spans = spans_of(on)
    if most:
        spans._most_in_place = most
    else:
        spans.why_not_in_place = "LoRA is on"
    warm(on, CATS, DOGS, NOTE)
    made = prompt(CATS, DOGS, ANTS, NOTE)
    request = blend(on, "long hole", made, max_tokens=5)
    on.step()
    (job,) = metadata(on).spans
    assert job.tokens == made.ranges[2].end // BLOCK * BLOCK
    assert not job.goes_on
    on.step()
    assert told(on, request)["missing"] == [3]


@pytest.mark.parametrize("first", [-1, True, "16", 1.5, None])
def test_what_is_no_number_of_tokens_is_malformed(on, totals, first):
    blend(on, "asks", prompt(CATS, DOGS), first=first)
    assert counts(on, totals) == {"unblended_malformed": 1}


def test_workers_that_cannot_compute_in_place_move_for_those_who_do_not_ask_for_it(on, totals):
    spans_of(on).why_not_in_place = "LoRA is on"
    warm(on, CATS, DOGS)
    blend(on, "asks", prompt(CATS, DOGS), first=5)
    blend(on, "does not", prompt(CATS, DOGS))
    on.step()
    (job,) = metadata(on).spans
    assert job.request_id == "does not"
    assert not job.goes_on
    assert counts(on, totals)["unblended_unsupported"] == 1
