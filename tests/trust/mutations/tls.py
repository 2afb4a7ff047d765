"""TLS, and what goes over a network without it."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "tls": (*PYTEST, "tests/integration/test_server_tls.py"),
        "tcp": (*PYTEST, "tests/integration/test_server_tcp.py", "-k", "without_token"),
    },
    (
        Mutant(
            "server/listening/listeners.py",
            "    context.minimum_version = ssl.TLSVersion.TLSv1_3",
            "    context.minimum_version = ssl.TLSVersion.TLSv1_2",
            "a server speaks TLS 1.2",
        ),
        Mutant(
            "client/connect.py",
            "        context.minimum_version = ssl.TLSVersion.TLSv1_3",
            "        context.minimum_version = ssl.TLSVersion.TLSv1_2",
            "an engine speaks TLS 1.2",
        ),
        Mutant(
            "client/connect.py",
            "        context.minimum_version = ssl.TLSVersion.TLSv1_3",
            "        context.minimum_version = ssl.TLSVersion.TLSv1_3\n        "
            "context.check_hostname = False",
            "any certificate of the authority stands in for the server's",
        ),
        Mutant(
            "client/connect.py",
            "        context.minimum_version = ssl.TLSVersion.TLSv1_3",
            "        context.minimum_version = ssl.TLSVersion.TLSv1_3\n"
            "        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE",
            "any certificate stands in for the server's",
        ),
        Mutant(
            "server/listening/listeners.py",
            "            context.verify_mode = ssl.CERT_REQUIRED",
            "            context.verify_mode = ssl.CERT_OPTIONAL",
            "a client needs no certificate",
        ),
        Mutant(
            "server/listening/listeners.py",
            "    named = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED",
            "    named = tls is not None",
            "a server with a certificate serves anybody",
        ),
        Mutant(
            "server/listening/listeners.py",
            "    if tls is None and not address.is_loopback:",
            "    if False:",
            "a server with a token goes on the network in plain",
        ),
        Mutant(
            "server/listening/listeners.py",
            "(insecure and address.is_loopback)",
            "insecure",
            "a server serves everybody on the network",
        ),
        Mutant(
            "server/listening/listeners.py",
            "        logger.warning(PLAIN, address)\n",
            "",
            "nobody is told that a server's bytes can be read",
        ),
        Mutant(
            "client/remote_tier.py",
            "            logger.warning(PLAIN, access.address)",
            "            pass",
            "nobody is told that an engine's bytes can be read",
        ),
        Mutant(
            "client/connect.py",
            "        return not self.address.path and not self.address.is_loopback and "
            "self.tls is None",
            "        return False",
            "an engine with a token sends its KV in plain",
        ),
        Mutant(
            "client/connect.py",
            "            return ipaddress.ip_address(self.host).is_loopback",
            '            return self.host.startswith("127.")',
            "a name that begins like loopback is taken for it",
        ),
        Mutant(
            "client/connect.py",
            "    if not unencrypted:",
            "    if False:",
            "encryption is given up by nobody's word",
        ),
        Mutant(
            "client/connect.py",
            "            if self.token is None:",
            "            if False:",
            "who gives up encryption gives up the token too",
        ),
        Mutant(
            "assemble.py",
            "    return ServerAccess(address, own, token, tls, config.server_unencrypted)",
            "    return ServerAccess(address, own, token, tls)",
            "the key has no effect on an engine",
        ),
    ),
)
