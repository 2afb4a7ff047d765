"""Purge: finding an owner's chunks in a Store and its tiers, and counting those not deleted yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps, pieces
from kvtier.core.tenant import may
from kvtier.store.lower.lower_tier import Core, LowerTier


class Purge:
    """Finds the chunks of an ``owner``, or of all owners (None), for ``Store.invalidate`` to drop.
    Any thread may call it, and no call waits for a tier."""

    def __init__(
        self, core: Core, lower: Sequence[LowerTier], every_key: Callable[[], list[ChunkKey]]
    ) -> None:
        self._lock, self._directory = core.lock, core.directory
        self._lower, self._every_key = lower, every_key

    def finding(self, owner: int | None) -> Steps[set[ChunkKey]]:
        """Return every chunk in RAM or a tier that ``owner`` may drop
        (:func:`kvtier.core.tenant.may`)."""
        found = set[ChunkKey]()
        for part in pieces(self._every_key()):
            with self._lock:
                found.update(key for key in part if self._may_drop(key, owner))
            yield 0.0
        return found

    def outliving(self, keys: Sequence[ChunkKey], owner: int | None = None) -> Steps[int]:
        """Return how many of these chunks are being filled, or not yet deleted in a lower tier."""
        left = 0
        for part in pieces(keys):
            with self._lock:
                left += sum(self._is_unfinished(key, owner) for key in part)
            yield 0.0
        return left

    def unseen(self, owner: int | None) -> list[Future[tuple[int, bool]]]:
        """Begin :meth:`kvtier.store.lower.lower_tier.LowerTier.purge_unseen` of every tier."""
        return [lower.purge_unseen(owner) for lower in self._lower]

    def _may_drop(self, key: ChunkKey, owner: int | None) -> bool:
        entry, tiers = self._directory.get(key), self._directory.tiers
        return (entry is not None and may(owner, entry.owner)) or any(
            key in tier.order and tier.may_drop(key, owner) for tier in tiers
        )

    def _is_unfinished(self, key: ChunkKey, owner: int | None) -> bool:
        """Return whether the chunk is being filled, written or deleted: then no invalidate removes
        it yet. Under the lock."""
        entry, tiers = self._directory.get(key), self._directory.tiers
        return (entry is not None and may(owner, entry.owner)) or any(
            key in tier.leaving or key in tier.writing for tier in tiers
        )
