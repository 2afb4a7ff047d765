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
            "listeners.server_tls",
            "ssl.TLSVersion.TLSv1_3",
            "ssl.TLSVersion.TLSv1_2",
            "a server speaks TLS 1.2",
        ),
        Mutant(
            "connect.client_tls",
            "ssl.TLSVersion.TLSv1_3",
            "ssl.TLSVersion.TLSv1_2",
            "an engine speaks TLS 1.2",
        ),
        Mutant(
            "connect.client_tls",
            "if certificate is not None:\n    ...",
            "context.check_hostname = False\nif certificate is not None:\n    ...",
            "any certificate of the authority stands in for the server's",
        ),
        Mutant(
            "connect.client_tls",
            "if certificate is not None:\n    ...",
            "context.check_hostname, context.verify_mode = (False, ssl.CERT_NONE)\n"
            "if certificate is not None:\n"
            "    ...",
            "any certificate stands in for the server's",
        ),
        Mutant(
            "listeners.server_tls",
            "ssl.CERT_REQUIRED",
            "ssl.CERT_OPTIONAL",
            "a client needs no certificate",
        ),
        Mutant(
            "listeners.listen_tcp",
            "tls is not None and tls.verify_mode is ssl.CERT_REQUIRED",
            "tls is not None",
            "a server with a certificate serves anybody",
        ),
        Mutant(
            "listeners.listen_tcp",
            "tls is None and (not address.is_loopback)",
            "False",
            "a server with a token goes on the network in plain",
        ),
        Mutant(
            "listeners.listen_tcp",
            "insecure and address.is_loopback",
            "insecure",
            "a server serves everybody on the network",
        ),
        Mutant(
            "listeners.listen_tcp",
            "logger.warning(PLAIN, address)",
            "",
            "nobody is told that a server's bytes can be read",
        ),
        Mutant(
            "RemoteTier.__init__",
            "logger.warning(PLAIN, access.address)",
            "pass",
            "nobody is told that an engine's bytes can be read",
        ),
        Mutant(
            "ServerAccess.is_plain",
            "not self.address.path and (not self.address.is_loopback) and (self.tls is None)",
            "False",
            "an engine with a token sends its KV in plain",
        ),
        Mutant(
            "Address.is_loopback",
            "ipaddress.ip_address(self.host).is_loopback",
            "self.host.startswith('127.')",
            "a name that begins like loopback is taken for it",
        ),
        Mutant(
            "connect.refuse_plain",
            "not unencrypted",
            "False",
            "encryption is given up by nobody's word",
        ),
        Mutant(
            "ServerAccess.__post_init__",
            "self.token is None",
            "False",
            "who gives up encryption gives up the token too",
        ),
        Mutant(
            "assemble.access",
            "ServerAccess(address, own, token, tls, config.server_unencrypted)",
            "ServerAccess(address, own, token, tls)",
            "the key has no effect on an engine",
        ),
    ),
)
