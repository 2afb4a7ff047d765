"""Documents from other prompts, in vLLM's own scheduler: what is loaded from where, what is kept of
it (nothing), and what a request that cannot have them gets instead."""

import logging
from collections import Counter
from dataclasses import replace

import pytest

from kvtier.core.lookup import Asking
from kvtier.load_policy.decide import LoadPolicy
from kvtier.load_policy.prefill import Prefill, PrefillTime
from kvtier.spans import compose, homes
from tests.unit.real_scheduler import BLOCK, CHUNK
from tests.unit.scheduler_half import extension

FIELD, FIRST = "kvtier.spans", "kvtier.span_first"
ANCHOR = list(range(100, 120))
CATS = list(range(200, 250))
DOGS = list(range(300, 345))
ANTS = list(range(400, 470))
QUESTION = list(range(500, 510))


@pytest.fixture
def on(core):
    """An engine whose workers can move tokens, and compute some in place."""
    spans = spans_of(core)
    spans.why_not = spans.why_not_in_place = ""
    return core


def spans_of(core):
    from kvtier.extensions.spans.engine import Spans

    return extension(core.connector._scheduler, Spans)


def warm(core, *documents, **more):
    for index, home in enumerate(homes(ANCHOR, list(documents), CHUNK)):
        ask(core, f"home {index} {more}", home.tokens, **more)
    assert core.scheduler.reset_prefix_cache(), "from here on only kvtier has homes"


def ask(core, name, tokens, **more):
    request = core.request(name, tokens, **more)
    core.add(request)
    core.run(name)
    return request


def prompt(*documents):
    return compose(lambda _: [], ANCHOR, list(documents), QUESTION)


def asking(made):
    return {FIELD: [list(one) for one in made.ranges]}


def blend(core, name, made, first=0, **more):
    """A new request that asks for the spans of its prompt."""
    request = core.request(name, made.tokens, **more)
    request.kv_transfer_params = asking(made) | ({FIRST: first} if first != 0 else {})
    core.add(request)
    return request


def metadata(core):
    return core.output.kv_connector_metadata


def told(core, request):
    """What its answer says, which ends it."""
    _, params = core.connector.request_finished(request, [])
    return (params or {}).get(FIELD)


def own_hit(core, request):
    """Tokens that vLLM's own prefix cache has for it."""
    return int(core.scheduler.kv_cache_manager.get_computed_blocks(request)[1])


@pytest.fixture
def totals(core, monkeypatch):
    """All counts of spans so far: vLLM takes them after every step."""
    found: Counter[str] = Counter()
    spans = spans_of(core)
    new = spans.counts

    def told_again():
        counts: dict[str, int] = new()
        found.update(counts)
        return counts

    monkeypatch.setitem(core.connector._scheduler._hooks, "counts", [told_again])
    return found


def counts(core, totals):
    core.connector._scheduler.counts()
    return dict(totals)


def test_every_token_is_loaded_once_from_the_home_it_belongs_to(on, totals):
    warm(on, CATS, DOGS, ANTS)
    made = prompt(ANTS, CATS, DOGS)
    request = blend(on, "blended", made, max_tokens=5)
    on.step()
    (job,) = metadata(on).spans
    assert not metadata(on).loads
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert job.tokens == end
    places = [place for one in job.pieces for place in range(one.begin, one.begin + one.tokens)]
    assert places == list(range(end))
    anchor = len(ANCHOR)
    for piece in job.pieces:
        span = next(one for one in made.ranges[1:] if piece.begin < one.end)
        assert piece.distance == span.begin - anchor
        assert (piece.begin - piece.distance) % CHUNK == piece.first
    assert len({piece.slot for piece in job.pieces}) == len(job.pieces), "no slot is read twice"
    assert job.twins, "fillers are tokens that come twice"
    on.step()
    assert request.num_computed_tokens >= end
    assert told(on, request) == {"reused": end, "computed": len(made.tokens) - end, "missing": []}
    found = counts(on, totals)
    assert found["spans_moved"] + found["spans_kept"] == end
    assert found["spans_kept"] == made.ranges[1].end


