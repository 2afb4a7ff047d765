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
            "proofs.client_proof",
            "b'kvtier client\\x00' + challenge.nonce",
            "b'kvtier client\\x00'",
            "a greeting that was recorded lets anybody in",
        ),
        Mutant(
            "proofs.client_proof",
            "_encode(msgspec.structs.replace(hello, proof=b''))",
            "hello.nonce",
            "who sits between an engine and a server changes whose chunks these are",
        ),
        Mutant(
            "proofs.server_proof",
            "b'kvtier server\\x00' + hello.nonce",
            "b'kvtier server\\x00'",
            "an impostor replays a server's proof",
        ),
        Mutant(
            "proofs.server_proof",
            "b'kvtier server\\x00' + hello.nonce + challenge.nonce",
            "b'kvtier server\\x00' + hello.nonce",
            "a server's proof does not belong to its own challenge",
        ),
        Mutant(
            "proofs.proven",
            "hmac.compare_digest(expected, given)",
            "expected == given",
            "a proof is guessed byte by byte, by the time that the answer takes",
        ),
        Mutant(
            "Connection._greet",
            "not proven(client_proof(token, self._challenge, hello), hello.proof)",
            "hello.proof and (not proven(client_proof(token, self._challenge, hello), "
            "hello.proof))",
            "whoever has no token is let in",
        ),
        Mutant(
            "Connection.__init__",
            "os.urandom(wire.NONCE_BYTES)",
            "bytes(wire.NONCE_BYTES)",
            "every challenge is the same one",
        ),
        Mutant(
            "Connection._greet",
            "hello.mode in {'attach', 'join'} and (not self.listener.local)",
            "False",
            "a client of another host gets the server's descriptors",
        ),
        Mutant(
            "connect._handshake",
            "access.token is not None and (not proven(server_proof(access.token, challenge, "
            "hello), welcome.proof))",
            "access.token is not None and (not access.address.path) and (not "
            "proven(server_proof(access.token, challenge, hello), welcome.proof))",
            "whoever has the path of the socket gets the KV of an engine with a token",
        ),
        Mutant(
            "connect._handshake",
            "access.token is not None and (not proven(server_proof(access.token, challenge, "
            "hello), welcome.proof))",
            "welcome.proof and access.token is not None and (not "
            "proven(server_proof(access.token, challenge, hello), welcome.proof))",
            "a server that proves nothing gets the KV of an engine with a token",
        ),
        # ---- users and folders ---
        Mutant(
            "connect._refuse_stranger",
            "uid not in (os.geteuid(), 0) and access.token is None",
            "False",
            "another user who was there first gets all KV and decides all hits",
        ),
        Mutant(
            "connect._refuse_stranger",
            "uid not in (os.geteuid(), 0) and access.token is None",
            "uid not in (os.geteuid(), 0)",
            "root's engines cannot use a service that has a user of its own",
        ),
        Mutant(
            "secret_files.refuse_shared_folder",
            "stat.S_IWGRP | stat.S_IWOTH",
            "stat.S_IWOTH",
            "a group replaces the socket",
        ),
        Mutant(
            "secret_files.refuse_shared_folder",
            "status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
            "status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and (not status.st_mode & "
            "stat.S_ISVTX)",
            "in /tmp everybody may be there first",
        ),
        Mutant(
            "secret_files.refuse_shared_folder",
            "status.st_uid not in (os.geteuid(), 0)",
            "False",
            "the owner of the folder replaces the socket",
        ),
        Mutant(
            "Server._may_enter",
            "local and peer_uid(sock) not in (os.getuid(), 0)",
            "False",
            "every user of the host maps the pool",
        ),
        # ---- places ---
        Mutant(
            "server.connection",
            "_GREETING_S = 4.0",
            "_GREETING_S = 400.0",
            "a place is held without a word",
        ),
        Mutant(
            "Connection._greet",
            "self._host.greeted(self)",
            "",
            "engines that were let in push each other out",
        ),
        Mutant(
            "Server._accept",
            "self._make_place(one, address)",
            "pass",
            "one host with 600 sockets keeps every engine out",
        ),
        Mutant(
            "Server._make_place",
            "oldest.cut()",
            "pass",
            "places of the unknown have no bound",
        ),
        Mutant(
            "Handshakes.enter",
            "counts[origin] >= self._places_of_one",
            "False",
            "one host takes the places of all",
        ),
        Mutant(
            "Handshakes.enter",
            "len(self._under_way) >= self._places",
            "False",
            "many hosts take places without end",
        ),
        Mutant(
            "Handshakes.enter",
            "counts.most_common(1)[0][0]",
            "next(iter(counts))",
            "a flood from one host pushes out who came from another",
        ),
        Mutant(
            "origins.origin_of",
            "ipaddress.ip_network((int(ip), _NETWORK_BITS), strict=False)",
            "ip",
            "a host with IPv6 has as many places as addresses",
        ),
    ),
)
