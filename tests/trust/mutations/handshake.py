"""Who is let in, and whom an engine talks to: proofs, users, folders, and places of those who are
not let in yet."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "unit": (
            *PYTEST,
            "tests/unit/protocol/test_wire.py",
            "tests/unit/server/test_handshakes.py",
        ),
        "tokens": (
            *PYTEST,
            "tests/integration/test_server_tcp.py",
            "-k",
            "must_be_known or attach or of_one_connection",
        ),
        "users": (*PYTEST, "tests/fault/test_hostile_memory.py", "-k", "user"),
        "folders": (*PYTEST, "tests/integration/test_server.py", "-k", "folder or another_user"),
        "floods": (*PYTEST, "tests/fault/test_unproven_floods.py"),
    },
    (
        # ---- proofs ---
        Mutant(
            "protocol/proofs.py",
            'b"kvtier client\\0" + challenge.nonce + said',
            'b"kvtier client\\0" + said',
            "a greeting that was recorded lets anybody in",
        ),
        Mutant(
            "protocol/proofs.py",
            '    said = _encode(msgspec.structs.replace(hello, proof=b""))',
            "    said = hello.nonce",
            "who sits between an engine and a server changes whose chunks these are",
        ),
        Mutant(
            "protocol/proofs.py",
            'b"kvtier server\\0" + hello.nonce + challenge.nonce',
            'b"kvtier server\\0" + challenge.nonce',
            "an impostor replays a server's proof",
        ),
        Mutant(
            "protocol/proofs.py",
            'b"kvtier server\\0" + hello.nonce + challenge.nonce',
            'b"kvtier server\\0" + hello.nonce',
            "a server's proof does not belong to its own challenge",
        ),
        Mutant(
            "protocol/proofs.py",
            "    return hmac.compare_digest(expected, given)",
            "    return expected == given",
            "a proof is guessed byte by byte, by the time that the answer takes",
        ),
        Mutant(
            "server/connection.py",
            "            if not proven(client_proof(",
            "            if hello.proof and not proven(client_proof(",
            "whoever has no token is let in",
        ),
        Mutant(
            "server/connection.py",
            "os.urandom(wire.NONCE_BYTES)",
            "bytes(wire.NONCE_BYTES)",
            "every challenge is the same one",
        ),
        Mutant(
            "server/connection.py",
            '        if hello.mode in {"attach", "join"} and not self.listener.local:',
            "        if False:",
            "a client of another host gets the server's descriptors",
        ),
        Mutant(
            "client/connect.py",
            "    if access.token is not None and not proven(",
            "    if access.token is not None and not access.address.path and not proven(",
            "whoever has the path of the socket gets the KV of an engine with a token",
        ),
        Mutant(
            "client/connect.py",
            "    if access.token is not None and not proven(",
            "    if welcome.proof and access.token is not None and not proven(",
            "a server that proves nothing gets the KV of an engine with a token",
        ),
        # ---- users and folders ---
        Mutant(
            "client/connect.py",
            "    if uid not in (os.geteuid(), 0) and access.token is None:",
            "    if False:",
            "another user who was there first gets all KV and decides all hits",
        ),
        Mutant(
            "client/connect.py",
            "    if uid not in (os.geteuid(), 0) and access.token is None:",
            "    if uid not in (os.geteuid(), 0):",
            "root's engines cannot use a service that has a user of its own",
        ),
        Mutant(
            "core/secret_files.py",
            "    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
            "    if status.st_mode & stat.S_IWOTH:",
            "a group replaces the socket",
        ),
        Mutant(
            "core/secret_files.py",
            "    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
            "    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & "
            "stat.S_ISVTX:",
            "in /tmp everybody may be there first",
        ),
        Mutant(
            "core/secret_files.py",
            "    if status.st_uid not in (os.geteuid(), 0):",
            "    if False:",
            "the owner of the folder replaces the socket",
        ),
        Mutant(
            "server/server.py",
            "        if local and peer_uid(sock) not in (os.getuid(), 0):",
            "        if False:",
            "every user of the host maps the pool",
        ),
        # ---- places ---
        Mutant(
            "server/connection.py",
            "_GREETING_S = 4.0",
            "_GREETING_S = 400.0",
            "a place is held without a word",
        ),
        Mutant(
            "server/connection.py",
            "        self._host.greeted(self)\n",
            "",
            "engines that were let in push each other out",
        ),
        Mutant(
            "server/server.py",
            "                self._make_place(one, peer[0])",
            "                pass",
            "one host with 600 sockets keeps every engine out",
        ),
        Mutant(
            "server/server.py",
            "            oldest.cut()",
            "            pass",
            "places of the unknown have no bound",
        ),
        Mutant(
            "server/listening/handshake_places.py",
            "        if counts[origin] >= self._places_of_one:",
            "        if False:",
            "one host takes the places of all",
        ),
        Mutant(
            "server/listening/handshake_places.py",
            "        elif len(self._under_way) >= self._places:",
            "        elif False:",
            "many hosts take places without end",
        ),
        Mutant(
            "server/listening/handshake_places.py",
            "            leaves = self._oldest(counts.most_common(1)[0][0])",
            "            leaves = self._oldest(next(iter(counts)))",
            "a flood from one host pushes out who came from another",
        ),
        Mutant(
            "server/listening/origins.py",
            "    return str(ipaddress.ip_network((int(ip), _NETWORK_BITS), strict=False))",
            "    return str(ip)",
            "a host with IPv6 has as many places as addresses",
        ),
    ),
)
