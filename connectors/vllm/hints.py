"""``vllm serve --middleware kvtier.connectors.vllm.hints.Middleware``: carries hints that clients
already send to the connector, so that no client has to change.

The hints in headers and fields (:mod:`kvtier.connectors.vllm.hint_words`) go into the body's
``kv_transfer_params``. What is there already stays. A body without hints is passed on as it came.
So is a body that is too long, is no JSON, or has an unexpected form: no request fails because of
its hints. Every other field keeps its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any

import msgspec

from kvtier.connectors.vllm import hint_words

logger = logging.getLogger("kvtier.connectors.vllm")

MOST_BYTES = 16 << 20
"""Longer bodies are not read for hints."""
_PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/generate")
_PARAMS = "kv_transfer_params"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Middleware:
    """ASGI. ``unread``: requests that were not searched for hints, by reason. vLLM's ``/metrics``
    shows them as ``kvtier_unread_hints_total``."""

    def __init__(self, app: App, most_bytes: int = MOST_BYTES) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._unread = _counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not _may_hint(scope):
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        if _length(headers) > self._most_bytes:
            self._pass_over("too_long")
            await self._app(scope, receive, send)
            return
        messages, size, whole = [], 0, False
        while not whole and size <= self._most_bytes:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                break
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
        if whole:
            old = b"".join(message.get("body", b"") for message in messages)
            new = self._read(headers, old)
            if new is not old:
                scope = {**scope, "headers": _resized(scope["headers"], len(new))}
                messages = [{"type": "http.request", "body": new, "more_body": False}]
        elif size > self._most_bytes:
            self._pass_over("too_long")
        waiting = iter(messages)

        async def again() -> Message:
            message = next(waiting, None)
            return await receive() if message is None else message

        await self._app(scope, again, send)

    def _read(self, headers: dict[str, str], body: bytes) -> bytes:
        """The body with its hints and those of the headers. The same body where there are none."""
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
    """The body with its hints and those of the headers in its ``kv_transfer_params``. The same body
    where there are none, or where those have an unexpected form. Raises msgspec.MsgspecError for a
    body that is no JSON object."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    said = hint_words.of_http(headers, fields)
    given = msgspec.json.decode(fields[_PARAMS]) if _PARAMS in fields else None
    if not said or not isinstance(given, dict | None):
        return body
    fields[_PARAMS] = msgspec.Raw(msgspec.json.encode(said | (given or {})))
    return msgspec.json.encode(fields)


def _may_hint(scope: Message) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and str(scope["path"]).endswith(_PATHS)
    )


def _length(headers: dict[str, str]) -> int:
    said = headers.get("content-length", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 19 else 0


def _resized(headers: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    length = b"content-length"
    return [
        (name, str(size).encode() if name.lower() == length else value) for name, value in headers
    ]


@cache
def _counter() -> Any:
    """One counter a process, however many middlewares there are."""
    from prometheus_client import Counter

    unread = Counter("kvtier_unread_hints", "Requests that were not searched for hints.", ["why"])
    for why in ("too_long", "malformed", "bug"):
        unread.labels(why)
    return unread
