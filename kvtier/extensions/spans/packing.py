"""Where in a block the key and the value of a token lie, learnt from the engine's own writer.

Attention kernels for CPUs pack keys in a form that no stride shows. So numbers are written into a
free block, as if they were keys and values, and looked for. What is known then: for each element of
``[token, head, dim]`` its place in the block. Keys may have other ``dim`` than values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvtier.core.errors import LayoutError

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write(keys, values, places)``: the engine's. A place is block * tokens of a block + token."""
_EXACT_NUMBERS = 100
"""Whole numbers up to this are exact in every type that KV has."""


class Even(NamedTuple):
    """Places that grow evenly along each of some axes."""

    first: int
    sizes: list[int]
    strides: list[int]

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """``[layer, block, *sizes]`` of ``[layer, block, element]``. Nothing is copied."""
        layer, block, _ = elements.stride()
        sizes, strides = [*elements.shape[:2], *self.sizes], [layer, block, *self.strides]
        return elements.as_strided(sizes, strides, elements.storage_offset() + self.first)


@dataclass(frozen=True, slots=True)
class Packing:
    dtype: torch.dtype
    keys: torch.Tensor
    values: torch.Tensor
    """``[token, head, dim]``: the place of each element among a block's elements."""
    even: tuple[Even | None, Even | None]
    """The same places as strides. None: no strides show them, so elements are gathered, which takes
    several times as long."""

    def read(self, blocks: torch.Tensor, first: int, count: int) -> list[torch.Tensor]:
        """Keys and values of ``count`` tokens, from token ``first`` of these blocks on.

        ``blocks``: uint8, ``[layers, blocks, bytes]``. Results: ``[layers, count, heads, dim]``.
        """
        tokens = len(self.keys)
        begin, end = first // tokens, -(-(first + count) // tokens)
        elements, first = blocks.view(self.dtype)[:, begin:end], first - begin * tokens
        found = []
        for places, even in zip((self.keys, self.values), self.even, strict=True):
            lies = elements[:, :, places] if even is None else even.of(elements)
            shape = (len(elements), -1, *places.shape[1:])
            found.append(lies.reshape(shape)[:, first : first + count])
        return found


def learned(
    write: Write, cache: torch.Tensor, tokens: int, heads: int, dims: tuple[int, int]
) -> Packing:
    """The packing of one layer's ``cache``, whose axis 0 counts blocks of ``tokens``. Its last
    block is written to, and has its bytes back at the end. Raises LayoutError when not every
    element of keys and values has a place of its own in the block."""
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
        keys, values = (_places(write, row, block, (tokens, heads, dims), one) for one in (0, 1))
    finally:
        row.copy_(before)
    return Packing(cache.dtype, keys, values, (_even(keys), _even(values)))


def _places(
    write: Write,
    row: torch.Tensor,
    block: int,
    form: tuple[int, int, tuple[int, int]],
    which: int,
) -> torch.Tensor:
    """Of the keys (``which`` 0) or values (1): each element's number is written, a digit at a
    time."""
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
        pair[which] = (number // digit % _EXACT_NUMBERS + 1).to(row.dtype).view(shape)
        row.zero_()
        write(pair[0], pair[1], slots)
        read = row.reshape(-1).float().round().long()
        seen = read > 0
        total += torch.where(seen, (read - 1) * digit, 0)
        digit *= _EXACT_NUMBERS
    places = torch.full((size,), -1)
    at = seen.nonzero()[:, 0]
    if len(at) != size or int(total[at].max()) >= size:
        raise LayoutError(f"{len(at)} of {size} elements were found in a block")
    places[total[at]] = at
    if bool((places < 0).any()):
        raise LayoutError("not every element has a place of its own in a block")
    return places.view(shape)


def _even(places: torch.Tensor) -> Even | None:
    """Strides of ``places``, of which each axis is seen as one axis a prime factor, because
    kernels put some tokens, or elements, beside each other. None: they do not grow evenly."""
    sizes = [factor for size in places.shape for factor in _factors(size)]
    apart, first, strides = places.reshape(sizes), int(places.flatten()[0]), list[int]()
    built = torch.tensor(first)
    for axis, size in enumerate(sizes):
        second = [int(axis == other) for other in range(len(sizes))]
        strides.append(int(apart[tuple(second)]) - first)
        built = built[..., None] + torch.arange(size) * strides[-1]
    return Even(first, sizes, strides) if torch.equal(built, apart) else None


def _factors(number: int) -> list[int]:
    """Prime factors. Those of 2 are the last, because that is what lies beside each other."""
    found, factor = list[int](), 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            found.append(factor)
    return found[::-1]
