"""Erase: make a server forget a tenant, or everything, and say what is left.

What it promises is in the description of ``POST /v1/clear`` (:mod:`kvtier.openapi`). A Store forgets at once what is
READY; a chunk that an engine is filling, or a tier is writing, is caught when that has ended: hence the rounds. The
lock is taken for a batch at a time, so that engines go on in between.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from kvtier.chunk import ChunkKey
from kvtier.errors import TierError
from kvtier.fsck import discard
from kvtier.openapi import Cleared
from kvtier.realm import Realm, Realms
from kvtier.store import Store
from kvtier.tiers.nvme_files import INDEX_NAME

_BATCH = 1024
_WAITS_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)
_NOBODY = 0


async def erase(realms: Realms, namespace: str | None, nvme_path: str | None) -> Cleared:
    """Forget the tenant ``namespace``; None: everything. On the server's loop; at most about five seconds a realm and
    model. Raises KVTierError when the server is closing."""
    chunks, busy = await asyncio.wrap_future(realms.aside(partial(_discard_closed, nvme_path)))
    opened = realms.open
    left = owed = 0
    for realm in opened.values():
        for owner in _owners(realm, namespace):
            dropped, unfinished = await _forget(realm.store, owner)
            chunks += dropped
            left += unfinished
        owed += sum(int(getattr(tier, "owed", 0)) for tier in realm.store.tiers)
    untouched = [str(folder) for folder in busy if folder.name not in {f"slots-{size}" for size in opened}]
    return Cleared(not (left or owed or untouched), chunks, left, owed, untouched)


def _owners(realm: Realm, namespace: str | None) -> list[int | None]:
    """Whose chunks go; every owner's erasure takes nobody's too."""
    if namespace is None:
        return [None]
    return [number for (_, name), number in realm.owners.items() if name == namespace] or [_NOBODY]


async def _forget(store: Store, owner: int | None) -> tuple[int, int]:
    """Chunks forgotten, and chunks left."""
    seen: set[ChunkKey] = set()
    left = 0
    for wait_s in _WAITS_S:
        await asyncio.sleep(wait_s)
        keys = list(store.keys(owner))
        for start in range(0, len(keys), _BATCH):
            store.forget(keys[start : start + _BATCH], owner)
            await asyncio.sleep(0)
        seen.update(keys)
        left = store.unfinished(seen, owner)
        if not left:
            break
    return len(seen) - left, left


def _discard_closed(nvme_path: str | None) -> tuple[int, list[Path]]:
    """On the lane that opens realms: chunks removed with the files of realms that are not open, and the others."""
    chunks, busy = 0, []
    for index in sorted(Path(nvme_path).glob(f"slots-*/{INDEX_NAME}")) if nvme_path else []:
        try:
            chunks += discard(index.parent)
        except TierError:
            busy.append(index.parent)
    return chunks, busy
