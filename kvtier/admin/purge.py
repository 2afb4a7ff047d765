"""Purge: all chunks of a tenant, or of all, leave every place of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvtier.admin.forms import Cleared
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import TierError
from kvtier.core.tenant import tenant
from kvtier.server.extension import in_turns
from kvtier.server.registry import SizeClasses
from kvtier.store.store import Store
from kvtier.tiers.nvme.check import discard
from kvtier.tiers.nvme.folder import INDEX_NAME, below

_SEARCH_S = 15.0
_WAITS_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)


async def purge(
    size_classes: SizeClasses, namespace: str | None, nvme_folders: Sequence[Path]
) -> Cleared:
    """Purge the tenant ``namespace``, or everything (None), for at most 25 seconds a size class. On
    the server's loop. Raises KVTierError when the server is closing."""
    owner = None if namespace is None else tenant(namespace)
    chunks, busy = await asyncio.wrap_future(
        size_classes.on_lane(partial(_discard_closed, nvme_folders, owner))
    )
    opened = size_classes.open
    untouched = [
        str(folder) for folder in busy if folder.name not in {f"slots-{size}" for size in opened}
    ]
    left = owed = 0
    for size, size_class in opened.items():
        seen: set[ChunkKey] = set()
        await _drop(size_class.store, owner, seen)
        unseen, unsearched = await _purge_unseen(size_class.store, owner)
        # Engines may have loaded chunks before these were deleted from the lower tiers.
        unfinished = await _drop(size_class.store, owner, seen)
        chunks += len(seen) - unfinished + unseen
        left += unfinished
        untouched += [f"{name}, chunks of {size} bytes" for name in unsearched]
        owed += sum(tier.owed for tier in size_class.store.tiers)
    return Cleared(not (left or owed or untouched), chunks, left, owed, untouched)


async def _drop(store: Store, owner: int | None, seen: set[ChunkKey]) -> int:
    """Drop the owner's chunks, and add them to ``seen``. Returns how many are left."""
    left = 0
    for wait_s in _WAITS_S:
        await asyncio.sleep(wait_s)
        keys = list(await in_turns(store.purge.finding(owner)))
        await in_turns(store.invalidate.steps(keys, owner))
        seen.update(keys)
        left = await in_turns(store.purge.outliving(list(seen), owner))
        if not left:
            break
    return left


async def _purge_unseen(store: Store, owner: int | None) -> tuple[int, list[str]]:
    """Delete chunks of shared tiers that this server did not know of. Returns their number, and the
    tiers not searched to the end."""
    searches = [asyncio.wrap_future(search) for search in store.purge.unseen(owner)]
    if searches:
        await asyncio.wait(searches, timeout=_SEARCH_S)
    told = [search.result() if search.done() else (0, False) for search in searches]
    names = [tier.name for tier, (_, whole) in zip(store.tiers, told, strict=True) if not whole]
    return sum(count for count, _ in told), names


def _discard_closed(folders: Sequence[Path], owner: int | None) -> tuple[int, list[Path]]:
    """Remove chunks from the files of closed size classes. Returns their number, and the folders in
    use or silent, where none could be. On the lane that opens size classes."""
    chunks, busy, found = 0, list[Path](), list[Path]()
    for place in folders:
        there = below(place, f"slots-*/{INDEX_NAME}")
        busy += [place] if there is None else []
        found += there or []
    for index in sorted(found):
        try:
            chunks += discard(index.parent, owner)
        except TierError:
            busy.append(index.parent)
    return chunks, busy
