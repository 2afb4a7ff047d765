"""Documents from other prompts, on a real vLLM: what is moved is what plain torch says, and nothing
else is touched by it.

Homes are warmed as a client would. Every blended answer is compared with the model in plain torch,
whose KV is put together in the same way. Exact answers are compared with a full forward pass.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtier.spans import compose, homes
from tests.integration.spans_server import BLOCK, CHUNK, Plain, Served, gap

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ANCHOR = 40
LENGTHS = (90, 128, 75, 150)
STEP = 512
"""Tokens of one step of the engine, and the most that are computed in place for a request."""
EXACT = 1e-3
"""Float32 sums in another order, over all layers."""


def ids(name, length):
    draw = random.Random(name)
    return [draw.randrange(10, 400) for _ in range(length)]


def documents(seed):
    return [ids(f"{seed} {index}", length) for index, length in enumerate(LENGTHS)]


def prompt(seed, order, question="?"):
    every = documents(seed)
    chosen = [every[index] for index in order]
    return compose(lambda _: [], ids(f"{seed} anchor", ANCHOR), chosen, ids(question, 20))


def asking(made, first=0, **more):
    params: dict[str, Any] = {"kvtier.spans": [list(one) for one in made.ranges]}
    params |= {"kvtier.span_first": first} if first else {}
    return {"kv_transfer_params": params} | more


@pytest.fixture(scope="module")
def plain(tiny):
    return Plain(tiny)


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spans")
    server = Served(tiny, folder, "--max-num-batched-tokens", str(STEP), KVTIER_SPANS="on")
    with server:
        yield server


def warm(served, seed, which):
    chosen = [documents(seed)[index] for index in which]
    for home in homes(ids(f"{seed} anchor", ANCHOR), chosen, CHUNK):
        served.ask(home.tokens, max_tokens=1)
    served.forget()


def spans(answer):
    found: dict[str, Any] = answer.told["kvtier.spans"]
    return found


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [2, 0]])
def test_a_blended_answer_is_what_plain_torch_makes_of_the_same_kv(served, plain, order):
    seed = 100 + len(order) + order[0]
    warm(served, seed, order)
    made = prompt(seed, order)
    answer = served.ask(made.tokens, **asking(made))
    reused = made.ranges[-1].end // BLOCK * BLOCK
    assert spans(answer) == {"reused": reused, "computed": len(made.tokens) - reused, "missing": []}
    assert answer.cached == reused
    assert gap(answer, plain.blended(made.tokens, made.ranges, reused)) < EXACT
    assert gap(answer, plain.full(made.tokens)) > 20 * EXACT, "or nothing would be shown by this"


@pytest.mark.parametrize("first", [16, 400])
def test_the_first_tokens_of_each_document_are_computed_in_place(served, plain, first):
    seed, order = 1000 + first, [3, 1, 0, 2]
    warm(served, seed, order)
    made = prompt(seed, order)
    counted = served.metric("vllm:kvtier_span_tokens_total", kind="computed")
    answer = served.ask(made.tokens, **asking(made, first))
    end = made.ranges[-1].end // BLOCK * BLOCK
    seams = sum(min(first, span.end - span.begin) for span in made.ranges[2:])
    seams -= max(0, min(made.ranges[-1].begin + first, made.ranges[-1].end) - end)
    assert spans(answer) == {
        "reused": end - seams,
        "computed": len(made.tokens) - end + seams,
        "missing": [],
    }
    counted = served.metric("vllm:kvtier_span_tokens_total", kind="computed") - counted
    assert counted == seams
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, first)) < EXACT
    moved = gap(answer, plain.blended(made.tokens, made.ranges, end))
    full = gap(answer, plain.full(made.tokens))
    assert moved > 20 * EXACT, "or nothing would be shown by this"
    assert (full < EXACT) == (first == 400)


def test_nothing_blended_reaches_an_exact_request_or_the_store(served, plain):
    """Its blocks stay in vLLM's own cache, and its answer is long enough for chunks of its own."""
    first = 16
    warm(served, first, [0, 1, 2])
    made = prompt(first, [0, 1, 2])
    answer = served.ask(made.tokens, **asking(made, first, max_tokens=2 * CHUNK))
    assert spans(answer)["reused"] > made.ranges[2].begin
    again = served.ask(made.tokens, **asking(made, first, max_tokens=2 * CHUNK))
    assert again.tokens == answer.tokens
    whole = [*made.tokens, *answer.tokens]
    exact = served.ask(whole)
    assert exact.told == {}
    assert exact.cached == made.ranges[1].end // CHUNK * CHUNK, "the first document's home is exact"
    assert gap(exact, plain.full(whole)) < EXACT
    own = served.ask(whole)
    assert own.cached > exact.cached
    assert gap(own, plain.full(whole)) < EXACT
    served.forget()
    saved = served.ask(whole)
    assert saved.cached == (len(whole) - 1) // CHUNK * CHUNK
    assert gap(saved, plain.full(whole)) < EXACT


