"""Proofs of a greeting: each end shows the other that it has the token, which never crosses the
wire."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from kvtier.protocol.wire import Challenge, Hello

_encode = msgspec.msgpack.Encoder().encode


def client_proof(token: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """HMAC-SHA256 (RFC 2104) of both nonces and all fields of the Hello. It shows that the client
    has the token. The token never crosses the wire, and the proof cannot be used a second time."""
    said = _encode(msgspec.structs.replace(hello, proof=b""))
    return hmac.digest(token, b"kvtier client\0" + challenge.nonce + said, hashlib.sha256)


def server_proof(token: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """The same proof for the server, so that a client with a token gives no KV to an impostor."""
    return hmac.digest(token, b"kvtier server\0" + hello.nonce + challenge.nonce, hashlib.sha256)


def proven(expected: bytes, given: bytes) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(expected, given)
