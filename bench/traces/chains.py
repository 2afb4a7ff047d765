"""Chains: keys for blocks whose ids may name their own tokens alone. A block's key stands for its
id and all ids before it, as a chunk's key does. Where ids stand for all that is before them
already, the keys are alike exactly where the ids are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvtier.core.chunk import ChunkKey

_LATEST_S = 1e12
_MOST_BLOCKS = 1 << 20


def key_of(name: object) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(str(name).encode(), digest_size=40).digest())


class Chains:
    """Remembers each beginning of a prompt that it has seen."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._keys: list[ChunkKey] = []
        """The key of each node, by its number."""

    def root(self) -> int:
        """A new namespace: ids below it have nothing in common with those below another."""
        self._keys.append(ChunkKey(b""))
        return len(self._keys) - 1

    def run(self, ids: Sequence[int], root: int) -> tuple[ChunkKey, ...]:
        """The keys of a prompt's blocks."""
        nodes, keys, node, run = self._nodes, self._keys, root, list[ChunkKey]()
        for each in ids:
            step = (node, each)
            node = nodes.setdefault(step, len(keys))
            if node == len(keys):
                keys.append(key_of(node))
            run.append(keys[node])
        return tuple(run)


def numbers(ids: object, field: str = "hash_ids") -> list[int]:
    """Blocks' ids as a trace gives them in ``field``. Raises ValueError."""
    if (
        not isinstance(ids, list)
        or len(ids) > _MOST_BLOCKS
        or not all(type(each) is int for each in ids)
    ):
        raise ValueError(f"{field} is not a list of numbers")
    return ids


def seconds(given: object) -> float:
    """A time as a trace gives it. Raises ValueError."""
    if isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < _LATEST_S:
        return float(given)
    raise ValueError("the time is not a number of seconds")


def tokens(given: object) -> int:
    """A prompt's length as a trace gives it. Raises ValueError."""
    if type(given) is not int or given < 0:
        raise ValueError("the prompt's length is not a number of tokens")
    return given
