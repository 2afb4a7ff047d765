"""SealedTier: any tier, with its chunks encrypted before they reach it and authenticated when they
come back.

A stored chunk is whole pages, as disks take them::

    ciphertext, as long as the chunk | tag, 16 | nonce, 24 | mark, 8 | key's name, 8 | zeros ...

The cipher is XAES-256-GCM (https://c2sp.org/XAES-256-GCM): AES-256-GCM under a key that AES-CMAC
derives from ours and the first half of a random 24-byte nonce (a NIST SP 800-108r1 derivation). Why
not plain AES-GCM: with random 96-bit nonces NIST SP 800-38D (section 8.3) allows 2**32 chunks under
one key, those of all hosts and restarts together. Beyond that a nonce may come twice, which tells
the XOR of the two chunks and lets any chunk be forged. A hundred hosts that write a thousand chunks
a second are there in half a day, and none of them could know. With derived keys 2**80 chunks are as
safe, so nothing is counted and no key need ever be changed for its age. It costs 4 us a chunk.

The chunk's key is the additional authenticated data: a chunk under another key's name, from another
model or tenant, does not open. What does not open is a miss, counted and deleted. It is never
served and never an error. Keys and owners, which are hashes, are not encrypted.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.cmac import CMAC

from kvtier.core.chunk import PAGE_BYTES, ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.base import ForwardingTier, Tier

_LOG = logging.getLogger(__name__)
KEY_BYTES = 32
_TAG_BYTES, _NONCE_BYTES, _DERIVING_BYTES = 16, 24, 12
_MARK = b"kvtier/S"
_NAME_BYTES = 8
_TAIL_BYTES = _TAG_BYTES + _NONCE_BYTES + len(_MARK) + _NAME_BYTES
_TRIED_CHUNKS = 8
"""Most recovered chunks that a start tries to read to learn whose key sealed them."""


def sealed_bytes(chunk_bytes: int) -> int:
    """Return the bytes of a sealed chunk in the tier below: for whole pages, one page more."""
    return -(-(chunk_bytes + _TAIL_BYTES) // PAGE_BYTES) * PAGE_BYTES


def key_name(key: bytes) -> bytes:
    """Return 8 bytes that tell keys apart and reveal nothing, for names, logs and stored chunks."""
    return sha256(b"kvtier encryption key\0" + key).digest()[:_NAME_BYTES]


class SealedTier(ForwardingTier):
    """``inner`` with every chunk sealed by ``key``. It has the name of ``inner``.

    Args:
        inner: keeps chunks of ``sealed_bytes(chunk_bytes)`` bytes. It is closed with this one.
        key: 32 random bytes. Chunks sealed by another are misses. A start may drop all of them at
            once (:meth:`recovered`).
        chunk_bytes: the size of every chunk.

    Threads: any number. Each keeps one sealed chunk as scratch memory, which never holds plaintext.
    """

    def __init__(self, inner: Tier, key: bytes, chunk_bytes: int) -> None:
        if len(key) != KEY_BYTES:
            raise StateError(f"an encryption key of {len(key)} bytes, expected {KEY_BYTES}")
        super().__init__(inner)
        self._key, self._chunk_bytes = key, chunk_bytes
        self._sign = _MARK + key_name(key)
        self._scratch = threading.local()
        self._lock = threading.Lock()
        self._unopened = 0
        _LOG.info(
            "tier %s: chunks are encrypted (XAES-256-GCM, key %s)", self.name, key_name(key).hex()
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of the inner tier, and ``unopened``: seals that failed, also in ``corrupt``."""
        counts = Counter(self.inner.counts)
        counts["unopened"] = self._unopened
        counts["corrupt"] += self._unopened
        return counts

    def recovered(self) -> Sequence[ChunkKey]:
        """See :meth:`Tier.recovered`. All chunks are dropped if a few show that the key was
        changed: each would be a miss that a prompt waits for. A shared tier may hold others'
        chunks, so they tell nothing there."""
        keys = self.inner.recovered()
        if self.shared or not self._is_foreign(keys):
            return keys
        _LOG.warning(
            "tier %s: its %d chunks were not sealed by our key %s and are dropped; was the "
            "encryption key changed?",
            self.name,
            len(keys),
            key_name(self._key).hex(),
        )
        for key in keys:
            self.inner.delete(key)
        return []

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        self._check_size(data)
        stored, end = self._room(), self._chunk_bytes + _TAG_BYTES
        nonce = os.urandom(_NONCE_BYTES)
        self._cipher(nonce).encrypt_into(nonce[_DERIVING_BYTES:], data, key, stored[:end])
        stored[end:] = (nonce + self._sign).ljust(len(stored) - end, b"\0")
        return self.inner.write(key, stored, owner)

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        self._check_size(into)
        stored = self._room()
        found = self.inner.read(key, stored)
        if not found or self._opens(key, stored, into):
            return found
        with self._lock:
            self._unopened += 1
            first = self._unopened == 1
        if first:
            why = "damaged or forged" if self._is_ours(stored) else "sealed by another key"
            _LOG.warning(
                "tier %s: chunk %s does not open: %s (only counted from now on)",
                self.name,
                key.hex(),
                why,
            )
        self.inner.delete(key)
        return False

    def _check_size(self, chunk: memoryview) -> None:
        if chunk.nbytes != self._chunk_bytes:
            raise StateError(
                f"a chunk of {chunk.nbytes} bytes for a tier of chunks of {self._chunk_bytes} bytes"
            )

    def _room(self) -> memoryview:
        if not hasattr(self._scratch, "room"):
            self._scratch.room = memoryview(mmap.mmap(-1, sealed_bytes(self._chunk_bytes)))
        room: memoryview = self._scratch.room
        return room

    def _cipher(self, nonce: bytes) -> AESGCM:
        """Return AES-GCM under XAES-256-GCM's derived key, which is two blocks of CMAC."""
        halves = []
        for counter in (1, 2):
            half = CMAC(AES(self._key))
            half.update(bytes((0, counter)) + b"X\0" + nonce[:_DERIVING_BYTES])
            halves.append(half.finalize())
        return AESGCM(b"".join(halves))

    def _opens(self, key: ChunkKey, stored: memoryview, into: memoryview) -> bool:
        end = self._chunk_bytes + _TAG_BYTES
        nonce = bytes(stored[end : end + _NONCE_BYTES])
        try:
            self._cipher(nonce).decrypt_into(nonce[_DERIVING_BYTES:], stored[:end], key, into)
        except InvalidTag:
            return False
        return True

    def _is_ours(self, stored: memoryview) -> bool:
        start = self._chunk_bytes + _TAG_BYTES + _NONCE_BYTES
        return stored[start : start + len(self._sign)] == self._sign

    def _is_foreign(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether some of the tried chunks were sealed by another key and none by ours. They
        are of all ages: of several disks one may come from elsewhere."""
        stored, is_foreign = self._room(), False
        for key in keys[:: -(len(keys) // _TRIED_CHUNKS) - 1]:
            if self.inner.read(key, stored):
                if self._is_ours(stored):
                    return False
                is_foreign = True
        return is_foreign
