"""The order in which a restarted tier's chunks may leave, rebuilt from keys and stamps. Pure.

A tier that outlives its process knows when each chunk was last written or used, but only roughly,
and not which chunk is whose leaf. The keys alone carry the second part
(:func:`kvtier.core.chunk.parent_half`): a parent must never leave before its child, because a run
is served from the first chunk on without a gap and a child without its parent is of no use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier.core.chunk import ChunkKey, own_half, parent_half


def coldest_first(stamped: Iterable[tuple[ChunkKey, Any]]) -> list[ChunkKey]:
    """Keys ordered coldest first: by stamp, but no parent before its child.

    ``stamped`` pairs each key with a comparable stamp, larger is hotter. A chunk counts as used
    when one of its descendants was: a hot leaf lifts all its ancestors. Of a key given twice the
    larger stamp counts. Keys whose parent is not among them are ordered by their stamp alone.

    A forged cycle of links ends instead of looping.
    """
    hottest_first = [key for key, _ in sorted(stamped, key=lambda pair: pair[1], reverse=True)]
    by_link = {own_half(key): key for key in hottest_first}
    placed: set[ChunkKey] = set()
    order: list[ChunkKey] = []
    for key in hottest_first:
        line: list[ChunkKey] = []
        ancestor: ChunkKey | None = key
        while ancestor is not None and ancestor not in placed:
            placed.add(ancestor)
            line.append(ancestor)
            ancestor = by_link.get(parent_half(ancestor))
        order.extend(reversed(line))
    order.reverse()
    return order
