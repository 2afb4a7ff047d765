"""Connections that are kept for the next call: an answer that nobody asked for is nobody's."""

import select
import socket
from contextlib import closing

import pytest

from kvtier.tiers.redis.connections import ConnectionFactory, ConnectionPool
from kvtier.tiers.redis.errors import FAULTS
from kvtier.tiers.redis.url import Login, parse
from tests.child_process import DEADLINE_S

ASKED = [("EXISTS", b"a")]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        yield listener


@pytest.fixture
def pool(listener):
    address = listener.getsockname()
    factory = ConnectionFactory(parse(f"redis://127.0.0.1:{address[1]}"), Login(), 0, DEADLINE_S)
    with closing(ConnectionPool(factory, address, 2)) as pool:
        yield pool


def _one_call(pool, listener):
    """The server's end of a connection that is kept after one call."""
    with pool.wire() as wire:
        theirs, _ = listener.accept()
        theirs.sendall(b":1\r\n")
        assert wire.ask(ASKED) == [1]
    return theirs


@pytest.mark.parametrize("late", [b":1\r\n", b"x", b""], ids=["one reply", "one byte", "an end"])
def test_a_reply_too_many_is_not_taken_for_the_next_calls(pool, listener, late):
    """A server that answers twice, late: the next call asks on another connection."""
    theirs = _one_call(pool, listener)
    (kept,) = pool._idle
    theirs.sendall(late)
    theirs.shutdown(socket.SHUT_WR) if not late else None
    assert select.select([kept], [], [], DEADLINE_S)[0]
    with pool.wire() as wire:
        other, _ = listener.accept()
        other.sendall(b":0\r\n")
        assert wire.ask(ASKED) == [0]
    assert kept.fileno() == -1, "closed, and not kept a second time"
    for each in (theirs, other):
        each.close()


def test_a_quiet_connection_is_used_again(pool, listener):
    with closing(_one_call(pool, listener)) as theirs:
        (kept,) = pool._idle
        theirs.settimeout(DEADLINE_S)
        assert theirs.recv(100)
        with pool.wire() as wire:
            assert not pool._idle, "one caller at a time"
            theirs.sendall(b":1\r\n")
            assert wire.ask(ASKED) == [1]
        assert pool._idle == [kept]


def test_a_connection_that_failed_is_not_kept(pool, listener):
    with pytest.raises(FAULTS), pool.wire() as wire:
        theirs, _ = listener.accept()
        theirs.sendall(b"what?\r\n")
        wire.ask(ASKED)
    theirs.close()
    assert not pool._idle


def test_with_a_connection_that_was_reset_the_idle_ones_end(pool, listener):
    with pool.wire(), pool.wire():
        theirs = [listener.accept()[0] for _ in range(2)]
    assert len(pool._idle) == 2
    with pytest.raises(ConnectionResetError), pool.wire():
        raise ConnectionResetError
    assert not pool._idle, "the server has started again"
    for each in theirs:
        each.close()


def test_no_more_connections_than_were_asked_for(pool, listener):
    pool._factory.timeout_s = 0.05
    with pool.wire(), pool.wire(), pytest.raises(TimeoutError, match="in use"), pool.wire():
        pass
    with pool.wire():
        pass


def test_after_the_end_nothing_is_kept(pool, listener):
    with pool.wire():
        pool.close()
    assert not pool._idle


def test_a_database_that_is_refused_is_a_fault(listener):
    address = listener.getsockname()
    url = parse(f"redis://127.0.0.1:{address[1]}/9")
    factory = ConnectionFactory(url, Login(), 9, DEADLINE_S)
    import threading

    def refuse():
        with listener.accept()[0] as theirs:
            assert b"SELECT" in theirs.recv(100)
            theirs.sendall(b"-ERR DB index is out of range\r\n")

    refusing = threading.Thread(target=refuse)
    refusing.start()
    with pytest.raises(FAULTS, match="database 9 is refused"):
        factory.connect(address)
    refusing.join()
