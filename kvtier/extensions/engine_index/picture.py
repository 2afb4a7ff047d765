"""Picture: which blocks of which prompts one engine has, and where. Pure.

A block is known by a digest of all tokens up to its end, and of what vLLM hashes beside them (salt,
adapter, images). So engines whose vLLM hashes differ are looked up with the same tokens. It counts
only when its place in a prompt is known: its parent is in the picture, or it is the first. So a
picture that began late knows less than the engine has and never more.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any

import msgspec

from kvtier.core.steps import PIECE_CHUNKS, Steps
from kvtier.protocol.kv_events import BlockRemoved, BlockStored, Event, Hash

_FULL = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_MOST_TIERS, _MOST_GROUPS = 8, 64
_GPU = "gpu"


class PromptBlocks:
    """A prompt to look up. Digests are made as needed, once for all blocks of one size."""

    def __init__(self, tokens: Sequence[int], salt: str | None) -> None:
        self._tokens = array("I", tokens)
        self._salt = [salt] if salt else []
        self._digests: dict[int, list[bytes]] = {}

    def digest(self, block_tokens: int, number: int) -> bytes | None:
        """Return block ``number``'s digest, or None if it is not full. Ask in ascending order."""
        made = self._digests.setdefault(block_tokens, [])
        if number == len(made):
            tokens = self._tokens[number * block_tokens : (number + 1) * block_tokens]
            if len(tokens) < block_tokens:
                return None
            made.append(_digest(made[-1] if made else b"", tokens, [] if made else self._salt))
        return made[number]


@dataclass(slots=True)
class _Group:
    """A cache group. ``known``: vLLM's hash -> digest. ``held``: digest -> the tiers' bits."""

    block_tokens: int = 0
    known: dict[Hash, bytes] = field(default_factory=dict)
    held: dict[bytes, int] = field(default_factory=dict)


class Leading(dict[str, int]):
    """Tokens of a prompt's beginning that each tier has. ``tokens``: those that any tier has."""

    tokens: int = 0


class Picture:
    """One engine's blocks, ``most`` of them at the most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: dict[int, _Group] = {}
        self._bits: dict[str, int] = {}
        self.blocks: Counter[str] = Counter()
        self.ignored = 0
        """Blocks that were left out: their place in a prompt is unknown, or there was no room."""

    def clear(self) -> None:
        self._groups, self._bits = {}, {}
        self.blocks.clear()

    def apply(self, events: Sequence[Event]) -> Steps[None]:
        """Apply a message's events. Raises ValueError or OverflowError for malformed ones."""
        for event in events:
            if isinstance(event, BlockStored):
                yield from self._stored(event)
            elif isinstance(event, BlockRemoved):
                group = self._groups.get(event.group_idx or 0)
                bit = self._bits.get(_tier(event), 0)
                if group is not None and bit:
                    yield from self._removed(group, event.block_hashes, bit)
            else:
                bit = self._bits.get(_GPU, 0)
                for group in list(self._groups.values()) if bit else ():
                    yield from self._removed(group, list(group.known), bit)

    def lookup(self, prompt: PromptBlocks) -> Steps[Leading]:
        """Return how much of the prompt's beginning the engine has: the least of all its groups."""
        found: Leading | None = None
        for group in list(self._groups.values()):
            one = yield from self._lookup(group, prompt)
            if found is not None:
                for tier in self._bits:
                    one[tier] = min(one.get(tier, 0), found.get(tier, 0))
                one.tokens = min(one.tokens, found.tokens)
            found = one
        return Leading() if found is None else found

    # ---- steps -----------------------------------------------------------------------------------

    def _lookup(self, group: _Group, prompt: PromptBlocks) -> Steps[Leading]:
        found = Leading(dict.fromkeys(self._bits, 0))
        alive = (1 << len(self._bits)) - 1
        for number in count():
            digest = prompt.digest(group.block_tokens, number) if group.block_tokens else None
            bits = 0 if digest is None else group.held.get(digest, 0)
            if gone := alive & ~bits:
                for tier, bit in self._bits.items():
                    if gone & bit:
                        found[tier] = number * group.block_tokens
                alive &= bits
            if not bits:
                found.tokens = number * group.block_tokens
                return found
            if number % PIECE_CHUNKS == PIECE_CHUNKS - 1:
                yield 0.0
        raise AssertionError

    def _stored(self, event: BlockStored) -> Steps[None]:
        if event.kv_cache_spec_kind not in _FULL:
            return
        group, bit = self._group(event.group_idx or 0), self._bit(_tier(event))
        size, before = event.block_size, event.parent_block_hash
        extras = event.extra_keys or [None] * len(event.block_hashes)
        if len(extras) != len(event.block_hashes):
            raise ValueError("extra keys of other blocks")
        parent = b"" if before is None else group.known.get(before)
        for number, block in enumerate(event.block_hashes):
            digest = group.known.get(block)
            if digest is None:
                tokens = event.token_ids[number * size : (number + 1) * size]
                if parent is None or not tokens or len(tokens) != size or self._is_full:
                    self.ignored += len(event.block_hashes) - number
                    return
                own = extras[number] or ([event.lora_name] if event.lora_name else [])
                digest = group.known[block] = _digest(parent, array("I", tokens), own)
                group.block_tokens = max(group.block_tokens, size)
            held = group.held.get(digest, 0)
            if not held & bit:
                group.held[digest] = held | bit
                self.blocks[_tier(event)] += 1
            parent = digest
            if number % PIECE_CHUNKS == PIECE_CHUNKS - 1:
                yield 0.0

    def _removed(self, group: _Group, hashes: Sequence[Hash], bit: int) -> Steps[None]:
        tier = next((tier for tier, one in self._bits.items() if one == bit), "")
        for number, block in enumerate(hashes):
            digest = group.known.get(block)
            if digest is None:
                continue
            held = group.held.get(digest, 0)
            self.blocks[tier] -= bool(held & bit)
            if held & ~bit:
                group.held[digest] = held & ~bit
            else:
                group.held.pop(digest, None)
                del group.known[block]
            if number % PIECE_CHUNKS == PIECE_CHUNKS - 1:
                yield 0.0

    @property
    def _is_full(self) -> bool:
        return sum(len(group.known) for group in self._groups.values()) >= self._most

    def _group(self, number: int) -> _Group:
        if number not in self._groups and len(self._groups) >= _MOST_GROUPS:
            raise ValueError(f"more than {_MOST_GROUPS} cache groups")
        return self._groups.setdefault(number, _Group())

    def _bit(self, tier: str) -> int:
        if tier not in self._bits and len(self._bits) >= _MOST_TIERS:
            raise ValueError(f"more than {_MOST_TIERS} tiers")
        return self._bits.setdefault(tier, 1 << len(self._bits))


def _tier(event: BlockStored | BlockRemoved) -> str:
    """Return vLLM's medium, or the owner's name of a remote tier."""
    return event.ownership or (event.medium or _GPU).lower()


def _digest(parent: bytes, tokens: array[int], extras: Sequence[Any]) -> bytes:
    own = blake2b(tokens.tobytes(), digest_size=16, key=parent)
    if extras:
        own.update(msgspec.msgpack.encode(extras))
    return own.digest()
