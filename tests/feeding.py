"""The messages in bytes that a test has."""

from typing import TypeVar

T = TypeVar("T")


def feed(inbox, data):
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
