"""The hints about a prompt's future that clients already send, and what they mean. Pure: it
imports no vLLM.

The middleware (:mod:`kvtier.connectors.vllm.hints`) turns headers and fields of a body into words
of ``kv_transfer_params``, where :func:`of_request` finds them in the scheduler. A client that sends
those words itself needs no middleware. Where several sources give the same word, the first of these
wins: ``kv_transfer_params``, ``kv_hints``, ``nvext``, the providers' own fields, headers. Bad and
unknown hints are counted and have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from kvtier.eviction.hints import LONGEST_KEEP_S, NOTHING, Hint, read, salt_name, session_name

SESSION = "kvtier.session"
"""The session's name."""
OVER = "kvtier.over"
"""True when the session ends with this request."""
KEEP = "kvtier.keep_s"
"""For how many seconds (or ``5m``) after its last use the prompt shall be kept."""
PRIORITY = "kvtier.priority"
"""A number. Above 0 the prompt is kept for a while."""
BAD = "kvtier.bad_hints"
"""How many hints of the request the middleware could not read."""
KINDS = ("over", "keep", "priority", "bad")
_PREFIX = "kvtier."
_NO_HINT = "kvtier.cache"
_LMCACHE_KEEP = "lmcache_retention_ttl_sec"
_EPHEMERAL_S = 300.0
"""What Anthropic's ``cache_control`` means without a ``ttl``."""
_MOST_SESSION = 256
_MOST_ACTIONS = 64
_MARK = b'"cache_control"'
_MOST_FIELD = 64 << 10
"""Bytes of one field. A longer one is a bad hint."""
_MOST_BLOCKS = 30_000
"""Objects of one list that may have marks. A list of more is not searched: it would hold the API
server's loop for more than a few milliseconds."""
_MOST_MARKS = 1000
_DURATION = re.compile(r"(\d{1,9})([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "session_id",
)
_CLAUDE_SESSION, _CLAUDE_AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"
_FINAL = "x-dynamo-session-final"
_ACTIONS = {"kv.end": OVER, "kv.keep": KEEP, "kv.priority": PRIORITY}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Words:
    """The words of a request so far. The first value of a word wins."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.bad = 0

    def say(self, word: str, value: Any) -> None:
        """``value``: None means a bad one."""
        if value is None:
            self.bad += 1
        else:
            self.said.setdefault(word, value)


# ---- in the API server ---------------------------------------------------------------------------

_NONE = msgspec.Raw(b"null")
_TOO_LONG = object()


class _Part(msgspec.Struct, gc=False):
    """What can have a mark. The rest of it is skipped, and not decoded."""

    cache_control: msgspec.Raw = _NONE


class _Block(_Part, gc=False):
    """A message, a tool or a part of the system prompt. A mark may stand on each part of it too."""

    content: str | list[_Part] | None = None


_READ = (
    *("kv_hints", "nvext", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
    *("system", "tools", "messages", "session_id", "vllm_xargs", "kv_transfer_params"),
)
_BODY = msgspec.json.Decoder(
    msgspec.defstruct("_Body", [(name, msgspec.Raw, _NONE) for name in _READ], gc=False)
)
"""Other fields are skipped, and not decoded."""
_BLOCKS = msgspec.json.Decoder(list[_Block])


def fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a request's body in which hints stand. Raises msgspec.MsgspecError for a body
    that is no JSON object."""
    found = _BODY.decode(body)
    return {name: raw for name in _READ if (raw := getattr(found, name)) is not _NONE}


