"""Answers that no honest server gives are refused before an engine goes by them, and a server that
waits is not waited for."""

import fcntl
import sys
import termios
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.client.client import Client
from kvtier.client.connect import ServerAccess, hello
from kvtier.core.errors import StateError
from kvtier.core.lookup import Change, Progress
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from tests.child_process import wait_for
from tests.rogue_server import SLOTS, greet, hear, rogue
from tests.server_process import LAYOUT, SLOT, run, short_folder


@contextmanager
def client_of(reply, timeout_s=5.0):
    """A client of a server that answers each message as ``reply`` says."""
    pool = Pool(SLOTS, SLOT)

    def script(client):
        greet(client, pool)
        inbox: Inbox[wire.Message] = Inbox(wire.Question)
        while True:
            said = reply(hear(client, inbox))
            client.sendall(said if isinstance(said, bytes) else b"".join(map(wire.frame, said)))

    with short_folder() as folder, rogue(folder / "sock", script) as address:
        client = Client(access(address), timeout_s)
        try:
            yield client
        finally:
            client.close()


def access(address):
    return ServerAccess(address, hello(LAYOUT.fingerprint, SLOT, stream=False))


KEYS = run(1, 4)
GOOD: dict[type[wire.Message], Callable[[Any], wire.Message]] = {
    wire.LookupCall: lambda asked: wire.LookupReply(asked.id, [(2, 0.0), (4, 0.5)]),
    wire.KnownCall: lambda asked: wire.Known(asked.id, b"\0\1\1\0"),
    wire.Save: lambda asked: wire.Slots(asked.id, 1, [0, 3], [7, 0]),
    wire.LoadCall: lambda asked: wire.Claim(asked.id, 1, 2, [7, 0], b"\0\0"),
    wire.Poll: lambda asked: wire.Claim(asked.id, 1, 0, [3, 4], b"\0\0"),
    wire.StatsCall: lambda asked: wire.Counted(asked.id, {"saved": 1}),
    wire.Check: lambda asked: wire.Done(asked.id),
    wire.Where: lambda asked: wire.Placed(asked.id, [1, 1]),
    wire.Hear: lambda asked: wire.Changed(KEYS[0], b"\1"),
}


def honest(asked):
    return [GOOD[type(asked)](asked)] if type(asked) in GOOD else []


def test_what_an_honest_server_says_is_taken():
    with client_of(honest) as client:
        assert client.lookup(KEYS).progress == Progress(2, 2)
        assert client.known(KEYS) == [False, True, True, False]
        save = client.save(KEYS)
        assert (save.keys, save.slots) == ([KEYS[0], KEYS[3]], [7, 0])
        load = client.load(KEYS)
        assert load.poll() == Progress(4, 0)
        assert load.slots == [7, 0, 3, 4] and load.sources == ["ram"] * 4
        watched = client.watch()
        assert watched.place_names == ["ram"]
        assert heard(client) == [(0, KEYS[0], True)]
        assert watched.places(KEYS) == [[0], [0], [], []]
        assert client.counts["lost"] == 0


def heard(client):
    """The first changes that the client is told, or nothing when it loses the server."""
    watched, found = client.watch(), list[Change]()

    def told():
        found.extend(watched.changes() or ())
        return bool(found) or bool(client.counts["lost"])

    wait_for(told, "an answer")
    return found


BAD: dict[str, tuple[type[Any], Callable[..., wire.Message], tuple[Any, ...]]] = {
    "more than was asked for": (wire.LookupCall, wire.LookupReply, ([(5, 0.0)],)),
    "a run that shrinks": (wire.LookupCall, wire.LookupReply, ([(4, 0.0), (2, 0.5)],)),
    "another kind": (wire.LookupCall, wire.Done, ()),
    "of too few": (wire.KnownCall, wire.Known, (bytes(3),)),
    "neither known nor unknown": (wire.KnownCall, wire.Known, (b"\0\1\2\0",)),
    "a slot beyond the pool": (wire.Save, wire.Slots, (1, [0], [SLOTS])),
    "other memory beyond it": (wire.Save, wire.Slots, (1, [0], [0], [(SLOTS, 1)])),
    "a chunk beyond the run": (wire.Save, wire.Slots, (1, [4], [0])),
    "fewer slots than chunks": (wire.Save, wire.Slots, (1, [0, 1], [0])),
    "one slot for two": (wire.Save, wire.Slots, (1, [0, 1], [5, 5])),
    "one chunk twice": (wire.Save, wire.Slots, (1, [1, 1], [4, 5])),
    "a read beyond the pool": (wire.LoadCall, wire.Claim, (1, 0, [SLOTS], b"\0")),
    "other memory to read": (wire.LoadCall, wire.Claim, (1, 0, [0], b"\0", [(SLOTS, 1)])),
    "from nowhere": (wire.LoadCall, wire.Claim, (1, 0, [0], b"\1")),
    "slots without sources": (wire.LoadCall, wire.Claim, (1, 0, [0, 1], b"\0")),
    "too many slots": (wire.LoadCall, wire.Claim, (1, 0, [0] * 5, bytes(5))),
    "too many to come": (wire.LoadCall, wire.Claim, (1, 3, [0, 1], bytes(2))),
    "a poll with too many": (wire.Poll, wire.Claim, (1, 0, [0] * 3, bytes(3))),
    "places of more than was asked for": (wire.Where, wire.Placed, ([1] * 5,)),
    "a place that is not": (wire.Where, wire.Placed, ([2],)),
    "changes without keys": (wire.Hear, wire.Changed, (KEYS[0], b"\1\1")),
    "a change of no place": (wire.Hear, wire.Changed, (KEYS[0], b"\3")),
    "another question's": (wire.LookupCall, lambda id_: wire.LookupReply(id_ + 1, [(4, 0.0)]), ()),
    "the last question's": (wire.LookupCall, lambda id_: wire.LookupReply(id_ - 1, [(4, 0.0)]), ()),
}


