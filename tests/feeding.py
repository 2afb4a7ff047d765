"""The messages in bytes that a test has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from kvtier.protocol.inbox import Inbox

T = TypeVar("T")


def feed(inbox: Inbox[T], data: bytes | memoryview) -> Iterator[T]:
    """The messages that ``data`` completes."""
    rest = memoryview(data)
    while rest:
        room = inbox.room()
        taken = min(len(room), len(rest))
        room[:taken] = rest[:taken]
        rest = rest[taken:]
        inbox.filled(taken)
        while (message := inbox.next()) is not None:
            yield message
