"""How a chunk lies in Redis: names, parts, header, room, and what Redis's own eviction means for
it. Pure.

A chunk is one small header key and its payload in part keys, all named by content::

    kvtier:2:<namespace>:{<key>}                     header, 104 bytes, written last
    kvtier:2:<namespace>:{<key>}:<part bytes>:<i>    part i of the payload

The braces are Redis Cluster's hash tag: header and parts of one chunk lie on one node. The format's
version and the part size are in the names, so that servers of different versions or settings share
a Redis without ever reading, or mixing, each other's bytes. Two servers that write one chunk at
once write the same parts under the same names, and the later header stays.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.tenant import OWNER_BYTES, UNOWNED

FORMAT_VERSION = 2
CHECKSUM_BYTES = 16
PART_BYTES = (1 << 20) - 64
"""Payload bytes of a part. Measured from 64 KiB to 2 MiB: a lane is fastest from 512 KiB on, and 1
MiB holds Redis's one thread for a quarter of a millisecond. With 64 bytes less the value's own 12
bytes stay within jemalloc's size class; the next is a quarter larger."""

_MAGIC = b"kvtier/R"
_HEAD = struct.Struct(f"<8sHHIQ{KEY_BYTES}s")
_CHECK = struct.Struct("<Q")
_OWNER_AT_BYTES = _HEAD.size + CHECKSUM_BYTES
_CHECK_AT_BYTES = _OWNER_AT_BYTES + OWNER_BYTES
HEADER_BYTES = _CHECK_AT_BYTES + _CHECK.size
_VALUE_OVERHEAD_BYTES = 12
_KEY_OVERHEAD_BYTES = 256
"""Memory of a key beside its value: name and object. Measured: about 230 bytes."""
_PREFIX = re.compile(r"[A-Za-z0-9._:-]+")
_NAMESPACE_BYTES = 32
_MOST_PARTS = 16_384


