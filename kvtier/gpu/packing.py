"""Where in a block the key and the value of a token lie, learnt from the engine's own writer.

Attention kernels for CPUs pack keys in a form that no stride shows. So numbers are written into a
free block, as if they were keys and values, and looked for. What is known then: for each element of
``[token, head, dim]`` its place in the block. Keys may have other ``dim`` than values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.core.errors import LayoutError

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write(keys, values, places)``: the engine's. A place is block * tokens of a block + token."""
_BASE = 100
"""Whole numbers up to this are exact in every type that KV has."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One layer's form of a block."""

    dtype: torch.dtype
    keys: torch.Tensor
    values: torch.Tensor
    """``[token, head, dim]``: the place of each element among a block's elements."""

    def read(self, blocks: torch.Tensor, first: int, count: int) -> list[torch.Tensor]:
        """Keys and values of ``count`` tokens, from token ``first`` of these blocks on.

        ``blocks``: uint8, ``[layers, blocks, bytes]``. Results: ``[layers, count, heads, dim]``.
        """
        elements = blocks.view(self.dtype)
        return [
            elements[:, :, places].flatten(1, 2)[:, first : first + count]
            for places in (self.keys, self.values)
        ]


def learned(
    write: Write, cache: torch.Tensor, tokens: int, heads: int, dims: tuple[int, int]
) -> Packing:
    """The packing of one layer's ``cache``, whose axis 0 counts blocks of ``tokens``. ``dims``: of
    a key and of a value.

    Its last block is written to, and has its bytes back at the end. Raises LayoutError when not
    every element of keys and values has a place of its own in the block.
    """
    block = cache.shape[0] - 1
    row = cache[block]
    size = tokens * heads * sum(dims)
    if not row.is_contiguous() or row.numel() != size:
        raise LayoutError(
            f"a block has {row.numel()} elements; expected keys and values of {tokens} tokens of "
            f"{heads} x {dims}, {size}, dense"
        )
    before = row.clone()
    try:
        found = [_places(write, row, block, (tokens, heads, dims), which) for which in (0, 1)]
    finally:
        row.copy_(before)
    return Packing(cache.dtype, *found)


def _places(
    write: Write,
    row: torch.Tensor,
    block: int,
    form: tuple[int, int, tuple[int, int]],
    which: int,
) -> torch.Tensor:
    """Places of the keys (``which`` 0) or values (1): each element's number is written, a digit at
    a time."""
    tokens, heads, dims = form
    shape = tokens, heads, dims[which]
    size = math.prod(shape)
    number = torch.arange(size)
    slots = torch.arange(block * tokens, (block + 1) * tokens)
    total = torch.zeros(row.numel(), dtype=torch.long)
    seen = torch.zeros(row.numel(), dtype=torch.bool)
    digit = 1
    while digit < max(size, 2):
        pair = [row.new_zeros(tokens, heads, dim) for dim in dims]
        pair[which] = (number // digit % _BASE + 1).to(row.dtype).view(shape)
        row.zero_()
        write(pair[0], pair[1], slots)
        read = row.reshape(-1).float().round().long()
        seen = read > 0
        total += torch.where(seen, (read - 1) * digit, 0)
        digit *= _BASE
    places = torch.full((size,), -1)
    at = seen.nonzero()[:, 0]
    if len(at) != size or int(total[at].max()) >= size:
        raise LayoutError(f"{len(at)} of {size} elements were found in a block")
    places[total[at]] = at
    if bool((places < 0).any()):
        raise LayoutError("not every element has a place of its own in a block")
    return places.view(shape)
