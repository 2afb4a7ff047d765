"""The fake model: what every position's KV must be, and the memory of one worker rank that holds it.

The KV of a position is a 64-bit hash of everything before it (tokens, salt), mixed with the layer and the rank. So a
block that holds anything but the KV of its own prefix is seen at once, whatever put it there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

VOCABULARY = 997
Array = np.ndarray[Any, Any]
_GARBAGE = np.uint64(0x6261643F6B763F21)


def chain(salt: str, tokens: Sequence[int], known: list[int] | None = None) -> list[int]:
    """For each position the hash of ``salt`` and of all tokens up to it. ``known``: the hashes of leading positions."""
    found = list(known or ())
    state = found[-1] if found else int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")
    for token in tokens[len(found) :]:
        state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state ^= state >> 29
        found.append(state)
    return found


def next_token(state: int) -> int:
    """What the fake model answers after the position whose hash this is."""
    return (state >> 17) % VOCABULARY


class RankMemory:
    """The paged KV cache of one rank: for each layer a tensor ``[blocks, tokens a block, words]`` of int64."""

    WORDS = 2

    def __init__(self, layers: Sequence[str], rank: int, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tensors = {name: torch.zeros(blocks, block_tokens, self.WORDS, dtype=torch.int64) for name in layers}
        self._flat = {
            name: tensor.numpy().view(np.uint64).reshape(blocks * block_tokens, self.WORDS)
            for name, tensor in self.tensors.items()
        }
        self._marks = {
            name: np.array([(rank * 1_000_003 + number * 7919 + word + 1) for word in range(self.WORDS)], np.uint64)
            * np.uint64(0x9E3779B97F4A7C15)
            for number, name in enumerate(layers)
        }

    def _places(self, blocks: Sequence[int], begin: int, end: int) -> Array:
        positions = np.arange(begin, end)
        table: Array = np.asarray(blocks, np.int64)
        places: Array = table[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
        return places

    def wrong(self, blocks: Sequence[int], states: Sequence[int], end: int) -> int | None:
        """The first of the positions before ``end`` whose KV is not what it must be in some layer, else None."""
        if not end:
            return None
        places, wanted = self._places(blocks, 0, end), np.array(states[:end], np.uint64)[:, None]
        bad = np.zeros(end, bool)
        for name, flat in self._flat.items():
            bad |= (flat[places] != (wanted ^ self._marks[name])).any(axis=1)
        return int(bad.argmax()) if bad.any() else None

    def write(self, blocks: Sequence[int], states: Sequence[int], begin: int, *, sound: bool) -> None:
        """The forward pass writes the positions from ``begin`` on; garbage if it computed over garbage."""
        if begin == len(states):
            return
        places, new = self._places(blocks, begin, len(states)), np.array(states[begin:], np.uint64)[:, None]
        for name, flat in self._flat.items():
            flat[places] = (new ^ self._marks[name]) if sound else (new ^ self._marks[name] ^ _GARBAGE)

    def scribble(self, blocks: Sequence[int]) -> None:
        """A load failed half way: what is in these blocks now is nobody's KV."""
        for tensor in self.tensors.values():
            tensor[list(blocks)] = 0x0BAD