class Form:
    """Names and headers of one model's chunks.

    ``prefix`` begins every name, and stands in patterns and ACLs. ``namespace``: the first bytes of
    the fingerprint. Raises ConfigError for a prefix, namespace or size that cannot be used."""

    def __init__(self, prefix: str, namespace: bytes, part_bytes: int = PART_BYTES) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"Redis prefix {prefix!r}: use letters, digits and . _ : - only")
        if not 1 <= len(namespace) <= _NAMESPACE_BYTES or part_bytes < 1:
            raise ConfigError(
                f"Redis names need a namespace of 1 to {_NAMESPACE_BYTES} bytes and a part size of "
                f"at least 1 byte, got {len(namespace)} and {part_bytes}"
            )
        self.part_bytes, self.prefix = part_bytes, prefix.encode()
        self._base = f"{prefix}:{FORMAT_VERSION}:{namespace.hex()}:".encode()
        self._suffix = b":%d:" % part_bytes
        self.pattern = self._base + b"{*[}0]"
        """Glob of every header and first part (and a few other parts)."""
        self.everyones = self.prefix + b":*:{*[}0]"
        """Glob as :attr:`pattern`, of every fingerprint and format."""
        self.probe = self._base + b"probe"
        """Name for trials of the user's rights. Never a chunk's."""
        self.sign = self._base + self.SIGN
        """Name of the set of processes that use this fingerprint now."""

    SIGN = b"{signed}"

    def is_own(self, base: bytes) -> bool:
        return base == self._base

    def header_name(self, key: ChunkKey) -> bytes:
        return self._base + b"{" + key.hex().encode() + b"}"

    def part_names(self, key: ChunkKey, length: int) -> list[bytes]:
        stem = self.header_name(key) + self._suffix
        return [b"%s%d" % (stem, index) for index in range(-(-length // self.part_bytes))]

    def names(self, key: ChunkKey, length: int) -> list[bytes]:
        return [self.header_name(key), *self.part_names(key, length)]

    def split(self, chunk: memoryview) -> list[memoryview]:
        return [
            chunk[start : start + self.part_bytes]
            for start in range(0, chunk.nbytes, self.part_bytes)
        ]

    def header(self, key: ChunkKey, length: int, checksum: bytes, owner: int) -> bytes:
        """Make a header. ``checksum``: XXH3-128 over key and payload. The header has a checksum of
        its own too, because owners are read without the payload."""
        body = self._head(key, length) + checksum + owner.to_bytes(OWNER_BYTES, "little")
        return body + _CHECK.pack(xxh3_64_intdigest(body))

    def checksum(self, header: bytes, key: ChunkKey, length: int) -> bytes | None:
        """Return the checksum of key and payload. None if damaged, or another chunk's header."""
        whole = header.startswith(self._head(key, length)) and _is_whole(header)
        return header[_HEAD.size : _OWNER_AT_BYTES] if whole else None

    def owner(self, header: object, key: ChunkKey) -> int:
        """Return the chunk's owner, 0 where the header is missing, damaged or another chunk's."""
        if (
            not isinstance(header, bytes)
            or not header[: _HEAD.size].endswith(key)
            or not _is_whole(header)
        ):
            return UNOWNED
        return int.from_bytes(header[_OWNER_AT_BYTES:_CHECK_AT_BYTES], "little")

    def _head(self, key: ChunkKey, length: int) -> bytes:
        return _HEAD.pack(_MAGIC, FORMAT_VERSION, 0, self.part_bytes, length, key)

    def parse(self, name: bytes) -> tuple[ChunkKey, bool] | None:
        """Return the key of a name, and whether it is the header's. None for other names."""
        body = name.removeprefix(self._base)
        text, closing, rest = body[1:].partition(b"}")
        if (
            len(body) == len(name)
            or body[:1] != b"{"
            or not closing
            or rest not in (b"", self._suffix + b"0")
        ):
            return None
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            return None
        return (ChunkKey(key), not rest) if len(key) == KEY_BYTES else None

    def room(self, length: int) -> int:
        parts = [
            min(self.part_bytes, length - start) for start in range(0, length, self.part_bytes)
        ]
        return sum(
            _allocated(size + _VALUE_OVERHEAD_BYTES) + _KEY_OVERHEAD_BYTES
            for size in [HEADER_BYTES, *parts]
        )


def names_told(stem: bytes, header: object) -> list[bytes]:
    """Return all names of any fingerprint's chunk from its header, named ``stem``. Empty for a
    header that makes no sense."""
    if isinstance(header, bytes) and len(header) >= _HEAD.size:
        magic, _, _, part_bytes, length, _ = _HEAD.unpack_from(header)
        if magic == _MAGIC and 0 < length <= _MOST_PARTS * part_bytes:
            parts = [b"%s:%d:%d" % (stem, part_bytes, i) for i in range(-(-length // part_bytes))]
            return [stem, *parts]
    return []


def _is_whole(header: bytes) -> bool:
    return len(header) == HEADER_BYTES and header[_CHECK_AT_BYTES:] == _CHECK.pack(
        xxh3_64_intdigest(header[:_CHECK_AT_BYTES])
    )


def _allocated(size: int) -> int:
    """Return the bytes that jemalloc allocates: four size classes a doubling (see jemalloc(3))."""
    step = max(16, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def check_settings(
    policies: Sequence[str], maxmemory: int, bytes_: int, ttl: bool
) -> tuple[bool, str]:
    """Return whether ``maxmemory-policy`` (of every node), ``maxmemory`` (of all nodes, 0: no
    limit) and our budget are good together, and why.

    Redis's own eviction knows keys, not runs, so it takes heads of runs and single parts. On real
    traces ``allkeys-lru`` lost 2 to 13 points of hit ratio against leaf-first order,
    ``allkeys-random`` two to six times as much."""
    worst = max(policies, key=_harm, default="noeviction")
    if _harm(worst) == 0 or (_harm(worst) == 1 and not ttl):
        if 0 < maxmemory < bytes_:
            return False, (
                "the limit is less than our budget, so Redis will refuse writes before we make "
                "room; lower redis_bytes or raise maxmemory"
            )
        return True, "good: kvtier alone decides what leaves, leaf first"
    if maxmemory == 0:
        advice = "set maxmemory-policy noeviction before you set one"
        return True, f"good as long as there is no limit; {advice}"
    far = "hit ratio falls far", "this cost 2 to 13 points of hit ratio on real traces"
    return False, (
        "Redis may evict heads of runs and single parts of chunks by itself; "
        f"{far[not worst.endswith('random')]}; set maxmemory-policy noeviction, kvtier makes room "
        "by itself"
    )


def _harm(policy: str) -> int:
    """Return how harmful an eviction policy is: 0 never evicts, 1 evicts keys with a TTL, 2 any
    key, 3 any key at random."""
    if policy == "noeviction":
        return 0
    return 1 if policy.startswith("volatile") else 3 if policy == "allkeys-random" else 2
