"""Places: RAM and the tiers below it, as numbers and names, and what changes there. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.core.chunk import ChunkKey

RAM = "ram"
REMOTE = "remote"
"""The name of a server on another host."""
RAM_PLACE = 0
"""The number of RAM. Tier ``index`` is place ``1 + index``."""


class Change(NamedTuple):
    """A chunk can be served from a place from now on (``there``), or not any more."""

    place: int
    key: ChunkKey
    there: bool
