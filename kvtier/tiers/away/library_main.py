"""The process that has a library. It is run as a file and imports nothing of kvtier.

``library_main.py FILE CONTROL MEMORY SEAT...``: the file that speaks to the library, and the
numbers of inherited sockets and of the memory that both processes map. Each seat takes one call at
a time, and has a thread and a part of the memory.

FILE has ``begin(setup, memory, room)``. It returns an object with ``close`` and a method for each
call, which gets the seat's number and the arguments.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import runpy
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

_LOOK_S = 1.0
_STACK_BYTES = 1 << 20
_TEXT_LETTERS = 16 << 10
"""Most characters told of an error, which may hold an answer of any length."""


def main(file: str, control: Connection, memory: int, seats: list[Connection]) -> None:
    parent = os.getppid()
    if most := json.loads(control.recv_bytes()):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    threading.stack_size(_STACK_BYTES)
    try:
        begin = runpy.run_path(file)["begin"]
    except ImportError as error:
        _tell(control, _fault(error))
        return
    _tell(control, None)
    room, setup = json.loads(control.recv_bytes())
    try:
        calls = begin(setup, mmap.mmap(memory, room * len(seats)), room)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        _tell(control, _fault(error))
        return
    for index, seat in enumerate(seats):
        threading.Thread(target=_serve, args=(calls, seat, index), daemon=True).start()
    _tell(control, None)
    while not control.poll(_LOOK_S):
        if os.getppid() != parent:  # a process that the parent forked may hold the socket open
            break
    calls.close()


def _serve(calls: Any, seat: Connection, index: int) -> None:
    while True:
        try:
            what, *asked = json.loads(seat.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = [getattr(calls, what)(index, *asked)]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            answer = _fault(error)
        _tell(seat, answer)


def _fault(error: Exception) -> list[Any]:
    return [None, type(error).__name__, str(error)[:_TEXT_LETTERS]]


def _tell(to: Connection, what: object) -> None:
    to.send_bytes(json.dumps(what).encode())


if __name__ == "__main__":
    _file, _control, _memory, *_seats = sys.argv[1:]
    try:
        main(
            _file,
            Connection(int(_control)),
            int(_memory),
            [Connection(int(seat)) for seat in _seats],
        )
    finally:
        os._exit(0)  # without the library's own ends, which wait for calls that are going on
