"""Wire.get against whatever bytes come back: it yields what a well-formed reply holds, or ends, or raises; never hangs,
never writes outside, never leaves a connection in use whose replies nobody read."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.redis_wire import FAULTS, Wire, WrongSizeError

SIZE = 12
VALUE = bytes(range(SIZE))
GOOD = b"$%d\r\n%s\r\n" % (SIZE, VALUE)
PIECES = [
    GOOD,
    b"$-1\r\n",
    b"$3\r\nabc\r\n",
    b"$130\r\n",
    b"-ERR no\r\n",
    b"-MOVED 1 host:1\r\n",
    b":1\r\n",
    b"*0\r\n",
    b"\r\n",
]


class Socket:
    """Replies as they come: at most ``step`` bytes at once, then the end of the stream."""

    def __init__(self, data: bytes, step: int) -> None:
        self.data, self.step = data, step

    def recv_into(self, memory: memoryview) -> int:
        got = self.data[: min(self.step, memory.nbytes)]
        memory[: len(got)] = got
        self.data = self.data[len(got) :]
        return len(got)


class Connection:
    def __init__(self, data: bytes, step: int) -> None:
        self._sock = Socket(data, step)
        self.closed = False

    def send_packed_command(self, commands: Any) -> None:
        """Nobody listens."""

    def disconnect(self) -> None:
        self.closed = True


def values_in(data: bytes, names: int) -> list[bytes]:
    """What a reader may take from the stream: whole values of the right size, up to the first other reply."""
    values: list[bytes] = []
    head = GOOD[: GOOD.index(VALUE)]
    while len(values) < names and data.startswith(head) and data[len(GOOD) - 2 : len(GOOD)] == b"\r\n":
        values.append(data[len(head) : len(head) + SIZE])
        data = data[len(GOOD) :]
    return values


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=6), st.integers(1, 40), st.integers(1, 5))
def test_any_reply_is_taken_for_what_it_is(pieces: list[bytes], step: int, names: int) -> None:
    data = b"".join(pieces)
    room = memoryview(bytearray(b"\xee" * (names + 2) * SIZE))
    into = [room[(1 + index) * SIZE : (2 + index) * SIZE] for index in range(names)]
    connection = Connection(data, step)
    wire = Wire(connection, 10.0)
    arrived: list[bytes] = []
    try:
        arrived.extend(map(bytes, wire.get([b"name%d" % index for index in range(names)], into)))
        assert not connection.closed
        read = data[: len(data) - len(connection._sock.data)]
        assert len(arrived) == names or b"$-1\r\n" in read, "it ends early only where a name does not exist"
    except (*FAULTS, WrongSizeError):
        assert connection.closed
    assert arrived == values_in(data, names)
    assert bytes(room[:SIZE]) == bytes(room[-SIZE:]) == b"\xee" * SIZE


def test_nobody_gets_a_connection_whose_replies_were_not_read() -> None:
    connection = Connection(GOOD * 3, 1000)
    memories = Wire(connection, 10.0).get([b"a", b"b", b"c"], [memoryview(bytearray(SIZE)) for _ in range(3)])
    next(memories)
    memories.close()
    assert connection.closed
