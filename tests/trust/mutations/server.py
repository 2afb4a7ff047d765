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
            "server/connection.py",
            ("_TURN_S = 0.001\n"),
            ("_TURN_S = 10.0\n"),
            "one client that floods the server is served alone",
        ),
        Mutant(
            "server/connection.py",
            ("                if self._rest is not None or self._host.clock() >= until:\n"),
            ("                if self._rest is not None:\n"),
            "a turn has no end",
        ),
        Mutant(
            "server/connection.py",
            ("            self._host.loop.call_soon(self._turn)\n"),
            ("            self._turn()\n"),
            "the others never have their turn",
        ),
        Mutant(
            "server/connection.py",
            "        if self._witnesses.open:\n            return\n        if not self._ended:\n",
            "        if not self._ended:\n",
            "slots of a dead engine are used again while its worker still writes",
        ),
        Mutant(
            "server/connection.py",
            "        if self._work is not None or not self._lost or self._session is None:\n",
            "        if self._work is not None or self._session is None:\n",
            "a session ends while its connection lives",
        ),
        Mutant(
            "server/connection.py",
            (
                "        if self._session is not None and not self._session.leases and self._work "
                "is None:\n"
                "            self.let_go()\n"
            ),
            ("        if self._session is not None:\n            self.let_go()\n"),
            "an engine that loses its connection loses its slots in the middle of a copy",
        ),
        Mutant(
            "server/connection.py",
            ("            self._work = self._session.ending()\n"),
            ("            self._work = None\n"),
            "leases of dead engines never end",
        ),
        Mutant(
            "server/connection.py",
            ("            self._host.size_classes.leave(self._size_class)\n"),
            ("            pass\n"),
            "a size that had an engine once never gives its room back",
        ),
        Mutant(
            "server/connection.py",
            ("        self._session = None\n        self._leave()\n"),
            ("        self._session = None\n"),
            "engines that are gone count as users of their size",
        ),
        Mutant(
            "server/connection.py",
            (
                '        if self._session is not None:\n            self.drop("it does not read '
                'its answers")\n'
            ),
            "",
            "answers that nobody reads fill the memory",
        ),
        Mutant(
            "server/connection.py",
            "client %r",
            "client %s",
            "a client forges lines of the log",
        ),
        Mutant(
            "server/stream.py",
            ("        self._share.leave()\n"),
            "",
            "streams that are gone keep a part of the pool",
        ),
        Mutant(
            "server/shares.py",
            "        return self._clients[client].join()\n",
            "        return self.join()\n",
            "one client with many streams takes the whole pool",
        ),
        Mutant(
            "server/stream.py",
            "        if not self._share.left:\n            self._write(wire.frame(wire.Go(",
            "        if False:\n            self._write(wire.frame(wire.Go(",
            "half-sent chunks of one client take the whole pool",
        ),
        Mutant(
            "server/connection.py",
            "        elif self._streams and time.monotonic() - self._asked_at > self._call_s:\n",
            "        elif False:\n",
            "a byte now and then holds a slot for days",
        ),
        Mutant(
            "server/stream.py",
            ("        if self.busy:\n            raise"),
            ("        if False:\n            raise"),
            "a stream asks a second question before the first is answered",
        ),
        Mutant(
            "server/server.py",
            ("        self.lingering.discard(one)\n"),
            ("        pass\n"),
            "engines that are gone take the places of others",
        ),
    ),
)