def test_blending_begins_behind_what_the_prompt_itself_has(served, plain):
    made = prompt(9, [0, 1, 3, 2])
    served.ask(prompt(9, [0, 1], "another").tokens, max_tokens=1)
    warm(served, 9, [0, 1, 2, 3])
    answer = served.ask(made.tokens, **asking(made))
    exact, end = made.ranges[2].end // CHUNK * CHUNK, made.ranges[-1].end // BLOCK * BLOCK
    assert spans(answer)["reused"] == answer.cached == end
    assert exact > made.ranges[2].begin, "or the second document would be moved"
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, exact=exact)) < EXACT
    assert gap(answer, plain.blended(made.tokens, made.ranges, end)) > 20 * EXACT
    assert gap(answer, plain.full(made.tokens)) > 20 * EXACT


@pytest.mark.parametrize(
    ("missing", "unnamed", "first"),
    [([3], [], 0), ([], [2], 5), ([1], [3], 5)],
    ids=["document", "text", "both, and the first"],
)
def test_what_is_missing_between_documents_is_computed_in_place(
    served, plain, missing, unnamed, first
):
    seed = 300 + 10 * sum(missing) + sum(unnamed) + 100 * first
    warm(served, seed, [one for one in range(4) if one + 1 not in (*missing, *unnamed)])
    made = prompt(seed, [0, 1, 2, 3])
    gone = [made.ranges[one] for one in missing]
    made = made._replace(ranges=[one for at, one in enumerate(made.ranges) if at not in unnamed])
    answer = served.ask(made.tokens, **asking(made, first))
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert answer.cached == end, "vLLM was promised whole blocks"
    left = [made.ranges.index(one) for one in gone]
    told = spans(answer)
    assert told["missing"] == left
    assert told["reused"] + told["computed"] == len(made.tokens)
    assert end - told["reused"] > sum(one.end - one.begin for one in gone)
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, first, left)) < EXACT
    assert gap(answer, plain.full(made.tokens)) > 20 * EXACT, "or nothing would be shown by this"


def test_blended_and_exact_requests_of_one_batch_do_not_meet(served, plain):
    warm(served, 6, [0, 1, 2, 3])
    made = [prompt(6, [0, 1, 2], "a"), prompt(6, [2, 1, 3], "b"), prompt(6, [3, 0, 2], "c")]
    others = [prompt(6, [0, 2, 1], "a"), prompt(6, [2, 3, 1], "b"), prompt(6, [3, 2, 0], "c")]
    firsts = [0, 16, 7]
    with ThreadPoolExecutor(6) as pool:
        blended = [
            pool.submit(served.ask, one.tokens, **asking(one, first))
            for one, first in zip(made, firsts, strict=True)
        ]
        exact = [pool.submit(served.ask, one.tokens) for one in others]
        for one, first, asked in zip(made, firsts, blended, strict=True):
            answer, end = asked.result(), one.ranges[-1].end // BLOCK * BLOCK
            assert spans(answer)["reused"] == end - first * len(one.ranges[2:])
            assert gap(answer, plain.blended(one.tokens, one.ranges, end, first)) < EXACT
        exact += [pool.submit(served.ask, one.tokens) for one in made]
        for one, each in zip([*others, *made], exact, strict=True):
            assert gap(each.result(), plain.full(one.tokens)) < EXACT
