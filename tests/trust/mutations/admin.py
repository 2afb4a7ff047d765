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
            "admin/http.py",
            "            if signed is None and (route.secret or not (route.open or "
            "self._port.local)):",
            "            if signed is None and not (route.open or self._port.local):",
            "every process of the host clears without the token",
        ),
        Mutant(
            "admin/http.py",
            "            if signed is None and (route.secret or not (route.open or "
            "self._port.local)):",
            "            if signed is None and route.secret:",
            "the network reads metrics and counts without the token",
        ),
        Mutant(
            "admin/forms.py",
            'Route("GET", "/v1/configuration", secret=True)',
            'Route("GET", "/v1/configuration")',
            "every process of the host reads paths, tenants and addresses",
        ),
        Mutant(
            "admin/http.py",
            "        known = hmac.compare_digest(",
            "        known = not given.strip() or hmac.compare_digest(",
            "an empty token is taken",
        ),
        Mutant(
            "admin/http.py",
            "        known = hmac.compare_digest(",
            "        known = len(given) < len(self._token) or hmac.compare_digest(",
            "a part of a token is taken",
        ),
        Mutant(
            "admin/http.py",
            "        if not is_bearer or not known:",
            "        if not known:",
            "a secret under any scheme is taken",
        ),
        # ---- the way in ---
        Mutant(
            "admin/port.py",
            "    if not local and not token:",
            "    if not local and token:",
            "the surface is open to the network without a token",
        ),
        Mutant(
            "admin/port.py",
            '        return name == "localhost" or',
            '        return name == "localhost" or name.startswith("127.") or',
            "a page whose name begins with 127 reads the host's cache",
        ),
        Mutant(
            "admin/http.py",
            "        if self._port.local and not is_this_host(",
            "        if not self._port.local and not is_this_host(",
            "a page whose name was rebound to loopback reads the host's cache",
        ),
        # ---- signed requests ---
        Mutant(
            "admin/http.py",
            "        return digest if digest is not None and self._seen.first(credentials, now) "
            "else None",
            "        return digest",
            "a signed request that was overheard can be sent again",
        ),
        Mutant(
            "admin/http.py",
            "    if digest is not None and not hmac.compare_digest(",
            "    if digest is None and not hmac.compare_digest(",
            "a relay puts another body into a signed request",
        ),
        Mutant(
            "protocol/admin_proof.py",
            "    if found is None or abs(now - int(found[1])) > VALID_S:",
            "    if found is None:",
            "a signed request holds for ever",
        ),
        Mutant(
            "protocol/admin_proof.py",
            "    if found is None or abs(now - int(found[1])) > VALID_S:",
            "    if found is None or now - int(found[1]) > VALID_S:",
            "a request can be signed for any later time",
        ),
        Mutant(
            "protocol/admin_proof.py",
            "    return digest if hmac.compare_digest(mac, right) else None",
            "    return digest if len(mac) == len(right) else None",
            "any signature is taken",
        ),
        Mutant(
            "protocol/admin_proof.py",
            '    right = _mac(token, "request", when, nonce, method, path, digest)',
            '    right = _mac(token, "request", when, nonce, method, "/v1/clear", digest)',
            "a signature holds for another call",
        ),
        Mutant(
            "protocol/admin_proof.py",
            "for part in parts)",
            "for part in parts[:-1])",
            "neither the body of a request nor that of an answer is signed",
        ),
        # ---- impostors ---
        Mutant(
            "cli/surface.py",
            "        if answer.status == 200 and self._token is not None:",
            "        if answer.status != 200 and self._token is not None:",
            "whoever has the port is believed",
        ),
        Mutant(
            "cli/surface.py",
            "        if not admin_proof.is_answer(",
            "        if not proof and not admin_proof.is_answer(",
            "any proof is believed",
        ),
        Mutant(
            "cli/surface.py",
            (
                '            headers["Authorization"] = admin_proof.signed(\n'
                '                self._token, "GET" if sent is None else "POST", path, '
                'sent or b"", time.time()\n'
                "            )\n"
            ),
            '            headers["Authorization"] = f"Bearer {self._token.decode()}"\n',
            "whoever has the port gets the token",
        ),
        # ---- places ---
        Mutant(
            "admin/places.py",
            "        if len(self._visits) >= PLACES:",
            "        if len(self._visits) >= 10 * PLACES:",
            "a crowd takes the server's descriptors",
        ),
        Mutant(
            "admin/places.py",
            "            quiet = next((visit for visit in self._visits if not "
            "visit.working), None)",
            "            quiet = None",
            "a crowd keeps liveness probes out, and the server is restarted",
        ),
        Mutant(
            "admin/places.py",
            "            quiet = next((visit for visit in self._visits if not "
            "visit.working), None)",
            "            quiet = next(iter(self._visits), None)",
            "a crowd cuts off a clear that is being done",
        ),
        Mutant(
            "admin/places.py",
            "FIRST_REQUEST_S = 3.0",
            "FIRST_REQUEST_S = 3000.0",
            "who asks nothing keeps a place",
        ),
        Mutant(
            "admin/http.py",
            "            if not route.open and self._places.at_work > AT_WORK:",
            "            if not route.open and self._places.at_work > 10 * AT_WORK:",
            "work takes the places of liveness probes",
        ),
        Mutant(
            "admin/places.py",
            "    max_size = READ_BYTES\n",
            "    max_size = 16 * READ_BYTES\n",
            "by TLS one turn parses 256 KiB of a stranger",
        ),
        Mutant(
            "admin/places.py",
            "READ_BYTES if high is None else high, low",
            "high, low",
            "by TLS what came while its reader paused is parsed in one turn",
        ),
        Mutant(
            "admin/places.py",
            "        transport.max_size = READ_BYTES ",
            "        transport.max_size = 16 * READ_BYTES ",
            "one turn parses 256 KiB of a stranger",
        ),
        # ---- the log, and names ---
        Mutant(
            "server/log_limit.py",
            "            self._left_out += 1\n            return False",
            "            self._left_out += 1",
            "strangers fill the log",
        ),
        Mutant(
            "server/log_limit.py",
            "        record.exc_info = record.exc_text = None",
            "        record.exc_text = None",
            "strangers fill the log with tracebacks",
        ),
        Mutant(
            "admin/http.py",
            "            self._expect_known(asked.namespace, cleared.untouched)",
            "            pass",
            "a misspelt tenant is said to be forgotten",
        ),
    ),
)
