"""A bucket in this process's memory: the tier's own requests to a store of ``obstore``'s."""

from __future__ import annotations

from obstore.store import MemoryStore

from kvtier.tiers.objects.bucket import Bucket
from kvtier.tiers.objects.url import parse
from tests.s3_server import URL


class MemoryBucket(Bucket):
    """Several may have one ``store``, as several hosts have one bucket."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.url = parse(URL)
        self.label = self.url.label
        self._store = store or MemoryStore()
