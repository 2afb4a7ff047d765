"""Owner: the tenant and model of a chunk, as a number that is the same on every server and after
every restart. Pure.

An owner is 128 bits of SHA-256: the upper half is of the tenant's name, the lower half of the model
(fingerprint) and the name. So the upper half alone finds all that a tenant has, also of models for
which no engine has asked since the start. Tiers store the number beside the chunk. The name cannot
be read from the number, only guessed and compared.

0 means no owner: one embedded Store has no use for owners, and a tier does not always know the
owner. Two names with the same number would be purged together. Nothing else would go wrong, because
chunks are found by their keys alone.
"""

from __future__ import annotations

from hashlib import sha256

UNOWNED = 0
OWNER_BYTES = 16
_HALF_BITS = 64
_DOMAIN = b"kvtier/owner/1\0"


def tenant(namespace: str) -> int:
    """Return the number for all chunks of this tenant, of all models, with a lower half of 0. It is
    for :func:`may` and is never a chunk's owner."""
    return _half(namespace.encode()) << _HALF_BITS


def owner_of(fingerprint: bytes, namespace: str) -> int:
    """Return the owner of one tenant's chunks of one model. ``fingerprint``: 32 bytes."""
    return tenant(namespace) | _half(fingerprint + namespace.encode())


def may(owner: int | None, whose: int, *, shared: bool = False) -> bool:
    """Whether ``owner`` (or a :func:`tenant`) may drop a chunk of ``whose``: its own, and in a
    place that is not ``shared`` one without an owner, which can be its own. Where others write too
    it is more likely another tenant's. None, the operator, may drop all."""
    if owner is None or whose == owner:
        return True
    if whose == UNOWNED:
        return not shared
    return owner == whose >> _HALF_BITS << _HALF_BITS


def _half(text: bytes) -> int:
    return int.from_bytes(sha256(_DOMAIN + text).digest()[:8], "little")
