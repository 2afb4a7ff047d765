"""The process that has Mooncake's client. It is run as a file and imports nothing of kvtier.

``child.py CONTROL MEMORY SEAT...``: numbers of inherited sockets, and of the memory that both
processes map. Each seat is one call at a time, with a part of the memory of its own, and is served
by a thread of its own.

Mooncake's client is not put into an engine, because it can stop or end the process it is in.
Version 0.3.13 holds Python's lock for 90 seconds where no master answers, waits 30 seconds for one
that is stopped, and ends the process (SIGSEGV) at a call that comes after its end.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

_LOOK_S = 1.0


def main(control: Connection, memory: int, seats: list[Connection]) -> None:
    parent = os.getppid()
    control.recv_bytes()
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        _tell(control, f"Mooncake's library is not complete here ({error}); install what it needs")
        return
    _tell(control, "")
    room, setup = json.loads(control.recv_bytes())
    try:
        total = room * len(seats)
        mapped = ctypes.c_char.from_buffer(mmap.mmap(memory, total))  # as long as it is referred to
        store = MooncakeDistributedStore()
        _begin(store, setup, ctypes.addressof(mapped), total)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        _tell(control, f"{error}; correct mooncake_url")
        return
    for index, seat in enumerate(seats):
        each = (store, seat, ctypes.addressof(mapped) + index * room, room)
        threading.Thread(target=_serve, args=each, daemon=True).start()
    _tell(control, "")
    while not control.poll(_LOOK_S):
        if os.getppid() != parent:  # a process that the parent forked may hold the socket open
            break
    store.close()


def _begin(store: Any, setup: list[Any], start: int, total: int) -> None:
    """Mooncake's client gets the memory of all seats. Raises anything."""
    if code := store.setup(*setup):
        raise RuntimeError(f"Mooncake's client does not start (code {code})")
    if code := store.register_buffer(start, total):
        raise RuntimeError(f"Mooncake does not take {total:,} bytes of memory (code {code})")


def _serve(store: Any, seat: Connection, place: int, room: int) -> None:
    """One call after another, until nobody is there."""
    while True:
        try:
            what, names, size = json.loads(seat.recv_bytes())
        except (EOFError, OSError):
            return
        if what == "put":
            answer = [store.put_from(names[0], place, size)]
        elif what == "get":
            answer = [store.get_into(names[0], place, room)]
        elif what == "has":
            answer = store.batch_is_exist(names)
        else:
            answer = store.batch_remove(names, True)
        _tell(seat, answer)


def _tell(to: Connection, what: object) -> None:
    to.send_bytes(json.dumps(what).encode())


if __name__ == "__main__":
    _control, _memory, *_seats = map(int, sys.argv[1:])
    try:
        main(Connection(_control), _memory, [Connection(seat) for seat in _seats])
    finally:
        os._exit(0)  # without the library's own ends, which wait for calls that are going on
