"""Turns of connections, and when the slots of dead engines are used again."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "floods": (*PYTEST, "tests/fault/test_floods.py"),
        "dead": (
            *PYTEST,
            "tests/fault/test_server_faults.py",
            "-k",
            "outlives or loses_its_connection",
        ),
        "hostile": (
            *PYTEST,
            "tests/fault/test_hostile_clients.py",
            "-k",
            "does_not_read or not_a_question or a_stream_that or chunk or streams_of",
        ),
    },
    (
        Mutant(
            "server.connection",
            "_TURN_S = 0.001",
            "_TURN_S = 10.0",
            "one client that floods the server is served alone",
        ),
        Mutant(
            "Connection._turn",
            "self._rest is not None or self._host.clock() >= until",
            "self._rest is not None",
            "a turn has no end",
        ),
        Mutant(
            "Connection._turn_again",
            "self._host.loop.call_soon(self._turn)",
            "self._turn()",
            "the others never have their turn",
        ),
        Mutant(
            "Connection._retire",
            "if self._witnesses.open:\n    ...",
            "",
            "slots of a dead engine are used again while its worker still writes",
        ),
        Mutant(
            "Connection._retire",
            "self._work is not None or not self._lost or self._session is None",
            "self._work is not None or self._session is None",
            "a session ends while its connection lives",
        ),
        Mutant(
            "Connection.connection_lost",
            "self._session is not None and (not self._session.leases) and (self._work is None)",
            "self._session is not None",
            "an engine that loses its connection loses its slots in the middle of a copy",
        ),
        Mutant(
            "Connection._retire",
            "self._session.ending()",
            "None",
            "leases of dead engines never end",
        ),
        Mutant(
            "Connection._leave",
            "self._host.size_classes.leave(self._size_class)",
            "pass",
            "a size that had an engine once never gives its room back",
        ),
        Mutant(
            "Connection._retire",
            "self._leave()",
            "",
            "engines that are gone count as users of their size",
        ),
        Mutant(
            "Connection.pause_writing",
            "if self._session is not None:\n    ...",
            "",
            "answers that nobody reads fill the memory",
        ),
        Mutant(
            "Connection._opened",
            "logger.info('%s: %s %s, client %r', self.listener.address, hello.mode, "
            "hello.fingerprint.hex()[:12], hello.client)",
            "logger.info('%s: %s %s, client %s', self.listener.address, hello.mode, "
            "hello.fingerprint.hex()[:12], hello.client)",
            "a client forges lines of the log",
        ),
        Mutant(
            "ChunkStream.end",
            "self._share.leave()",
            "",
            "streams that are gone keep a part of the pool",
        ),
        Mutant(
            "Shares.join_stream",
            "self._clients[client].join",
            "self.join",
            "one client with many streams takes the whole pool",
        ),
        Mutant(
            "ChunkStream._put",
            "not self._share.left",
            "False",
            "half-sent chunks of one client take the whole pool",
        ),
        Mutant(
            "Connection._expect_progress",
            "self._streams and time.monotonic() - self._asked_at > self._call_s",
            "False",
            "a byte now and then holds a slot for days",
        ),
        Mutant(
            "ChunkStream.begin",
            "if self.busy:\n    ...",
            "if False:\n    ...",
            "a stream asks a second question before the first is answered",
        ),
        Mutant(
            "Server.retired",
            "self.lingering.discard(one)",
            "pass",
            "engines that are gone take the places of others",
        ),
    ),
)
