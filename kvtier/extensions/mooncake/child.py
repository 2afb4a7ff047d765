"""Calls of Mooncake's client, in the process that has it
(:mod:`kvtier.tiers.away.library_main`). It imports nothing of kvtier.

Mooncake's client is kept out of engines because it can stop or end its process. Version 0.3.13
holds the GIL for 90 seconds where no master answers, waits 30 seconds for one that is stopped, and
crashes (SIGSEGV) at a call after its end.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from mooncake.store import MooncakeDistributedStore


class Calls:
    """Calls of Mooncake's client, which moves chunks to and from the memory of all seats."""

    def __init__(self, setup: list[Any], memory: mmap.mmap, room: int) -> None:
        self._store, self._room = MooncakeDistributedStore(), room
        self._mapped = ctypes.c_char.from_buffer(memory)  # as long as it is referred to
        self._start = ctypes.addressof(self._mapped)
        if code := self._store.setup(*setup):
            raise RuntimeError(f"Mooncake's client does not start (code {code})")
        if code := self._store.register_buffer(self._start, len(memory)):
            raise RuntimeError(
                f"Mooncake does not take {len(memory):,} bytes of memory (code {code})"
            )

    def _place(self, seat: int) -> int:
        return self._start + seat * self._room

    def put(self, seat: int, names: list[str], size: int) -> list[int]:
        return [self._store.put_from(names[0], self._place(seat), size)]

    def get(self, seat: int, names: list[str]) -> list[int]:
        return [self._store.get_into(names[0], self._place(seat), self._room)]

    def has(self, _: int, names: list[str]) -> Any:
        return self._store.batch_is_exist(names)

    def delete(self, _: int, names: list[str]) -> Any:
        return self._store.batch_remove(names, True)

    def close(self) -> None:
        self._store.close()


def begin(setup: list[Any], memory: mmap.mmap, room: int) -> Calls:
    try:
        return Calls(setup, memory, room)
    except Exception as error:
        raise RuntimeError(f"{error}; correct mooncake_url") from error
