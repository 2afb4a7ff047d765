"""Requests to the admin interface that never send the token, and answers that show who gave them.
Pure.

A port on loopback belongs to whoever takes it first, so ``kvtier clear`` must not show its token to
the process that is there. It sends a MAC over the request instead, and believes only an answer with
a MAC over the answer. Both need the token.

A request is valid once and for a minute, at one start of one server: :class:`Seen` remembers what
was served, and each answer names the start in :data:`START_HEADER`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict

SCHEME = "KVTier-MAC"
ANSWER_HEADER, START_HEADER = "KVTier-Proof", "KVTier-Start"
VALID_S = 60
"""Largest difference of both ends' clocks."""
_SEEN_PROOFS = 4096
_FORM = re.compile(rf"{SCHEME} ([0-9]{{1,12}}) ([0-9a-f]{{32}}) ([0-9a-f]{{64}}) ([0-9a-f]{{64}})")


class Seen:
    """The requests that were served lately, so that a copy of one is refused."""

    def __init__(self, most: int = _SEEN_PROOFS) -> None:
        self._most = most
        self._served: OrderedDict[str, int] = OrderedDict()

    def first(self, credentials: str, now: float) -> bool:
        """Note a request. False for a copy, or if a minute has more requests than are kept."""
        while self._served and next(iter(self._served.values())) < now - 2 * VALID_S:
            self._served.popitem(last=False)
        if credentials in self._served or len(self._served) >= self._most:
            return False
        self._served[credentials] = int(now)
        return True


def signed(token: bytes, method: str, path: str, body: bytes, now: float, start: str = "") -> str:
    """Make a request's Authorization header. ``now``: since the epoch. ``start``: what the server's
    last answer had in :data:`START_HEADER`."""
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    mac = _mac(token, "request", start, str(int(now)), nonce, method, path, digest)
    return f"{SCHEME} {int(now)} {nonce} {digest} {mac}"


def body_digest(
    token: bytes, header: str, method: str, path: str, now: float, start: str = ""
) -> str | None:
    """Return the SHA-256 that the body must have. None if the sender does not know the token, sent
    the request more than a minute ago, or signed it for another ``start``."""
    found = _FORM.fullmatch(header)
    if found is None or abs(now - int(found[1])) > VALID_S:
        return None
    when, nonce, digest, mac = found.groups()
    right = _mac(token, "request", start, when, nonce, method, path, digest)
    return digest if hmac.compare_digest(mac, right) else None


def answered(token: bytes, header: str, status: int, body: bytes) -> str:
    """Make the proof that the answer must carry in :data:`ANSWER_HEADER`."""
    return _mac(token, "answer", header, str(status), hashlib.sha256(body).hexdigest())


def is_answer(token: bytes, header: str, status: int, body: bytes, proof: str) -> bool:
    return hmac.compare_digest(
        answered(token, header, status, body).encode(), proof.encode(errors="replace")
    )


def metrics_token(token: bytes) -> str:
    """Make a token that reads the metrics only. Does not tell the token that it is made of, which
    should be random: ``openssl rand -hex 32``. Space around that one does not count."""
    return _mac(token.strip(), "metrics")


def _mac(token: bytes, *parts: str) -> str:
    framed = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
    return hmac.digest(token, b"kvtier admin 1" + framed, "sha256").hex()
