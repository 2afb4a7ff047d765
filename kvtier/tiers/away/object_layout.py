"""How a chunk lies in an object store: its name, and the header in front of its bytes. Pure.

A chunk is one object, written whole or not at all::

    <prefix>/kvtier-1/<namespace>/<key>          header, 80 bytes, then the payload

The format's version is in the name, so that servers of different versions never read each other's
bytes.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_128

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.errors import ConfigError

FORMAT_VERSION = 1
CHECKSUM_BYTES = 16
_MAGIC = b"kvtier/O"
_HEAD = struct.Struct(f"<8sHHIQ{KEY_BYTES}s")
HEADER_BYTES = _HEAD.size + CHECKSUM_BYTES
_NAMESPACE_BYTES = 32


class ObjectForm:
    """Names of one model's chunks. ``namespace``: for the model, its layout and the encryption key.
    Raises ConfigError for one that cannot be used."""

    def __init__(self, prefix: str, namespace: bytes) -> None:
        if not 1 <= len(namespace) <= _NAMESPACE_BYTES:
            raise ConfigError(
                f"a namespace of {len(namespace)} bytes, expected 1 to {_NAMESPACE_BYTES}"
            )
        self.folder = (
            f"{prefix}/" if prefix else ""
        ) + f"kvtier-{FORMAT_VERSION}/{namespace.hex()}"
        """Prefix of the names of all chunks, and of trials."""

    def name(self, key: ChunkKey) -> str:
        return f"{self.folder}/{key.hex()}"

    def key(self, name: str) -> ChunkKey | None:
        """Return the key of a chunk's name, or None for a trial's or any other name."""
        text = name.removeprefix(f"{self.folder}/")
        if text == name or len(text) != 2 * KEY_BYTES:
            return None
        try:
            found = ChunkKey(bytes.fromhex(text))
        except ValueError:
            return None
        return found if found.hex() == text else None


def header(key: ChunkKey, payload: memoryview) -> bytes:
    """Make a header: key, payload's length, and XXH3-128 over key and payload."""
    digest = xxh3_128(key)
    digest.update(payload)
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, 0, 0, payload.nbytes, key) + digest.digest()


def room(length: int) -> int:
    return HEADER_BYTES + length
