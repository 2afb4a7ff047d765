"""Owner: whose a chunk is, as a number that is the same on every server and after every restart.
Pure.

An owner is 128 bits of SHA-256: the upper half of the tenant's name, the lower half of model
(fingerprint) and name. So what a tenant has can be told by the upper half alone, of models too that
no engine has asked for since the start. Tiers keep the number beside the chunk; the name cannot be
read from it, only guessed and compared.

0 is nobody: one embedded Store has no use for owners, and a tier does not always know. Two names
    with one number would
be forgotten together; nothing is ever served or kept for that reason, because chunks are found by
their keys alone.
"""

from __future__ import annotations

from hashlib import sha256

NOBODY = 0
OWNER_BYTES = 16
_HALF = 64
_DOMAIN = b"kvtier/owner/1\0"


def tenant(namespace: str) -> int:
    """Everything of this tenant, of all models: for :func:`may`, no chunk's owner. Its lower half
    is 0."""
    return _half(namespace.encode()) << _HALF


def owner_of(fingerprint: bytes, namespace: str) -> int:
    """One tenant's chunks of one model. ``fingerprint``: 32 bytes."""
    return tenant(namespace) | _half(fingerprint + namespace.encode())


def may(owner: int | None, whose: int) -> bool:
    """Whether who is ``owner`` (or a :func:`tenant`) may drop a chunk of ``whose``: its own and
    nobody's; None: all."""
    if owner is None or whose in (NOBODY, owner):
        return True
    return owner == whose >> _HALF << _HALF


def _half(text: bytes) -> int:
    return int.from_bytes(sha256(_DOMAIN + text).digest()[:8], "little")