def test_nothing_of_a_blended_request_is_saved_and_nobody_else_finds_its_blocks(on):
    warm(on, CATS, DOGS)
    made = prompt(CATS, DOGS)
    request = blend(on, "blended", made, max_tokens=3 * CHUNK)
    before = set(on.connector._scheduler.store.every_key())
    while on.scheduler.requests:
        on.step()
        assert not metadata(on).saves
    assert request.num_tokens > len(made.tokens) + 2 * CHUNK
    assert set(on.connector._scheduler.store.every_key()) == before
    exact = on.request("exact", made.tokens)
    assert own_hit(on, exact) == 0, "or blended blocks were served as exact ones"
    assert own_hit(on, on.request("answer", list(request.all_token_ids))) == 0
    first = made.ranges[1].end // CHUNK * CHUNK
    assert on.hit(exact) == first, "its first document's home is its own beginning"
    again = blend(on, "again", made)
    assert own_hit(on, again) == 0, "nor does another blended request"


def test_places_of_the_same_token_are_told_until_all_ranks_have_checked_the_rotation(on):
    warm(on, CATS, DOGS)
    told_of = []
    for name in ("fails", "checks", "trusts"):
        blend(on, name, prompt(DOGS, CATS))
        on.step(failed=name == "fails")
        (job,) = metadata(on).spans
        told_of.append(bool(job.twins))
        on.run(name)
        assert on.scheduler.reset_prefix_cache()
    assert told_of == [True, True, False]


def test_what_the_prompt_has_itself_is_loaded_and_saved_as_ever(on):
    made = prompt(CATS, DOGS)
    longer = made._replace(tokens=[*made.tokens, *range(600, 600 + CHUNK)])
    ask(on, "exact", longer.tokens)
    assert on.scheduler.reset_prefix_cache()
    request = blend(on, "blended", longer)
    on.step()
    assert not metadata(on).spans
    (job,) = metadata(on).loads
    assert job.tokens == (len(longer.tokens) - 1) // CHUNK * CHUNK
    assert told(on, request)["declined"] == "exact"


def test_homes_are_found_under_the_requests_own_salt(on):
    warm(on, CATS, DOGS)
    made = prompt(CATS, DOGS)
    blend(on, "theirs", made, cache_salt="theirs")
    on.step()
    assert not metadata(on).spans, "these homes are another tenant's"
    on.run("theirs")
    warm(on, CATS, DOGS, cache_salt="theirs")
    blend(on, "again", prompt(DOGS, CATS), cache_salt="theirs")
    on.step()
    assert len(metadata(on).spans) == 1


def test_a_load_that_fails_is_computed_and_not_promised_again(on, totals):
    warm(on, CATS, DOGS)
    made = prompt(CATS, DOGS)
    request = blend(on, "fails", made)
    on.step(failed=True)
    assert len(metadata(on).spans) == 1
    while request.num_computed_tokens < len(made.tokens):
        output = on.step()
        assert not metadata(on).spans
        assert not metadata(on).loads
    assert output.num_scheduled_tokens["fails"] == len(made.tokens)
    assert counts(on, totals)["unblended_failed"] == 1


def test_a_request_that_is_aborted_while_it_loads_keeps_its_slots_until_then(on):
    from vllm.v1.request import RequestStatus

    warm(on, CATS, DOGS)
    blend(on, "aborted", prompt(CATS, DOGS))
    on.begin()
    assert len(metadata(on).spans) == 1
    spans = spans_of(on)
    on.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    assert spans.waits
    on.end()
    assert not spans.waits


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([[0, 20], [10, 30]], "malformed"),
        ("all", "malformed"),
        ([[0, 20], [20, 9999]], "malformed"),
        ([[at, at + 1] for at in range(66)], "many"),
    ],
)
def test_malformed_ranges_are_counted_and_change_nothing(on, totals, given, reason):
    request = on.request("asks", prompt(CATS).tokens)
    request.kv_transfer_params = {FIELD: given}
    hashes = list(request.block_hashes)
    on.add(request)
    assert list(request.block_hashes) == hashes
    assert counts(on, totals) == {f"unblended_{reason}": 1}
    assert told(on, request) == {"reused": 0, "declined": reason, "missing": []}


