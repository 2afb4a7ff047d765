"""Chunks: their bytes and their names. Pure: no I/O, clock, lock or thread.

A *chunk* is the KV of ``chunk_tokens`` consecutive tokens of one prompt: all layers and all ranks.
It has a fixed size and never changes once it is written. A :data:`ChunkKey` names its content: two
chunks with equal keys hold equal bytes.

Key = 40 bytes = SHA-256 digest (32) of *fingerprint + extra + every token up to the chunk's end*,
followed by the first 8 bytes of the parent chunk's digest (zeros for the first chunk). The digest
is one running SHA-256 over the prompt (FIPS 180-4). So it does not depend on PYTHONHASHSEED, the
process or the machine, and a hostile tenant needs a SHA-256 collision to get another tenant's
chunk. The parent's bytes make a run of chunks recoverable from the keys alone. With them a
restarted tier learns again which chunk comes after which.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NewType, cast

from kvtier.core.errors import ConfigError, LayoutError

ChunkKey = NewType("ChunkKey", bytes)

KEY_BYTES = 40
PAGE_BYTES = 4096
_DIGEST_BYTES = 32
_LINK_BYTES = KEY_BYTES - _DIGEST_BYTES
_ROOT_LINK = bytes(_LINK_BYTES)
_DOMAIN = b"kvtier/chunk/1\0"
_PIECE_DOMAIN = b"kvtier/piece/1\0"
_PART_DOMAIN = b"kvtier/part/1\0"
_KEPT_MASKS = 16
"""Most cached results of :func:`_mask_of`, each as large as the keys that it is for."""


def parent_half(key: ChunkKey) -> bytes:
    """Return the :func:`own_half` of this chunk's parent; zeros for the first chunk of a prompt."""
    return key[_DIGEST_BYTES:]


def own_half(key: ChunkKey) -> bytes:
    return key[:_LINK_BYTES]


def flat_key(name: bytes) -> ChunkKey:
    """Make a key that names no parent, for a chunk that is known by ``name`` alone."""
    return ChunkKey(hashlib.sha256(name).digest() + _ROOT_LINK)


class PieceMask:
    """Name of one kind of pieces of chunks. :meth:`key` gives a piece's key.

    Two pieces have equal keys only if chunk and name are equal. Any other way needs two prompts
    whose SHA-256 digests differ by a given number. A piece's key refers to the same piece of the
    parent chunk, so pieces are recovered leaf-first like chunks.
    """

    def __init__(self, name: str) -> None:
        digest = hashlib.sha256(_PIECE_DOMAIN + name.encode()).digest()
        self.any_but_first = digest + digest[:_LINK_BYTES]
        """Bits to flip in the key of any chunk but a prompt's first."""
        self._first = digest + _ROOT_LINK

    def key(self, key: ChunkKey) -> ChunkKey:
        mask = self._first if key.endswith(_ROOT_LINK) else self.any_but_first
        return ChunkKey((int.from_bytes(key) ^ int.from_bytes(mask)).to_bytes(KEY_BYTES))


