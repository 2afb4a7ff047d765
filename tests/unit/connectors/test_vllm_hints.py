"""Hints of requests on vllm's own Scheduler: what was said reaches the store, once the request has
finished and its chunks are saved."""

import json
from collections import Counter

import pytest

from kvtier.connectors.vllm.extensions.installed import HintDelivery
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker, Ended
from kvtier.eviction.hints import Hint, salt_name
from kvtier.extensions.hint_dialects.middleware import carried
from kvtier.store.observer import Observer
from tests.child_process import DEADLINE_S, wait_for
from tests.unit.real_scheduler import CHUNK
from tests.unit.scheduler_half import extension

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 3 * CHUNK + 4))
OVER = {"kv_transfer_params": {"kvtier.over": True}}


class Told:
    """The hints that a core's store is given, and whether everything that was being saved is there
    by then."""

    def __init__(self, core, monkeypatch):
        self.half = core.connector._scheduler
        self.seen: list[tuple[list[ChunkKey], Hint, str]] = []
        store = self.half.store
        hint = store.hint
        store.touched.result(DEADLINE_S)  # nothing is followed before the pool's pages are there

        def spy(keys, given, session=""):
            assert store.lookup(keys).ready == len(keys), (
                "a chunk that is saved later would not be over"
            )
            self.seen.append(([*keys], given, session))
            hint(keys, given, session)

        monkeypatch.setattr(store, "hint", spy)
        self.counts, taken = Counter[str](), self.half.counts

        def counts():
            found = taken()
            self.counts.update(found)
            return found

        monkeypatch.setattr(self.half, "counts", counts)

    def keys(self, tokens):
        return [*self.half._layout.keys(tokens)]

    def followed(self, what):
        return int(self.half.store.stats()[what])


@pytest.fixture
def told(core, monkeypatch):
    return Told(core, monkeypatch)


def request(core, name, tokens, params=None, **more):
    made = core.request(name, tokens[:], **more)
    made.kv_transfer_params = (
        params  # where vLLM puts what the sampling parameters' extra_args have
    )
    return made


def settled(core):
    for _ in range(5):
        core.step()


@pytest.mark.usefixtures("core")
def test_vllm_puts_a_requests_kv_transfer_params_where_they_are_read():
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvtier.connectors.vllm.hints import of_request

    limits = SamplingParams(max_tokens=1, extra_args=OVER)
    assert of_request(Request("one", PROMPT[:], limits, None)).hint == Hint(over=True)


def test_the_end_of_a_session_is_told_after_its_last_save(core, told):
    core.add(request(core, "one", PROMPT, OVER["kv_transfer_params"], max_tokens=2 * CHUNK))
    core.run("one")
    settled(core)
    assert told.counts["hints_over"] == 1
    whole = PROMPT + [7] * (2 * CHUNK - 1)
    assert [hint for _, hint, _ in told.seen] == [Hint(over=True)]
    assert told.seen[0][0] == told.keys(whole)[: len(told.seen[0][0])] and len(told.seen[0][0]) >= 4
    wait_for(lambda: told.followed("hints_followed") == 1, "followed")
    assert told.half.store._directory._over == set(told.seen[0][0]), "the answer is over too"


def test_what_nobody_says_is_not_told(core, told):
    core.add(
        request(
            core, "one", PROMPT, {"kvtier.over": False, "kvtier.session": "s", "kvtier.keep_s": -1}
        )
    )
    core.run("one")
    settled(core)
    assert told.counts["hints_bad"] == 1
    assert told.seen == []


def test_an_end_in_a_request_of_its_own_is_of_the_sessions_last_prompt(core, told):
    core.add(request(core, "one", PROMPT, {"kvtier.session": "mine"}))
    core.run("one")
    wait_for(lambda: told.followed("followed_prompts") == 1, "followed")
    core.add(request(core, "bye", [1, 2, 3], {"kvtier.session": "mine", "kvtier.over": True}))
    core.run("bye")
    settled(core)
    assert [(keys, hint) for keys, hint, _ in told.seen] == [([], Hint(over=True))]
    wait_for(lambda: told.followed("hints_followed") == 1, "followed")
    assert told.half.store._directory._over == set(told.keys(PROMPT))


def test_sessions_by_the_name_vllm_has_and_their_salt(core, told):
    params = {"kvtier.keep_s": 60}
    for number, more in enumerate([{"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}]):
        core.add(request(core, str(number), PROMPT, params, session_id="mine", **more))
        core.run(str(number))
    settled(core)
    first, second, third = (session for _, _, session in told.seen)
    assert first == third != second
    kept = [Hint(keep_s=60.0, salt=salt_name(salt)) for salt in ("a", "b", "a")]
    assert [hint for _, hint, _ in told.seen] == kept


def test_a_request_that_is_kept_out_and_one_that_is_aborted(core, told):
    from vllm.v1.request import RequestStatus

    core.add(request(core, "out", PROMPT, {"kvtier.cache": False, "kvtier.over": True}))
    core.run("out")
    core.add(request(core, "gone", PROMPT, OVER["kv_transfer_params"]))
    core.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    settled(core)
    assert told.seen == []
    assert not extension(told.half, HintDelivery)._waiting


@pytest.mark.usefixtures("core")
def test_what_the_middleware_writes_vllms_own_forms_take_to_the_engine():
    """A chat with an OpenAI client's fields, and Anthropic's messages with a mark."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    said = {"x-session-id": "mine", "x-dynamo-session-final": "true"}
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    talk = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_cache_options": {"ttl": "1h"},
    }
    marked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    wanted = {"kvtier.session": "mine", "kvtier.over": True, "kvtier.keep_s": 3600.0}
    chat = ChatCompletionRequest.model_validate_json(carried(said, json.dumps(talk).encode()))
    assert (chat.to_sampling_params(1, {}).extra_args or {})["kv_transfer_params"] == wanted
    messages = AnthropicMessagesRequest.model_validate_json(
        carried(said, json.dumps(marked).encode())
    )
    assert messages.kv_transfer_params == wanted


def test_how_a_request_ended_is_told_where_the_store_was_asked_for_it(core, monkeypatch):
    from vllm.v1.request import RequestStatus

    store, asked, told = core.connector._scheduler.store, list[Asker](), list[Ended]()

    class Asked(Observer):
        def prompt(self, run, asker):
            asked.append(asker)

    store.observe(Asked())
    monkeypatch.setattr(store, "ended", told.append)
    core.add(request(core, "one", PROMPT, max_tokens=5))
    core.run("one")
    core.add(request(core, "gone", PROMPT, max_tokens=50))
    core.step()
    core.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    core.add(request(core, "out", PROMPT, {"kvtier.cache": False}))
    core.run("out")
    settled(core)
    assert [(end.tokens, end.stop) for end in told] == [(5, "length"), (told[1].tokens, "abort")]
    assert told[1].tokens < 50
    assert [end.request for end in told] == [*dict.fromkeys(one.request for one in asked)]