def test_media_and_streams_are_refused_by_name_and_each_is_warned_of_once(on, totals, caplog):
    made = prompt(CATS, DOGS)
    with caplog.at_level(logging.WARNING, "kvtier"):
        asked = [
            request
            for turn in range(2)
            for request in (
                blend(on, f"image {turn}", made, media={30: "cat.png"}),
                blend(on, f"stream {turn}", made, resumable=True),
                uncached(on, f"uncached {turn}", made),
            )
        ]
    assert {request.cache_salt for request in asked} == {None}
    assert counts(on, totals) == {"unblended_unsupported": 6}
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert sorted(said) == [
        "it has images or other media",
        "it is a streaming session",
        "nothing of it is cached",
    ]


def test_homes_that_other_weights_have_computed_are_not_served(on):
    warm(on, CATS, DOGS)
    blend(on, "before", prompt(CATS, DOGS), max_tokens=5)
    on.step(replaced=True)
    on.run("before")
    request = blend(on, "asks", prompt(CATS, DOGS), max_tokens=5)
    on.step()
    assert not metadata(on).spans
    assert told(on, request)["declined"] == "missing"


def test_an_engine_whose_runner_moves_nothing_says_so_by_name_and_answers_exactly(core, caplog):
    why = "spans have not run with vLLM's Model Runner V2, the default on GPUs"
    core.connector._config = core.connector._config.with_keys(spans=True)
    core.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): replace(core.rank, why_no_spans=why)}
    )
    for name in ("one", "two"):
        request = blend(core, name, prompt(CATS, DOGS), max_tokens=5)
        core.step()
        assert told(core, request) == {"reused": 0, "declined": "unsupported", "missing": []}
    assert caplog.text.count(f"spans: every request is computed exactly: {why}") == 1
    assert caplog.text.count(f"a request asks for {FIELD} and is computed exactly: {why}") == 1


def uncached(core, name, made):
    """It asks for documents, and that kvtier is kept out of it."""
    request = core.request(name, made.tokens)
    request.kv_transfer_params = asking(made) | {"kvtier.cache": False}
    core.add(request)
    return request


def test_without_the_operators_word_a_request_that_asks_is_as_any_other(core, totals):
    warm(core, CATS, DOGS)
    request = blend(core, "asks", prompt(CATS, DOGS))
    assert request.cache_salt is None
    core.step()
    assert not metadata(core).spans
    assert told(core, request) is None
    assert counts(core, totals)["unblended_off"] == 1


def test_an_engine_that_does_not_heed_a_new_salt_blends_nothing(on, totals):
    warm(on, CATS, DOGS)
    made = prompt(CATS, DOGS)
    request = on.request("asks", made.tokens)
    request.kv_transfer_params = asking(made)
    hashes = list(request.block_hashes)
    request._block_hasher = lambda one: hashes if not one.block_hashes else []
    on.add(request)
    assert request.cache_salt is None
    assert list(request.block_hashes) == hashes
    on.step()
    assert not metadata(on).spans
    assert counts(on, totals)["unblended_salt"] == 1


@pytest.mark.parametrize(("wait_s", "loaded"), [(0.001, 3), (5.0, 2)], ids=["soon", "late"])
def test_a_home_that_takes_longer_to_come_than_to_compute_is_left(on, monkeypatch, wait_s, loaded):
    warm(on, CATS, DOGS, ANTS)
    put_far(on, monkeypatch, [DOGS], wait_s)
    made = prompt(ANTS, CATS, DOGS)
    request = blend(on, "asks", made, max_tokens=5)
    on.step()
    (job,) = metadata(on).spans
    assert job.tokens == made.ranges[loaded].end // BLOCK * BLOCK
    on.step()
    assert told(on, request)["missing"] == [], "it is there, and to warm it would not help"