def of_http(headers: Mapping[str, str], body: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The words for ``kv_transfer_params`` in a request's headers and body. ``headers``: names in
    lower case."""
    words = Words()
    for field, reader in _FIELDS.items():
        if field not in body:
            continue
        if len(bytes(body[field])) > _MOST_FIELD:
            words.bad += 1
        elif (value := _decoded(body[field])) is not None:
            reader(words, value)
    _marks(words, body)
    _session(words, body, headers)
    if _FINAL in headers:
        words.say(OVER, _FLAGS.get(headers[_FINAL].strip().lower()))
    return words.said | ({BAD: words.bad} if words.bad else {})


def _session(words: Words, body: Mapping[str, msgspec.Raw], headers: Mapping[str, str]) -> None:
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
            words.say(SESSION, _name(name))


def _envelope(words: Words, given: Any) -> None:
    """A ``kv_hints`` envelope."""
    actions = given.get("actions") if isinstance(given, dict) else None
    if not isinstance(actions, list):
        words.bad += 1
        return
    for action in actions[:_MOST_ACTIONS]:
        said = action if isinstance(action, dict) else {}
        _action(words, said.get("action_type"), said.get("payload"))
    words.bad += len(actions[_MOST_ACTIONS:])


def _action(words: Words, kind: Any, payload: Any) -> None:
    word = _ACTIONS.get(kind) if isinstance(kind, str) else None
    if word is None or not isinstance(payload, Mapping):
        words.bad += 1
    elif word == OVER:
        words.say(OVER, True)
    elif word == KEEP:
        words.say(KEEP, seconds(payload.get("ttl")))
    else:
        words.say(PRIORITY, _number(payload.get("priority")))


def _nvext(words: Words, given: Any) -> None:
    if not isinstance(given, dict):
        words.bad += 1
        return
    if "kv_hints" in given:
        _envelope(words, given["kv_hints"])
    if given.get("cache_control") is not None:
        words.say(KEEP, _marked(given["cache_control"]))
    hints = given.get("agent_hints")
    if hints is None:
        return
    if not isinstance(hints, dict):
        words.bad += 1
        return
    for name, value in hints.items():
        words.say(PRIORITY, _number(value) if name == "priority" else None)


def _retention(words: Words, given: Any) -> None:
    if given not in ("in_memory", "in-memory"):  # these ask for what is done anyway
        words.say(KEEP, seconds(given))


def _options(words: Words, given: Any) -> None:
    if not isinstance(given, dict):
        words.bad += 1
    elif given.get("ttl") is not None:
        words.say(KEEP, seconds(given["ttl"]))


def _marks(words: Words, body: Mapping[str, msgspec.Raw]) -> None:
    """Anthropic's marks. The longest of them counts. How many tokens lie before a mark cannot be
    told here, so all of the prompt is kept."""
    found = [_marked(mark) for mark in _each_mark(body) if mark is not None]
    good = [one for one in found if one is not None]
    words.bad += len(found) - len(good)
    if good:
        words.say(KEEP, max(good))


def _each_mark(body: Mapping[str, msgspec.Raw]) -> Iterator[Any]:
    """The marks of the request, and of the blocks that may have one, as far as they are bounded.
    Texts and arguments are not searched."""
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
    return _EPHEMERAL_S if mark.get("ttl") is None else seconds(mark["ttl"])


_FIELDS: dict[str, Callable[[Words, Any], None]] = {
    "kv_hints": _envelope,
    "nvext": _nvext,
    "prompt_cache_options": _options,
    "prompt_cache_retention": _retention,
}

# ---- in the scheduler ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """The hints of one request about its future."""

    session: str = ""
    """A name of fixed length, different for each cache salt. Empty: the request names none."""
    hint: Hint = NOTHING
    kinds: Sequence[str] = ()
    """Entries of :data:`KINDS`, each as often as it was said."""


def of_request(request: Any) -> Said:
    """The hints in vLLM's ``Request``, whatever they look like."""
    given = request.kv_transfer_params
    given = given if isinstance(given, Mapping) else {}
    words = Words()
    for name, value in given.items():
        if name in _READERS:
            words.say(name, _READERS[name](value))
        elif name == BAD:
            words.bad += value if type(value) is int and 0 <= value <= _MOST_ACTIONS else 1
        elif isinstance(name, str) and name.startswith(_PREFIX) and name != _NO_HINT:
            words.bad += 1
    if _LMCACHE_KEEP in given:
        words.say(KEEP, seconds(given[_LMCACHE_KEEP]))
    for action in getattr(getattr(request, "kv_hints", None), "actions", ())[:_MOST_ACTIONS]:
        _action(words, action.action_type, action.payload)
    session = words.said.pop(SESSION, None) or _name(getattr(request, "session_id", None)) or ""
    hint, bad = read({word.removeprefix(_PREFIX): value for word, value in words.said.items()})
    kinds = [
        kind
        for kind, word in zip(KINDS, (OVER, KEEP, PRIORITY), strict=False)
        if words.said.get(word)
    ]
    if hint.keep_s:
        hint = hint._replace(salt=salt_name(request.cache_salt))
    return Said(
        session_name(request.cache_salt, session), hint, kinds + ["bad"] * (words.bad + bad)
    )


# ---- values --------------------------------------------------------------------------------------


def seconds(value: Any) -> float | None:
    """Seconds of ``300``, ``"300"``, ``"5m"`` or ``"1h"``: at most a day. None: the value is no
    duration."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        return min(float(match[1]) * _UNITS[match[2]], LONGEST_KEEP_S) if match else None
    number = _number(value)
    return min(number, LONGEST_KEEP_S) if number is not None and number >= 0 else None


def _number(value: Any) -> float | None:
    """The number, or None when it is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return float(value)


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _MOST_SESSION else None


_READERS: dict[str, Callable[[Any], Any]] = {
    SESSION: _name,
    OVER: lambda value: value if isinstance(value, bool) else None,
    KEEP: seconds,
    PRIORITY: _number,
}


def _decoded(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def _small(raw: msgspec.Raw) -> Any:
    """A value that is short where it means something. A longer one is a bad hint."""
    return _decoded(raw) if len(bytes(raw)) <= _MOST_FIELD else _TOO_LONG
