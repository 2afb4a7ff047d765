"""One of LMCache's chunks as the bytes of one kvtier chunk, and its key. Pure: no I/O, no lmcache,
no torch.

A packed chunk is a head of one page, then the chunk's bytes::

    magic (16) | XXH3-128 (16) | length of the head (2) | head | zeros to 4096 | bytes | zeros

LMCache's last chunk of a prompt may be shorter than the others and has its own shape, while
kvtier's chunks all have one size. So the head has the size, and all that a reader needs to make the
same object. The checksum over key, head and bytes is made where LMCache's memory is read, and
checked where it was filled, so it covers everything between. The head is a page, because slots are
whole pages and aligned copies are faster.
"""

from __future__ import annotations

import json
import struct
from typing import Annotated

import msgspec
import numpy as np
import xxhash

from kvtier.core.chunk import PAGE_BYTES, ChunkKey, flat_key

HEAD_BYTES = PAGE_BYTES
_MAGIC = b"kvtier/lmcache/1"
_FIXED = struct.Struct("<16s16sH")

Size = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Shape = Annotated[list[Size], msgspec.Meta(min_length=1, max_length=8)]


class Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Description of LMCache's object: bytes, shape and dtype of each group of layers, format."""

    size: Size
    shapes: Annotated[list[Shape], msgspec.Meta(min_length=1, max_length=64)]
    dtypes: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    fmt: str


def chunk_key(fingerprint: bytes, *name: object) -> ChunkKey:
    """Return the key of the chunk that LMCache calls ``name`` (its key's fields, as JSON can have
    them), for engines of ``fingerprint``.

    The key is *flat*: its parent half is zero. LMCache names a chunk by a hash over all tokens up
    to its end, without its parent, and a reader must make the same key from that name alone.
    Leaf-first order needs no parents where runs come whole, and LMCache passes whole runs (its
    batches), which a save or load touches from end to beginning. That order is lost among several
    batches of one prefill until the prompt comes again, and on NVMe after a restart, where flat
    keys are ordered only by last use.
    """
    text = json.dumps(name, separators=(",", ":"), ensure_ascii=True)
    return flat_key(_MAGIC + fingerprint + text.encode())


def pack(slot: memoryview, key: ChunkKey, head: Head, data: memoryview) -> bool:
    """Write the packed chunk into ``slot``, and zeros around it: the slot may have held another
    prompt. Returns False, with the slot undefined, if the head does not fit into its page.

    The checksum is of the copy, which has no other writer.
    """
    words = msgspec.msgpack.encode(head)
    if _FIXED.size + len(words) > HEAD_BYTES or len(data) != head.size:
        return False
    body, end = slot[HEAD_BYTES : HEAD_BYTES + head.size], _FIXED.size + len(words)
    _copy(body, data)
    for rest in slot[end:HEAD_BYTES], slot[HEAD_BYTES + head.size :]:
        np.frombuffer(rest, np.uint8)[:] = 0
    _FIXED.pack_into(slot, 0, _MAGIC, _checksum(key, words, body), len(words))
    slot[_FIXED.size : end] = words
    return True


def head_of(slot: memoryview) -> Head | None:
    """Read the head, not yet proved by the checksum; None if there is no plausible one."""
    magic, _, length = _FIXED.unpack_from(slot)
    if magic != _MAGIC or _FIXED.size + length > HEAD_BYTES:
        return None
    try:
        head = msgspec.msgpack.decode(slot[_FIXED.size : _FIXED.size + length], type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    whole = HEAD_BYTES + head.size <= len(slot) and len(head.shapes) == len(head.dtypes)
    return head if whole else None


def unpack(slot: memoryview, key: ChunkKey, into: memoryview) -> bool:
    """Copy a packed chunk's bytes into ``into``, as many as fit. Returns False, with ``into``
    undefined, if they were not packed for this key. The checksum is of the copy, so a slot that
    changes meanwhile is noticed."""
    _, checksum, length = _FIXED.unpack_from(slot)
    words = bytes(slot[_FIXED.size : _FIXED.size + length])
    _copy(into, slot[HEAD_BYTES : HEAD_BYTES + len(into)])
    return bool(_checksum(key, words, into) == checksum)


def _checksum(key: ChunkKey, words: bytes, data: memoryview) -> bytes:
    hashed = xxhash.xxh3_128(key + words)
    hashed.update(data)
    return hashed.digest()


def _copy(into: memoryview, data: memoryview) -> None:
    """Copy by numpy, which does so without the GIL."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
