"""``admin.engines``: where the engines of a fleet publish their KV events.

``engine-1=ipc:///run/e1?replay=ipc:///run/e1r, engine-2=tcp://10.0.0.1:5557?replay=5558``. A name
is what a router calls the engine. ``replay`` is vLLM's ``replay_endpoint``: a port of the same
host, or an endpoint.

``server.events`` is one of them without a name: where a server publishes its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MOST = 64
_ENDPOINT = r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]?,=*@#]+):\d{1,5}|ipc:///[^\s?,]{1,100}"
_STREAM = re.compile(
    rf"(?P<name>[A-Za-z0-9._:-]{{1,64}})=(?P<endpoint>{_ENDPOINT})"
    rf"(?:\?replay=(?P<replay>\d{{1,5}}|{_ENDPOINT}))?"
)


class Stream(NamedTuple):
    """``replay``: where missed messages are asked for. None: nowhere."""

    name: str
    endpoint: str
    replay: str | None


def parse_one(text: str) -> Stream:
    """Raises ValueError for anything but one stream without a name."""
    (stream,) = parse(f"server={text}")
    return stream


def parse(text: str) -> list[Stream]:
    """Raises ValueError for what is no list of streams, and for a name that comes twice."""
    found = [_STREAM.fullmatch(part.strip()) for part in text.split(",")]
    streams = [_stream(one) for one in found if one is not None]
    if len({stream.name for stream in streams}) < len(found) or len(streams) > _MOST:
        raise ValueError(f"no list of event streams: {text}")
    return streams


def _stream(found: re.Match[str]) -> Stream:
    name, endpoint, replay = found.group("name", "endpoint", "replay")
    if replay is not None and replay.isdecimal():
        if not endpoint.startswith("tcp:"):
            raise ValueError(f"no list of event streams: {found.group()}")
        replay = f"{endpoint.rpartition(':')[0]}:{replay}"
    return Stream(name, endpoint, replay)