def test_a_request_whose_homes_are_all_too_slow_is_computed_exactly(on, totals, monkeypatch):
    warm(on, CATS, DOGS)
    put_far(on, monkeypatch, [CATS, DOGS], 5.0)
    request = blend(on, "asks", prompt(CATS, DOGS), max_tokens=5)
    on.step()
    assert not metadata(on).spans
    assert told(on, request) == {"reused": 0, "declined": "slower", "missing": []}
    assert counts(on, totals)["unblended_slower"] == 1


def test_a_shared_tier_is_asked_for_homes_and_not_for_the_prompt_itself(on, monkeypatch):
    """It may always have the prompt. Hardly anything would be moved if that were waited for."""
    warm(on, CATS, DOGS)
    store = on.connector._scheduler.store
    lookup = store.lookup

    def looked_up(keys):
        found = lookup(keys)
        asks = found.known < len(keys)
        return found._replace(asking=Asking(0.001, 0.002, 0.5)) if asks else found

    monkeypatch.setattr(store, "lookup", looked_up)
    made = prompt(DOGS, CATS)
    blend(on, "asks", made)
    on.step()
    (job,) = metadata(on).spans
    moved = sum(piece.tokens for piece in job.pieces if piece.distance)
    assert moved == job.tokens - made.ranges[2].begin


def put_far(core, monkeypatch, documents, wait_s):
    """The homes of these lie in a lower tier. A token takes a millisecond to compute."""
    scheduler = core.connector._scheduler
    known = Prefill(PrefillTime(1e-3))
    monkeypatch.setattr(spans_of(core), "_load_policy", LoadPolicy(2.0, prefill=known))
    far = {scheduler._layout.keys(one.tokens)[-1] for one in homes(ANCHOR, documents, CHUNK)}
    lookup = scheduler.store.lookup

    def looked_up(keys):
        found = lookup(keys)
        is_far = bool(keys) and keys[-1] in far
        return found._replace(steps=[(0, 0.0), (found.known, wait_s)]) if is_far else found

    monkeypatch.setattr(scheduler.store, "lookup", looked_up)


def test_one_request_claims_a_quarter_of_ram_at_most(on, totals, monkeypatch, caplog):
    scheduler = on.connector._scheduler
    quarter = scheduler.store.pool.slots // 4
    long = [list(range(1000 * n, 1000 * n + 300)) for n in (1, 2)]
    warm(on, *long)
    needs = sum(-(-(len(ANCHOR) + len(one)) // CHUNK) for one in long)
    assert needs <= quarter
    monkeypatch.setattr(type(scheduler.store), "most_held", 4 * needs - 4)
    with caplog.at_level(logging.WARNING, "kvtier"):
        asked = [blend(on, f"{turn}", prompt(*long[::-1]), max_tokens=5) for turn in range(2)]
        on.step()
    assert not metadata(on).spans
    assert [told(on, request)["declined"] for request in asked] == ["room", "room"]
    assert counts(on, totals)["unblended_room"] == 2
    assert caplog.text.count("more than a quarter of the slots") == 1


def test_a_request_that_was_preempted_is_put_together_again_and_still_not_saved(on):
    warm(on, CATS, DOGS)
    made = prompt(CATS, DOGS)
    request = blend(on, "preempted", made, max_tokens=2 * CHUNK)
    while request.num_tokens < len(made.tokens) + 3:
        on.step()
    assert on.scheduler.reset_prefix_cache(reset_running_requests=True)
    loads = 0
    while on.scheduler.requests:
        on.step()
        loads += len(metadata(on).spans)
        assert not metadata(on).saves
    assert request.num_preemptions == loads == 1
    assert request.num_tokens == len(made.tokens) + 2 * CHUNK