@pytest.mark.parametrize("lie", BAD)
def test_an_answer_that_cannot_be_is_a_miss_and_ends_the_attachment(lie):
    kind, answer, fields = BAD[lie]

    def lying(asked):
        if not isinstance(asked, kind):
            return honest(asked)
        return [answer(*fields) if kind is wire.Hear else answer(asked.id, *fields)]

    with client_of(lying) as client:
        if kind is wire.LookupCall:
            assert client.lookup(KEYS).progress == Progress(0, 0)
        elif kind is wire.KnownCall:
            assert client.known(KEYS) == [False] * 4
        elif kind is wire.Save:
            assert client.save(KEYS).slots == []
        elif kind is wire.Hear:
            assert heard(client) == []
        elif kind is wire.Where:
            heard(client)
            assert client.watch().places(KEYS) == [[]] * 4
        else:
            load = client.load(KEYS)
            assert load.poll() == (Progress(0, 0) if kind is wire.LoadCall else Progress(2, 0))
        assert client.counts["lost"] == 1


def test_when_a_server_lost_changes_nothing_that_it_told_holds():
    told = iter([wire.Changed(KEYS[0], b"\1"), wire.Changed(b"", b"", lost=True)])

    def forgets(asked):
        return [next(told, wire.Changed(b"", b""))] if isinstance(asked, wire.Hear) else []

    with client_of(forgets) as client:
        assert heard(client) == [(0, KEYS[0], True)]
        wait_for(lambda: client.watch().changes() is None, "the loss is told")
        assert client.watch().changes() == []
        assert client.counts["lost"] == 0


def test_changes_that_nobody_asked_for_end_the_attachment():
    def eager(asked):
        return [wire.Changed(KEYS[0], b"\1")] * 2 if isinstance(asked, wire.Hear) else []

    with client_of(eager) as client:
        client.watch()
        wait_for(lambda: bool(heard(client) or client.counts["lost"]), "told")
        wait_for(lambda: [client.watch().changes(), client.counts["lost"]][1] == 1, "given up")


def test_an_answer_that_comes_late_is_not_taken_for_the_next_question():
    asked: list[wire.LookupCall] = []

    def late(message):
        if isinstance(message, wire.LookupCall):
            asked.append(message)
        if isinstance(message, wire.InvalidateAllCall):
            return [wire.LookupReply(asked[0].id, [(4, 0.0)])]
        return (
            [wire.LookupReply(message.id, [(1, 0.0)])]
            if isinstance(message, wire.LookupCall) and len(asked) > 1
            else []
        )

    with client_of(late, 0.2) as client:
        assert client.lookup(KEYS).progress == Progress(0, 0), "no answer in time"
        assert client.lookup(run(2, 4)).progress == Progress(0, 0) and len(asked) == 1, (
            "not asked while one is owed"
        )
        client.invalidate_all()
        wait_for(
            lambda: client.lookup(run(3, 4)).progress == Progress(1, 0),
            "the answer to this question",
        )
        assert client.counts["lost"] == 0


def test_another_answer_than_the_one_that_is_owed_ends_the_attachment():
    def other(asked):
        return (
            [wire.LookupReply(77, [(4, 0.0)])] if isinstance(asked, wire.InvalidateAllCall) else []
        )

    with client_of(other, 0.1) as client:
        assert client.lookup(KEYS).progress == Progress(0, 0), "no answer in time"
        client.invalidate_all()
        wait_for(lambda: client.counts["lost"] == 1, "given up")


def test_a_flood_of_other_answers_does_not_hold_the_engine():
    def flood(asked):
        return (
            wire.frame(wire.LookupReply(99, [(1, 0.0)])) * 10_000
            if isinstance(asked, wire.LookupCall)
            else b""
        )

    with client_of(flood) as client:
        assert client.lookup(KEYS).progress == Progress(0, 0)
        assert client.counts["lost"] == 1


def test_an_answer_that_does_not_end_is_read_for_as_long_as_any():
    begun = (1 << 20).to_bytes(4, "little") + bytes(150_000)
    with client_of(lambda asked: begun) as client:
        client.invalidate_all()
        link = client._attachment
        assert link is not None
        wait_for(lambda: unread(link._socket) == len(begun), "sent")
        assert link.take(0.0) is None
        assert 0 < unread(link._socket) < len(begun)


def unread(sock):
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_check_without_an_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("kvtier.client.client._GIVE_UP_S", 0.1)
    with client_of(lambda _: []) as client, pytest.raises(StateError, match="gave no answer"):
        client.check()
