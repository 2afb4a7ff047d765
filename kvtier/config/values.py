"""From text to a value (else ValueError), and from a value to text that may stand in a log."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvtier.core.terminal import parse_size
from kvtier.tiers.registry import TIERS

_MOST_STREAMS = 64
_ENDPOINT = r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]?,=*@#]+):\d{1,5}|ipc:///[^\s?,]{1,100}"
_STREAM = re.compile(
    rf"(?P<name>[A-Za-z0-9._:-]{{1,64}})=(?P<endpoint>{_ENDPOINT})"
    rf"(?:\?replay=(?P<replay>\d{{1,5}}|{_ENDPOINT}))?"
)


class Stream(NamedTuple):
    """Endpoints at which an engine or a server publishes its KV events. ``replay``: where missed
    messages are asked for, or None."""

    name: str
    endpoint: str
    replay: str | None


def parse_stream(text: str) -> Stream:
    """Parse one stream without a name. Raises ValueError for anything else."""
    (stream,) = parse_streams(f"server={text}")
    return stream


def parse_streams(text: str) -> list[Stream]:
    """Parse streams such as ``e1=ipc:///run/e1?replay=ipc:///run/e1r,
    e2=tcp://1.2.3.4:55?replay=56``: a name is what a router calls the engine, and ``replay`` a port
    of the same host, or an endpoint. Raises ValueError for no list of streams, and for a name that
    comes twice."""
    found = [_STREAM.fullmatch(part.strip()) for part in text.split(",")]
    streams = [_stream(one) for one in found if one is not None]
    if len({stream.name for stream in streams}) < len(found) or len(streams) > _MOST_STREAMS:
        raise ValueError(f"no list of event streams: {text}")
    return streams


def _stream(found: re.Match[str]) -> Stream:
    name, endpoint, replay = found.group("name", "endpoint", "replay")
    if replay is not None and replay.isdecimal():
        if not endpoint.startswith("tcp:"):
            raise ValueError(f"no list of event streams: {found.group()}")
        replay = f"{endpoint.rpartition(':')[0]}:{replay}"
    return Stream(name, endpoint, replay)


def _count(given: object) -> int:
    if isinstance(given, bool) or not re.fullmatch(r"[0-9]+", str(given)) or int(str(given)) < 1:
        raise ValueError(given)
    return int(str(given))


def _percent(given: object) -> int:
    if _count(given) > 100:
        raise ValueError(given)
    return _count(given)


_FLAG_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def parse_flag(given: object) -> bool:
    text = str(given).lower()
    if text not in _FLAG_WORDS:
        raise ValueError(given)
    return _FLAG_WORDS[text]


def _text(pattern: str) -> Callable[[object], str]:
    def parse(given: object) -> str:
        if not isinstance(given, str | os.PathLike) or not re.fullmatch(pattern, os.fspath(given)):
            raise ValueError(given)
        return os.fspath(given)

    return parse


def _each(parse: Callable[[object], object]) -> Callable[[object], str]:
    """Make a parser of several values, in a list or separated by commas."""

    def parse_all(given: object) -> str:
        texts = given if isinstance(given, list | tuple) else str(given).split(",")
        return ",".join(
            str(parse(text.strip() if isinstance(text, str) else text)) for text in texts
        )

    return parse_all


def _sizes(given: object) -> int | str:
    if isinstance(given, list | tuple) or "," in str(given):
        return _each(lambda text: f"{parse_size(text)}B")(given)
    return parse_size(given)


def _as_given(parse: Callable[[str], object]) -> Callable[[object], str]:
    def check(given: object) -> str:
        parse(str(given))
        return str(given)

    return check


def _http(given: object) -> str:
    if given is False:
        return "off"
    return _text(r"off|https?://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}/?")(given)


_COUNTED = {"tokens": "tokens", "ms": "milliseconds", "s": "seconds", "engines": "engines"}
PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    **{
        unit: (_count, f"a whole number of {words}, at least 1") for unit, words in _COUNTED.items()
    },
    "bytes": (parse_size, "a size such as 4GiB, 512MB or 4096B"),
    "percent": (_percent, "a whole number from 1 to 100"),
    "flag": (parse_flag, "true or false"),
    "folder": (_text(r"/[^\0\n]*"), "an absolute path such as /mnt/nvme/kvtier"),
    "folders": (
        _each(_text(r"/[^\0\n,]*")),
        "an absolute path such as /mnt/nvme/kvtier, or several",
    ),
    "sizes": (_sizes, "a size such as 4GiB, 512MB or 4096B, or one for each folder"),
    "file": (_text(r"/[^\0\n]*"), "an absolute path such as /etc/kvtier/token"),
    "http": (_http, "http://host:port, https://host:port or off"),
    "address": (
        _each(_text(r"(unix:///[^\s,]+|tcp://[^\s,]+:\d+)")),
        "unix:///path/kvtier.sock or tcp://host:port, of several hosts one for each",
    ),
    "streams": (
        _as_given(parse_streams),
        "name=ipc:///path?replay=ipc:///path, name=tcp://host:port?replay=port, or several",
    ),
    "stream": (
        _as_given(parse_stream),
        "ipc:///path?replay=ipc:///path or tcp://host:port?replay=port",
    ),
    "name": (_text(r"[A-Za-z0-9._-]{1,64}"), "1 to 64 letters, digits, '.', '_' or '-'"),
    "object": (_text(r"([A-Za-z_]\w*\.)+[A-Za-z_]\w*"), "a dotted path such as acme.provider"),
    "policy": (_text(r"auto|lru"), "auto or lru"),
    "level": (_text(r"DEBUG|INFO|WARNING|ERROR"), "DEBUG, INFO, WARNING or ERROR"),
}
"""Unit of a key -> function that reads its value, and the expected value in words."""


_MAY_HOLD_A_PASSWORD = re.compile(r"(?s)[^/].*[@#?]")
_URLS = [
    about.url
    for tier in TIERS.values()
    for _, about in tier.section.keys().values()
    if about.url is not None
]


def masked(value: object) -> object:
    """Mask passwords. Of a tier's URL with one, only the understood parts stay."""
    if not isinstance(value, str) or _is_streams(value):
        return value
    for url in _URLS:
        if (safe := url.safe(value)) is not None:
            return safe
    return "***" if _MAY_HOLD_A_PASSWORD.match(value) else value


def _is_streams(text: str) -> bool:
    """Whether it is event streams, with or without names, which have no place for a password."""
    try:
        parse_streams(text if text.partition("://")[0].count("=") else f"server={text}")
    except ValueError:
        return False
    return True


_SECRET_NAME = re.compile(
    r"passw|secret|token(?!s)|credential|auth|(api|access|private|encryption)_?key", re.IGNORECASE
)
_SHOWN_LETTERS, _SECRET_LETTERS = 200, 16


def shown(name: str, value: object, unit: str = "") -> object:
    """Return ``value`` for a log line or an error: masked, cut if it is long, and hidden if it
    looks like a secret that was given in the place of a file, or under a ``name`` of another
    package's (``unit`` is empty then)."""
    if isinstance(value, Mapping | list | tuple | set):
        return f"({type(value).__name__})"
    text = masked(value)
    plain = str(text)
    if unit == "file":
        hidden = len(plain) >= _SECRET_LETTERS and not plain.startswith(("/", "./", "../", "~"))
    else:
        hidden = not unit and _SECRET_NAME.search(name) is not None
    if hidden:
        return "***"
    return text if len(plain) <= _SHOWN_LETTERS else f"{plain[:_SHOWN_LETTERS]}..."
