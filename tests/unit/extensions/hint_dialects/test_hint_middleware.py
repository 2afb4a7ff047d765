"""The middleware, over ASGI: hints that clients send already arrive in ``kv_transfer_params``, and
whatever it cannot read goes on as it came."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.vllm.hints import of_request
from kvtier.eviction.hints import LONGEST_KEEP_S, NO_HINT, PRIORITY_KEEP_S, Hint
from kvtier.extensions.hint_dialects.middleware import Middleware
from tests.clock import Clock

CHAT = "/v1/chat/completions"
WORDS = st.sampled_from([
    "nvext", "kv_hints", "cache_control", "agent_hints", "priority", "ttl", "actions", "payload",
    "action_type", "prompt_cache_options", "prompt_cache_retention", "messages", "content",
    "system", "session_id", "vllm_xargs", "kv_transfer_params", "kvtier.over", "kvtier.keep_s",
    "kvtier.session", "kvtier.bad_hints",
])  # fmt: skip
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class App:
    """What is behind the middleware: reads a request to its end."""

    def __init__(self):
        self.body = b""
        self.headers: dict[str, str] = {}
        self.types: list[str] = []

    async def __call__(self, scope, receive, send):
        self.headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        while True:
            message = await receive()
            self.types.append(message["type"])
            self.body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        if self.types[-1] == "http.request":
            self.types.append(
                (await receive())["type"]
            )  # what comes after a body is the client's end


def through(body, path=CHAT, cuts=1, most=1 << 20, gone=False, **headers):
    """The request as the app gets it. ``cuts``: pieces that the body comes in. ``gone``: the client
    leaves before its last piece."""
    app = App()
    size = -(-len(body) // cuts) or 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]
    messages[len(messages) - gone :] = [{"type": "http.disconnect"}]
    said = {name.replace("_", "-"): value for name, value in headers.items()} | {
        "Content-Length": str(len(body))
    }
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (name.lower().encode(), value.encode("latin-1")) for name, value in said.items()
        ],
    }
    waiting = iter(messages)

    async def receive():
        return next(waiting)

    async def send(message):
        raise AssertionError("the middleware answers nothing")

    asyncio.run(Middleware(app, most)(scope, receive, send))
    return app


def unread(why):
    return float(Middleware(App())._unread.labels(why)._value.get())


def carried(body, path=CHAT, **headers):
    """What arrives in ``kv_transfer_params``. The rest is as it was."""
    app = through(json.dumps(body).encode(), path, **headers)
    got = json.loads(app.body)
    params = got.pop("kv_transfer_params", None)
    assert got == {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return params


def understood(params, **more):
    """What the scheduler makes of it."""
    return of_request(SimpleNamespace(kv_transfer_params=params, cache_salt=None, **more))


class TestOpenAi:
    @pytest.mark.parametrize(
        ("field", "keep"),
        [
            ({"prompt_cache_retention": "24h"}, 86_400.0),
            ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, 1800.0),
            ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}, 3600.0),
            ({"nvext": {"cache_control": {"ttl": 90}}}, 90.0),
            ({"nvext": {"agent_hints": {"priority": 5}}}, PRIORITY_KEEP_S),
            ({"nvext": {"agent_hints": {"priority": 0}}}, 0.0),
            ({"prompt_cache_retention": "9999d"}, LONGEST_KEEP_S),
        ],
    )
    def test_keeping(self, field, keep):
        assert understood(carried(TALK | field)).hint == Hint(keep_s=keep)

    def test_what_the_openai_client_sends_with_extra_headers(self):
        params = carried(
            TALK | {"session_id": "mine"}, X_Session_ID="header", X_Dynamo_Session_Final="true"
        )
        assert params == {"kvtier.session": "mine", "kvtier.over": True}

    def test_in_memory_is_what_is_done_anyway(self):
        assert carried(TALK | {"prompt_cache_retention": "in_memory"}) is None

    def test_what_stands_in_kv_transfer_params_stays_and_rules(self):
        given = {"do_remote_prefill": True, "kvtier.keep_s": 7, "theirs": [1]}
        params = carried(
            TALK | {"kv_transfer_params": given, "prompt_cache_retention": "24h"}, X_Session_ID="s"
        )
        assert params == given | {"kvtier.session": "s"}

    def test_the_first_of_several_rules(self):
        keep = {
            "action_id": "1",
            "action_type": "kv.keep",
            "action_version": "1",
            "payload": {"ttl": 11},
        }
        hints = {"protocol_version": "1", "message_id": "m", "actions": [keep]}
        nvext = {"cache_control": {"ttl": 22}}
        body = TALK | {"prompt_cache_retention": "24h", "nvext": nvext}
        assert carried(body)["kvtier.keep_s"] == 22
        assert carried(body | {"kv_hints": hints})["kvtier.keep_s"] == 11


class TestAnthropic:
    def test_the_longest_mark(self):
        short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
        block = {"type": "text", "text": "x"}
        for marks, keep in (((short, None), 300), ((short, long), 3600), ((None, long), 3600)):
            body = {
                "model": "m",
                "max_tokens": 1,
                "system": [block | ({"cache_control": marks[0]} if marks[0] else {})],
                "messages": [
                    {
                        "role": "user",
                        "content": [block | ({"cache_control": marks[1]} if marks[1] else {})],
                    }
                ],
            }
            assert carried(body, "/v1/messages") == {"kvtier.keep_s": keep}
        assert carried({"cache_control": long, "messages": []}, "/v1/messages") == {
            "kvtier.keep_s": 3600
        }
        assert carried({"tools": [{"name": "t", "cache_control": long}]}, "/v1/messages") == {
            "kvtier.keep_s": 3600
        }

    def test_a_mark_in_somebodys_text_is_none(self):
        tool = {"type": "tool_use", "input": {"cache_control": {"type": "ephemeral"}}}
        messages = [
            {"role": "user", "content": '"cache_control"'},
            {"role": "assistant", "content": [tool]},
        ]
        assert carried({"messages": messages}, "/v1/messages") is None


class TestHeaders:
    @pytest.mark.parametrize(
        ("headers", "session"),
        [
            ({"X_Session_ID": "a"}, "a"),
            ({"X_Dynamo_Session_ID": "b"}, "b"),
            ({"x_claude_code_session_id": "c"}, "c"),
            ({"x_claude_code_session_id": "c", "x_claude_code_agent_id": "7"}, "c/7"),
            ({"thread_id": "d"}, "d"),
            ({"session_id": "e"}, "e"),
        ],
    )
    def test_sessions(self, headers, session):
        assert carried(TALK, **headers) == {"kvtier.session": session}

    def test_final(self):
        assert carried(TALK, X_Dynamo_Session_Final="TRUE") == {"kvtier.over": True}
        assert carried(TALK, X_Dynamo_Session_Final="false") == {"kvtier.over": False}
        assert carried(TALK, X_Dynamo_Session_Final="perhaps") == {"kvtier.bad_hints": 1}


class TestWhateverComes:
    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'"x"']
    )
    def test_what_is_no_json_object_goes_on_as_it_came(self, body):
        assert through(body, X_Session_ID="s").body == body

    def test_without_hints_not_a_byte_changes(self):
        body = b'{ "model":"m",  "kv_transfer_params": {"x": 1.50}, "n": 1e3 }'
        for cuts in (1, 3, len(body)):
            assert through(body, cuts=cuts).body == body

    def test_other_fields_keep_their_bytes(self):
        body = b'{"seed":12345678901234567890123,"t":1.50,"u":"\\u00e9\\ud800"}'
        assert body[:-1] in through(body, cuts=4, X_Session_ID="s").body

    def test_odd_kv_transfer_params_are_vllms_to_refuse(self):
        body = b'{"kv_transfer_params": [1]}'
        assert through(body, X_Session_ID="s").body == body
        assert carried({"kv_transfer_params": None}, X_Session_ID="s") == {"kvtier.session": "s"}

    @pytest.mark.parametrize("tell", [True, False])
    def test_a_long_body_is_passed_through_and_never_kept(self, tell):
        body = json.dumps(TALK | {"x": "y" * 5000}).encode()
        headers: dict[str, Any] = {"X_Session_ID": "s"} | ({} if tell else {"Content_Length": "1"})
        assert through(body, cuts=50, most=1000, **headers).body == body

    def test_a_request_that_is_refused_never_reads_its_body(self):
        async def refuses(scope, receive, send):
            await send({"type": "http.response.start", "status": 401, "headers": []})

        async def receive():
            raise AssertionError("nobody asked for the body")

        said = []

        async def send(message):
            said.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        asyncio.run(Middleware(refuses)(scope, receive, send))
        assert said == [401]

    def test_a_body_that_comes_too_slowly_is_passed_on_as_it_comes(self):
        clock, app, got = Clock(), App(), list[bytes]()
        pieces = [b'{"session_id": "s"', b" " * 9, b"}"]

        async def receive():
            clock.now += 6
            got.append(pieces[len(got)] if len(got) < 3 else b"")
            return {"type": "http.request", "body": got[-1], "more_body": len(got) < 3}

        async def send(_):
            raise AssertionError("the middleware answers nothing")

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        before = unread("too_slow")
        asyncio.run(Middleware(app, clock=clock)(scope, receive, send))
        assert app.body == b"".join(pieces)
        assert unread("too_slow") == before + 1

    def test_marks_are_looked_for_among_so_many_objects_that_it_takes_milliseconds(self):
        mark = {"cache_control": {"type": "ephemeral"}}
        few, many = ([mark, *({} for _ in range(count))] for count in (20_000, 40_000))
        assert carried({"messages": few}, "/v1/messages") == {"kvtier.keep_s": 300}
        assert carried({"messages": many}, "/v1/messages") is None
        long: list[Any] = [{}, *[{"cache_control": {}}] * 12_000]
        assert carried({"messages": long}, "/v1/messages") == {"kvtier.keep_s": 300}

    def test_a_field_that_is_too_long_to_mean_something_is_a_bad_hint(self):
        long: list[Any] = [{} for _ in range(40_000)]
        for field in ("nvext", "kv_hints", "prompt_cache_options", "session_id", "cache_control"):
            assert carried({field: long}) == {"kvtier.bad_hints": 1}
        given = {"kv_transfer_params": {"x": long}, "session_id": "s"}
        assert through(json.dumps(given).encode()).body == json.dumps(given).encode()

    def test_a_client_that_leaves_is_seen_to_leave(self):
        app = through(json.dumps(TALK).encode(), cuts=4, gone=True, X_Session_ID="s")
        assert app.types == ["http.request"] * 3 + ["http.disconnect"]

    def test_other_paths_and_kinds_are_left_alone(self):
        assert through(b"{}", "/v1/embeddings", X_Session_ID="s").body == b"{}"
        app = App()
        scope = {"type": "lifespan"}
        seen = []

        async def inner(*given):
            seen.append(given[0])

        asyncio.run(Middleware(inner)(scope, app, app))  # type: ignore[arg-type]
        assert seen == [scope]

    @pytest.mark.parametrize(
        ("field", "bad"),
        [
            ({"prompt_cache_retention": "for ever"}, 1),
            ({"prompt_cache_retention": ["24h"]}, 1),
            ({"prompt_cache_options": 3}, 1),
            ({"prompt_cache_options": {"ttl": -1}}, 1),
            ({"nvext": 1}, 1),
            (
                {
                    "nvext": {
                        "agent_hints": {"osl": 9, "speculative_prefill": True, "priority": "high"}
                    }
                },
                3,
            ),
            ({"nvext": {"cache_control": {"type": "other"}}}, 1),
            (
                {
                    "kv_hints": {
                        "actions": [
                            {"action_type": "kv.fetch", "payload": {}},
                            5,
                            {"action_type": []},
                        ]
                    }
                },
                3,
            ),
            ({"kv_hints": "x"}, 1),
            ({"session_id": "x" * 5000}, 1),
            ({"cache_control": [1]}, 1),
        ],
    )
    def test_bad_and_unknown_ones_are_counted(self, field, bad):
        said = understood(carried(TALK | field))
        assert (said.hint, said.session, list(said.kinds)) == (NO_HINT, "", ["bad"] * bad)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
            max_leaves=20,
        )
    )
    def test_no_body_fails(self, value):
        body = value if isinstance(value, dict) else {"nvext": value}
        sent = json.dumps(body).encode()
        app = through(sent, X_Dynamo_Session_Final="true")
        if app.body != sent:
            params = json.loads(app.body)["kv_transfer_params"]
            understood(params)
        understood(body)


class TestRequests:
    """What the scheduler makes of ``kv_transfer_params``, whoever wrote them."""

    def test_the_words(self):
        said = understood(
            {
                "kvtier.session": "s",
                "kvtier.over": True,
                "kvtier.keep_s": "5m",
                "kvtier.priority": 1,
            }
        )
        assert said.hint == Hint(True, 300.0) and list(said.kinds) == ["over", "keep", "priority"]
        assert understood({"lmcache_retention_ttl_sec": 60}).hint == Hint(keep_s=60.0)
        assert understood({"lmcache_retention_ttl_sec": 60, "kvtier.keep_s": 5}).hint == Hint(
            keep_s=5.0
        )

    def test_bad_words(self):
        given = {
            "kvtier.over": "yes",
            "kvtier.keep_s": float("nan"),
            "kvtier.what": 1,
            "kvtier.cache": True,
            "x": 1,
        }
        assert list(understood(given).kinds) == ["bad"] * 3
        assert understood([1]) == understood(None)

    def test_an_envelope(self):
        action = SimpleNamespace(action_type="kv.end", payload={})
        other = SimpleNamespace(action_type="kv.fetch", payload={})
        said = understood(None, kv_hints=SimpleNamespace(actions=[action, other]))
        assert (said.hint, list(said.kinds)) == (Hint(over=True), ["over", "bad"])

    def test_sessions_of_different_salts_are_different(self):
        def name(salt, **more):
            return of_request(
                SimpleNamespace(kv_transfer_params=None, cache_salt=salt, **more)
            ).session

        assert name("a", session_id="s") != name("b", session_id="s") != name(None, session_id="s")
        assert name(None, session_id="s" * 200) and len(name(None, session_id="s" * 200)) == 32
        assert name("a") == name("a", session_id=None) == ""