def piece_keys(masks: Sequence[PieceMask], keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Return :meth:`PieceMask.key` of each key of a run, for the first mask, then for the next one.
    Only the first key may be a prompt's first. Masking all as one number halves the time."""
    if not keys:
        return []
    mask, cut = _mask_of(tuple(masks), len(keys))
    named = int.from_bytes(b"".join(keys) * len(masks)) ^ mask
    found = list(cut.unpack(named.to_bytes(cut.size)))
    if keys[0].endswith(_ROOT_LINK):
        found[:: len(keys)] = [each.key(keys[0]) for each in masks]
    return cast(list[ChunkKey], found)


def renamed(mask: PieceMask, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Return :meth:`PieceMask.key` of each key. Any of ``keys`` may be a prompt's first chunk."""
    found = piece_keys((mask,), keys)
    for at, key in enumerate(keys):
        if key.endswith(_ROOT_LINK):
            found[at] = mask.key(key)
    return found


@lru_cache(maxsize=_KEPT_MASKS)
def _mask_of(masks: tuple[PieceMask, ...], keys: int) -> tuple[int, struct.Struct]:
    """Join the masks for ``keys`` keys to one number. The struct cuts its bytes into keys."""
    mask = b"".join(each.any_but_first * keys for each in masks)
    return int.from_bytes(mask), struct.Struct(f"{KEY_BYTES}s" * (len(masks) * keys))


def fingerprint(parts: Mapping[str, Any]) -> bytes:
    """Return a digest (32 bytes) of all that decides whether KV bytes are equal (model content,
    dtype, layout, parallelism ...). ``parts`` can be written as JSON, in any order."""
    text = json.dumps(
        parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(_DOMAIN + text.encode()).digest()


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Size and naming of chunks for one model on one engine configuration.

    Attributes:
        fingerprint: 32 bytes, see :func:`fingerprint`.
        chunk_tokens: tokens in a chunk. A multiple of ``block_tokens``.
        block_tokens: tokens in one engine block (page).
        rank_block_bytes: bytes that one block takes in each worker rank's part of a slot, in rank
            order. A chunk's slot holds ``blocks_per_chunk * rank_block_bytes[r]`` bytes for every
            rank ``r``, one rank after the other.
        model: what people call the model. It decides nothing.

    Raises LayoutError when the numbers do not fit together.
    """

    fingerprint: bytes
    chunk_tokens: int
    block_tokens: int
    rank_block_bytes: tuple[int, ...]
    model: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.fingerprint) != _DIGEST_BYTES:
            raise LayoutError(
                f"fingerprint has {len(self.fingerprint)} bytes, expected {_DIGEST_BYTES}"
            )
        if self.block_tokens < 1 or self.chunk_tokens < 1 or self.chunk_tokens % self.block_tokens:
            nearest = max(1, round(self.chunk_tokens / max(1, self.block_tokens))) * max(
                1, self.block_tokens
            )
            raise LayoutError(
                f"chunk_tokens={self.chunk_tokens} is not a positive multiple of the engine's "
                f"block size {self.block_tokens}; set chunk_tokens to {nearest}"
            )
        if not self.rank_block_bytes or min(self.rank_block_bytes) < 1:
            raise LayoutError(
                f"rank_block_bytes={self.rank_block_bytes}: expected at least one positive size"
            )

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.blocks_per_chunk * sum(self.rank_block_bytes)

    @property
    def slot_bytes(self) -> int:
        return -(-self.chunk_bytes // PAGE_BYTES) * PAGE_BYTES

    def chain(self, extra: bytes = b"", per_chunk: Mapping[int, bytes] | None = None) -> KeyChain:
        """Make the keys of one prompt. ``extra`` separates LoRA adapters and salts. ``per_chunk``
        gives, by chunk index, what else (multimodal hashes) a chunk depends on."""
        return KeyChain(self, extra, per_chunk)

    def keys(self, tokens: Sequence[int], extra: bytes = b"") -> list[ChunkKey]:
        """Return the keys of all whole chunks of ``tokens``. 32,768 tokens take about 0.2 ms."""
        return self.chain(extra).extend(tokens)


class KeyChain:
    """Keys of one growing prompt, of which each token is hashed once. Not thread-safe."""

    __slots__ = ("_chunk_tokens", "_hash", "_link", "_per_chunk", "_root", "keys")

    def __init__(
        self, layout: ChunkLayout, extra: bytes, per_chunk: Mapping[int, bytes] | None
    ) -> None:
        framed = bool(per_chunk)
        head = struct.pack("<I?I", layout.chunk_tokens, framed, len(extra))
        self._hash = hashlib.sha256(_DOMAIN + layout.fingerprint + head + extra)
        self._root = self._hash.copy()
        self._chunk_tokens = layout.chunk_tokens
        self._per_chunk = per_chunk if framed else None
        self._link = _ROOT_LINK
        self.keys: list[ChunkKey] = []

    def extend(self, tokens: Sequence[int]) -> list[ChunkKey]:
        """Return all keys of the *whole* prompt so far, ``tokens``, of which only new ones are
        hashed. Raises ConfigError for a token id outside ``0 .. 2**32 - 1``."""
        size, done = self._chunk_tokens, len(self.keys)
        last = len(tokens) // size
        if last > done:
            self.go_on(tokens if not done else tokens[done * size : last * size])
        return self.keys

    def continued(self, tail: Sequence[int]) -> list[ChunkKey]:
        """Return the keys of a prompt that goes on with ``tail``. This chain stays as it is."""
        other = copy(self)
        other._hash, other.keys = self._hash.copy(), list(self.keys)
        other.go_on(tail)
        return other.keys

    def within(self, chunk: int, tokens: Sequence[int], every: int) -> list[ChunkKey]:
        """Return keys of the leading parts of chunk number ``chunk`` (one so far, or the next): one
        for each ``every`` of its tokens, as far as ``tokens`` (the *whole* prompt) go. The last of
        a whole chunk is not the chunk's own key."""
        before = self.keys[chunk - 1] if chunk else self._root.digest() + _ROOT_LINK
        begin, step = chunk * self._chunk_tokens, 4 * every
        packed = _packed(tokens[begin : begin + self._chunk_tokens])
        more = (self._per_chunk or {}).get(chunk, b"")
        head = _PART_DOMAIN + before[:_DIGEST_BYTES] + struct.pack("<I", len(more)) + more
        hashed, link = hashlib.sha256(head), before[:_LINK_BYTES] if chunk else _ROOT_LINK
        found = []
        for end in range(step, len(packed) + 1, step):
            hashed.update(packed[end - step : end])
            found.append(ChunkKey(hashed.digest() + link))
        return found

    def go_on(self, tokens: Sequence[int]) -> None:
        """Add the keys of the whole chunks of ``tokens``, which follow the last one's. Raises as
        :meth:`extend`."""
        packed = _packed(tokens)
        size, done = self._chunk_tokens, len(self.keys)
        update, digest, link, step = self._hash.update, self._hash.digest, self._link, 4 * size
        append, per_chunk = cast("Callable[[bytes], None]", self.keys.append), self._per_chunk
        for begin in range(0, len(tokens) // size * step, step):
            if per_chunk is not None:
                more = per_chunk.get(done + begin // step, b"")
                update(struct.pack("<I", len(more)) + more)
            update(packed[begin : begin + step])
            own = digest()
            append(own + link)
            link = own[:_LINK_BYTES]
        self._link = link


def _packed(tokens: Sequence[int]) -> memoryview:
    """Pack token ids as they are hashed: 4 bytes each, little-endian."""
    words = array("I")
    try:
        if isinstance(tokens, list):
            words.fromlist(tokens)  # takes two thirds of the time
        else:
            words = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers in 0 .. 2**32-1: {error}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words).cast("B")


def coldest_first(stamped: Iterable[tuple[ChunkKey, Any]]) -> list[ChunkKey]:
    """Order the keys of a restarted tier coldest first: by stamp, but no parent before its child,
    which would be of no use without it.

    ``stamped`` pairs each key with a comparable stamp, larger is hotter. A chunk counts as used
    when one of its descendants was: a hot leaf lifts all its ancestors. Of a key given twice the
    larger stamp counts. Keys whose parent is not among them are ordered by their stamp alone.

    A forged cycle of links ends instead of looping.
    """
    hottest_first = [key for key, _ in sorted(stamped, key=lambda pair: pair[1], reverse=True)]
    by_link = {own_half(key): key for key in hottest_first}
    placed: set[ChunkKey] = set()
    order: list[ChunkKey] = []
    for key in hottest_first:
        line: list[ChunkKey] = []
        ancestor: ChunkKey | None = key
        while ancestor is not None and ancestor not in placed:
            placed.add(ancestor)
            line.append(ancestor)
            ancestor = by_link.get(parent_half(ancestor))
        order.extend(reversed(line))
    order.reverse()
    return order
