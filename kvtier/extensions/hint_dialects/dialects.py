"""Hints about a prompt's future in the forms that clients already send, translated to kvtier's
words. Pure: it imports no vLLM.

For a word from several sources the first of these wins: ``kv_transfer_params``, ``kv_hints``,
``nvext``, the providers' own fields, headers. Bad and unknown hints are counted and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from kvtier.connectors.vllm import hints

_EPHEMERAL_S = 300.0
"""Anthropic's default ``ttl`` of ``cache_control``."""
_MARK = b'"cache_control"'
_FIELD_BYTES = 64 << 10
"""Longest field. A longer one is a bad hint."""
_MOST_BLOCKS = 30_000
"""Most objects of a searched list. More would hold the API server's loop for milliseconds."""
_MOST_MARKS = 1000
_SESSION_HEADERS = (
    *("x-session-id", "x-dynamo-session-id", "x-claude-code-session-id"),
    *("thread-id", "session-id", "session_id"),
)
_CLAUDE_SESSION, _CLAUDE_AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"
_FINAL = "x-dynamo-session-final"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


_NONE = msgspec.Raw(b"null")
_TOO_LONG = object()


class _Part(msgspec.Struct, gc=False):
    """A part of a body that can be marked with ``cache_control``. Other fields are skipped."""

    cache_control: msgspec.Raw = _NONE


class _Block(_Part, gc=False):
    """A message, a tool or a part of the system prompt. Parts of its content can be marked too."""

    content: str | list[_Part] | None = None


_READ = (
    *("kv_hints", "nvext", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
    *("system", "tools", "messages", "session_id", "vllm_xargs", "kv_transfer_params"),
)
_BODY = msgspec.json.Decoder(
    msgspec.defstruct("_Body", [(name, msgspec.Raw, _NONE) for name in _READ], gc=False)
)
_BLOCKS = msgspec.json.Decoder(list[_Block])


def fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a body that may hold hints. Raises MsgspecError for no JSON object."""
    found = _BODY.decode(body)
    return {name: raw for name in _READ if (raw := getattr(found, name)) is not _NONE}


def of_http(headers: Mapping[str, str], body: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Translate a request to words of ``kv_transfer_params``. ``headers``: names in lower case."""
    words = hints.Words()
    for field, reader in _FIELDS.items():
        if field not in body:
            continue
        if len(bytes(body[field])) > _FIELD_BYTES:
            words.bad += 1
        elif (value := msgspec.json.decode(body[field])) is not None:
            reader(words, value)
    _marks(words, body)
    _session(words, body, headers)
    if _FINAL in headers:
        words.say(hints.OVER, _FLAGS.get(headers[_FINAL].strip().lower()))
    return words.said | ({hints.BAD: words.bad} if words.bad else {})


def _session(
    words: hints.Words, body: Mapping[str, msgspec.Raw], headers: Mapping[str, str]
) -> None:
    arguments, named = _small(body.get("vllm_xargs", _NONE)), []
    if "session_id" in body:
        named.append(_small(body["session_id"]))
    for header in _SESSION_HEADERS:
        name = headers.get(header, "")
        if name and header == _CLAUDE_SESSION and headers.get(_CLAUDE_AGENT):
            name = f"{name}/{headers[_CLAUDE_AGENT]}"  # a subagent's conversation is its own
        named.append(name)
    if isinstance(arguments, dict):
        named.append(arguments.get("session_id"))
    for name in named:
        if name:
            words.say(hints.SESSION, hints.short_name(name))


def _envelope(words: hints.Words, given: Any) -> None:
    actions = given.get("actions") if isinstance(given, dict) else None
    if not isinstance(actions, list):
        words.bad += 1
        return
    for action in actions[: hints.MOST_ACTIONS]:
        said = action if isinstance(action, dict) else {}
        hints.say_action(words, said.get("action_type"), said.get("payload"))
    words.bad += len(actions[hints.MOST_ACTIONS :])


def _nvext(words: hints.Words, given: Any) -> None:
    if not isinstance(given, dict):
        words.bad += 1
        return
    if "kv_hints" in given:
        _envelope(words, given["kv_hints"])
    if given.get("cache_control") is not None:
        words.say(hints.KEEP, _marked(given["cache_control"]))
    agents = given.get("agent_hints")
    if agents is None:
        return
    if not isinstance(agents, dict):
        words.bad += 1
        return
    for name, value in agents.items():
        words.say(hints.PRIORITY, hints.finite(value) if name == "priority" else None)


def _retention(words: hints.Words, given: Any) -> None:
    if given not in ("in_memory", "in-memory"):  # these ask for what is done anyway
        words.say(hints.KEEP, hints.seconds(given))


def _options(words: hints.Words, given: Any) -> None:
    if not isinstance(given, dict):
        words.bad += 1
    elif given.get("ttl") is not None:
        words.say(hints.KEEP, hints.seconds(given["ttl"]))


def _marks(words: hints.Words, body: Mapping[str, msgspec.Raw]) -> None:
    """Add the hint of Anthropic's marks. The longest counts, for all of the prompt: how many tokens
    lie before a mark cannot be told here."""
    found = [_marked(mark) for mark in _each_mark(body) if mark is not None]
    good = [one for one in found if one is not None]
    words.bad += len(found) - len(good)
    if good:
        words.say(hints.KEEP, max(good))


def _each_mark(body: Mapping[str, msgspec.Raw]) -> Iterator[Any]:
    """Yield the marks of the request and its blocks, a bounded number. Texts are not searched."""
    if "cache_control" in body:
        yield _small(body["cache_control"])
    found = (mark for field in ("system", "tools", "messages") for mark in _marks_of(body, field))
    for mark in islice(found, _MOST_MARKS):
        yield _small(mark)


def _marks_of(body: Mapping[str, msgspec.Raw], field: str) -> Iterator[msgspec.Raw]:
    raw = bytes(body.get(field, b""))
    if _MARK not in raw or raw.count(b"{") > _MOST_BLOCKS:
        return
    try:
        blocks = _BLOCKS.decode(raw)
    except msgspec.ValidationError:  # a form that has no marks, such as a text
        return
    for block in blocks:
        if block.cache_control is not _NONE:
            yield block.cache_control
        for part in block.content if isinstance(block.content, list) else ():
            if part.cache_control is not _NONE:
                yield part.cache_control


def _marked(mark: Any) -> float | None:
    if not isinstance(mark, dict) or mark.get("type", "ephemeral") != "ephemeral":
        return None
    return _EPHEMERAL_S if mark.get("ttl") is None else hints.seconds(mark["ttl"])


_FIELDS: dict[str, Callable[[hints.Words, Any], None]] = {
    "kv_hints": _envelope,
    "nvext": _nvext,
    "prompt_cache_options": _options,
    "prompt_cache_retention": _retention,
}


def _small(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw) if len(bytes(raw)) <= _FIELD_BYTES else _TOO_LONG
