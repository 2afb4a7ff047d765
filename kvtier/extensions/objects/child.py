"""Requests of a bucket through ``obstore``, in the process that has it
(:mod:`kvtier.tiers.away.library_main`). It imports nothing of kvtier.

``obstore`` is kept out of engines because it takes the body of a refusal and a page of a list
whole, of any length. While it makes an error of a long refusal it holds the GIL: 0.13 s a MiB on
two slow cores.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import from_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_CONNECT_S = 2
_RETRIES = 1
_RETRY_S = 5
_PART_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
"""Bytes of an answer that are read at once."""
_NAME_LETTERS = 1024
"""Longest name of a listed object. Others are not chunks, and are left out."""


class BucketCalls:
    """Requests by *seat*. Objects' bytes lie in the seat's part (``room`` bytes) of ``memory``."""

    def __init__(self, store: Any, memory: mmap.mmap, room: int) -> None:
        self._store, self._memory, self._room = store, memoryview(memory), room
        self._pages: dict[int, Iterator[Any]] = {}

    def _place(self, seat: int, length: int) -> memoryview:
        return self._memory[seat * self._room :][:length]

    def put(
        self, seat: int, name: str, length: int, attributes: dict[str, str] | None, in_parts: bool
    ) -> None:
        obstore.put(
            self._store,
            name,
            self._place(seat, length),
            use_multipart=in_parts,
            chunk_size=_PART_BYTES,
            attributes=attributes,
        )

    def get(self, seat: int, name: str, length: int) -> bool | None:
        """Read an object into the seat's part. None without an object. False if its announced or
        real length differs; then only what the library has read by then was transferred."""
        try:
            answer = obstore.get(self._store, name)
        except FileNotFoundError:
            return None
        left = self._place(seat, length)
        if answer.meta["size"] != length:
            return False
        for piece in answer.stream(_PIECE_BYTES):
            taken = memoryview(piece)
            if taken.nbytes > left.nbytes:
                return False
            left[: taken.nbytes] = taken
            left = left[taken.nbytes :]
        return not left.nbytes

    def has(self, _: int, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def attribute(self, _: int, name: str, attribute: str) -> str:
        """Read metadata; empty without the object or the attribute."""
        try:
            answer = obstore.get(self._store, name, options={"head": True})
        except FileNotFoundError:
            return ""
        return str(answer.attributes.get(attribute, ""))

    def delete(self, _: int, name: str) -> None:
        with suppress(FileNotFoundError):  # S3 says nothing of a name that is not there, others do
            obstore.delete(self._store, name)

    def first_page(self, seat: int, folder: str) -> list[list[Any]] | None:
        self._pages[seat] = iter(obstore.list(self._store, prefix=folder))
        return self.next_page(seat)

    def next_page(self, seat: int) -> list[list[Any]] | None:
        """Return the next page of this seat's list, or None after the last."""
        for page in self._pages[seat]:
            return [
                [each["path"], each["size"], each["last_modified"].timestamp()]
                for each in page
                if len(each["path"]) <= _NAME_LETTERS
            ]
        return None

    def close(self) -> None:
        """Do nothing: running requests end with the process."""


def begin(setup: list[Any], memory: mmap.mmap, room: int) -> BucketCalls:
    url, limit_s, client = setup
    times: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(seconds=limit_s),
    }
    retry: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=min(limit_s, _RETRY_S)),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=500),
        },
    }
    return BucketCalls(
        from_url(url, client_options=client | times, retry_config=retry), memory, room
    )
