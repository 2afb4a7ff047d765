"""``vllm serve --middleware kvtier.connectors.vllm.hints.Middleware``: carries hints that clients
already send to the connector, so that no client has to change.

Hints in headers and fields (:mod:`kvtier.extensions.hint_dialects.dialects`) go into the body's
``kv_transfer_params``, whose own words stay. All other fields keep their bytes. No request fails
because of its hints.

vLLM puts the middleware before all else, the check of the API key included. So a body is read only
when vLLM reads it, and never for a request that vLLM refuses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import cache
from typing import Any

import msgspec

from kvtier.extensions.hint_dialects import dialects

logger = logging.getLogger("kvtier.connectors.vllm")

MOST_BYTES = 1 << 20
"""Longest body that is searched for hints."""
_PARAMS_BYTES = 64 << 10
"""Longest ``kv_transfer_params`` to which hints are added."""
_BODY_S = 10.0
"""Longest time that a body is held back for its hints."""
_PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/generate")
_PARAMS = "kv_transfer_params"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Middleware:
    """ASGI middleware that adds clients' hints. vLLM's ``/metrics`` shows requests that were not
    searched for hints, by reason, as ``kvtier_unread_hints_total``.

    ``Content-Length`` stays the client's: it was passed on before the body was read, and vLLM
    counts the bytes that come."""

    def __init__(
        self, app: App, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._most_bytes, self._clock = most_bytes, clock
        self._unread = _counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not _may_hint(scope):
            await self._app(scope, receive, send)
            return
        waiting: Iterator[Message] | None = None

        async def receive_with_hints() -> Message:
            nonlocal waiting
            if waiting is None:
                waiting = iter(await self._messages(scope, receive))
            message = next(waiting, None)
            return await receive() if message is None else message

        await self._app(scope, receive_with_hints, send)

    async def _messages(self, scope: Message, receive: Receive) -> list[Message]:
        """Return the first messages for the app: the whole body with its hints, or the beginning of
        one that is passed on unsearched. No more is kept than the app keeps itself."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        if _length(headers) > self._most_bytes:
            self._pass_over("too_long")
            return []
        messages: list[Message] = []
        size, until = 0, self._clock() + _BODY_S
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return messages
            size += len(message.get("body", b""))
            if size > self._most_bytes or self._clock() > until:
                self._pass_over("too_long" if size > self._most_bytes else "too_slow")
                return messages
            if not message.get("more_body", False):
                break
        old = b"".join(message.get("body", b"") for message in messages)
        new = self._read(headers, old)
        return messages if new is old else [{"type": "http.request", "body": new}]

    def _read(self, headers: dict[str, str], body: bytes) -> bytes:
        """Return the body with its own hints and those of the headers, unchanged without any."""
        try:
            return carried(headers, body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self._pass_over("malformed")
        except Exception:
            logger.exception("hints of a request could not be read: it goes on without them")
            self._pass_over("bug")
        return body

    def _pass_over(self, why: str) -> None:
        self._unread.labels(why).inc()


def carried(headers: dict[str, str], body: bytes) -> bytes:
    """Return the body with all hints in a ``kv_transfer_params`` at its end: of two fields with one
    name the last counts. Unchanged if there are no hints, or ``kv_transfer_params`` has an
    unexpected form. Raises msgspec.MsgspecError unless it is a JSON object."""
    fields = dialects.fields(body)
    said = dialects.of_http(headers, fields)
    raw = bytes(fields.get(_PARAMS, b"null"))
    given = msgspec.json.decode(raw) if len(raw) <= _PARAMS_BYTES else raw
    if not said or not isinstance(given, dict | None):
        return body
    params = msgspec.json.encode(said | (given or {}))
    before = body.rstrip()[:-1].rstrip()
    comma = b"" if before.endswith(b"{") else b","
    return b"".join((before, comma, b'"', _PARAMS.encode(), b'":', params, b"}"))


def _may_hint(scope: Message) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and str(scope["path"]).endswith(_PATHS)
    )


def _length(headers: dict[str, str]) -> int:
    said = headers.get("content-length", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 19 else 0


@cache
def _counter() -> Any:
    """Return the counter that all middlewares of this process share."""
    from prometheus_client import Counter

    unread = Counter("kvtier_unread_hints", "Requests that were not searched for hints.", ["why"])
    for why in ("too_long", "too_slow", "malformed", "bug"):
        unread.labels(why)
    return unread
