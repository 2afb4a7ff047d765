"""Followed: one engine of the fleet, as the admin interface knows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.config.streams import Stream
from kvtier.extensions.engine_index.picture import Picture

EVENTS = ("message", "gap", "dropped", "refused")
"""What is counted of a stream: messages that were applied, gaps between them, pictures that were
dropped, and messages that could not be read."""
_MOST_BLOCKS = 1 << 21
"""Of all engines together: about 460 MB."""


class Followed:
    """``followed``: its stream is connected, and the picture is as new as what came."""

    def __init__(self, stream: Stream, most_blocks: int) -> None:
        self.stream = stream
        self.name = stream.name
        self.picture = Picture(most_blocks)
        self.followed = False
        self.counts: Counter[str] = Counter()

    def drop(self) -> None:
        """Nothing that was told is sure any more."""
        self.picture.clear()
        self.counts["dropped"] += 1


def followed(streams: Sequence[Stream]) -> list[Followed]:
    """Each gets an equal part of the room."""
    return [Followed(stream, _MOST_BLOCKS // len(streams)) for stream in streams]
