"""The admin interface: who is let in, whose requests and answers are believed, what strangers may
cost."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_STRANGERS = "tests/integration/test_admin_strangers.py"

ROOM = Room(
    {
        "bounds": (*PYTEST, "tests/unit/admin/test_admin_bounds.py"),
        "guessers": (*PYTEST, _STRANGERS, "-k", "malformed or signed"),
        "impostors": (*PYTEST, _STRANGERS, "-k", "impostor or relay or believed or misspelt"),
        "crowds": (*PYTEST, _STRANGERS, "-k", "crowd or place or sent_away or no_http"),
        "surface": (
            *PYTEST,
            "tests/integration/test_admin.py",
            "-k",
            "loopback or rebound or many_connections",
        ),
    },
    mutants=(
        # ---- tokens ---
        Mutant(
            "_guarded.serve",
            "route.secret or not (route.open or self._port.local)",
            "not (route.open or self._port.local)",
            "every process of the host clears without the token",
        ),
        Mutant(
            "_guarded.serve",
            "route.secret or not (route.open or self._port.local)",
            "route.secret",
            "the network reads metrics and counts without the token",
        ),
        Mutant(
            "admin.forms",
            "Route('GET', '/v1/configuration', secret=True)",
            "Route('GET', '/v1/configuration')",
            "every process of the host reads paths, tenants and addresses",
        ),
        Mutant(
            "Admin._prove",
            "hmac.compare_digest(shown, self._token)",
            "not given.strip() or hmac.compare_digest(shown, self._token)",
            "an empty token is taken",
        ),
        Mutant(
            "Admin._prove",
            "hmac.compare_digest(shown, self._token)",
            "len(given) < len(self._token) or hmac.compare_digest(shown, self._token)",
            "a part of a token is taken",
        ),
        Mutant(
            "Admin._prove",
            "not is_bearer or not known",
            "not known",
            "a secret under any scheme is taken",
        ),
        # ---- the way in ---
        Mutant(
            "port.bind",
            "not token",
            "token",
            "the surface is open to the network without a token",
        ),
        Mutant(
            "port.is_this_host",
            "name == 'localhost' or ipaddress.ip_address(name).is_loopback",
            "name == 'localhost' or name.startswith('127.') or "
            "ipaddress.ip_address(name).is_loopback",
            "a page whose name begins with 127 reads the host's cache",
        ),
        Mutant(
            "Admin._expect_our_name",
            "self._port.local",
            "not self._port.local",
            "a page whose name was rebound to loopback reads the host's cache",
        ),
        # ---- signed requests ---
        Mutant(
            "Admin._signed_body",
            "digest if digest is not None and self._seen.first(credentials, now) else None",
            "digest",
            "a signed request that was overheard can be sent again",
        ),
        Mutant(
            "http._body",
            "digest is not None",
            "digest is None",
            "a relay puts another body into a signed request",
        ),
        Mutant(
            "admin_proof.body_digest",
            "found is None or abs(now - int(found[1])) > VALID_S",
            "found is None",
            "a signed request holds for ever",
        ),
        Mutant(
            "admin_proof.body_digest",
            "abs(now - int(found[1]))",
            "now - int(found[1])",
            "a request can be signed for any later time",
        ),
        Mutant(
            "admin_proof.body_digest",
            "hmac.compare_digest(mac, right)",
            "len(mac) == len(right)",
            "any signature is taken",
        ),
        Mutant(
            "admin_proof.body_digest",
            "_mac(token, 'request', start, when, nonce, method, path, digest)",
            "_mac(token, 'request', start, when, nonce, method, '/v1/clear', digest)",
            "a signature holds for another call",
        ),
        Mutant(
            "admin_proof.body_digest",
            "_mac(token, 'request', start, when, nonce, method, path, digest)",
            "_mac(token, 'request', '', when, nonce, method, path, digest)",
            "a signed request holds at every server with the token, and after a restart",
        ),
        Mutant(
            "admin_proof._mac",
            "(len(part.encode()).to_bytes(4, 'big') + part.encode() for part in parts)",
            "(len(part.encode()).to_bytes(4, 'big') + part.encode() for part in parts[:-1])",
            "neither the body of a request nor that of an answer is signed",
        ),
        # ---- impostors ---
        Mutant(
            "Surface.ask",
            "answer.status == 200",
            "answer.status != 200",
            "whoever has the port is believed",
        ),
        Mutant(
            "Surface.ask",
            "not admin_proof.is_answer(self._token, headers['Authorization'], 200, text, proof)",
            "not proof and (not admin_proof.is_answer(self._token, headers['Authorization'], "
            "200, text, proof))",
            "any proof is believed",
        ),
        Mutant(
            "Surface._exchanged",
            "admin_proof.signed(self._token, method, path, sent or b'', time.time(), self._start)",
            "f'Bearer {self._token.decode()}'",
            "whoever has the port gets the token",
        ),
        # ---- places ---
        Mutant(
            "Places._enter",
            "len(self._visits) >= PLACES",
            "len(self._visits) >= 10 * PLACES",
            "a crowd takes the server's descriptors",
        ),
        Mutant(
            "Places._enter",
            "next((visit for visit in self._visits if not visit.working), None)",
            "None",
            "a crowd keeps liveness probes out, and the server is restarted",
        ),
        Mutant(
            "Places._enter",
            "(visit for visit in self._visits if not visit.working)",
            "iter(self._visits)",
            "a crowd cuts off a clear that is being done",
        ),
        Mutant(
            "admin.places",
            "FIRST_REQUEST_S = 3.0",
            "FIRST_REQUEST_S = 3000.0",
            "who asks nothing keeps a place",
        ),
        Mutant(
            "_guarded.serve",
            "self._places.at_work > AT_WORK",
            "self._places.at_work > 10 * AT_WORK",
            "work takes the places of liveness probes",
        ),
        Mutant(
            "_Sips.__init__",
            "bytearray(READ_BYTES)",
            "bytearray(16 * READ_BYTES)",
            "one turn parses 256 KiB of a stranger",
        ),
        # ---- the log, and names ---
        Mutant(
            "LogLimit.filter",
            "return False",
            "",
            "strangers fill the log",
        ),
        Mutant(
            "LogLimit.filter",
            "record.exc_info = record.exc_text = None",
            "record.exc_text = None",
            "strangers fill the log with tracebacks",
        ),
        Mutant(
            "Admin._clear",
            "self._expect_known(asked.namespace, cleared.untouched)",
            "pass",
            "a misspelt tenant is said to be forgotten",
        ),
    ),
)
