"""A bucket whose library is in this process: a tier's own requests, with no process to start."""

import mmap
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from obstore.store import MemoryStore, from_url

from kvtier.extensions.objects.bucket import Bucket
from kvtier.extensions.objects.child import BucketCalls
from kvtier.extensions.objects.url import parse
from kvtier.tiers.away.library_process import LibraryError
from tests.s3_server import URL

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_ROOM = 1 << 20


class _InProcess:
    """As far as a bucket sees it, a
    :class:`kvtier.tiers.away.library_process.LibraryProcess`."""

    def __init__(self, store):
        self._store = store

    @contextmanager
    def seat(self):
        memory = mmap.mmap(-1, _ROOM)
        calls = BucketCalls(self._store, memory, _ROOM)
        yield partial(self._asked, calls), memoryview(memory)

    def _asked(self, calls, what, *asked):
        try:
            return getattr(calls, what)(0, *asked)
        except Exception as error:
            raise LibraryError("it fails", type(error).__name__, str(error)) from error

    def close(self):
        pass


class MemoryBucket(Bucket):
    """A bucket in this process's memory. Several may have one ``store``, as several hosts have one
    bucket."""

    def __init__(self, store=None):
        self.url = parse(URL)
        self.label = self.url.label
        self._library = _InProcess(store or MemoryStore())  # type: ignore[assignment]


def beside(timeout="30s"):
    """The bucket that the environment has, to look behind a tier's back."""
    options: ClientConfig = {"allow_http": True, "timeout": timeout}
    retries: RetryConfig = {"max_retries": 0}
    return MemoryBucket(from_url("s3://bucket", client_options=options, retry_config=retries))
