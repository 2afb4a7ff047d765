"""Where in a block the key and the value of a token lie, learnt from the engine's own writer, and a
key as it would be elsewhere.

Attention kernels for CPUs pack keys in a form that no stride shows. So numbers are written into a
free block, as if they were keys and values, and looked for. What is known then: for each element of
``[token, head, dim]`` its place in the block. Keys may have other ``dim`` than values.

Rotary rotations add up where each pair of elements turns by an angle that grows evenly with the
position. Then a key moves by ``d`` places when it is rotated by the angles of position ``d``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvtier.core.errors import LayoutError

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""The engine's ``write(keys, values, places)``. A place is block * tokens of a block + token."""
_EXACT_NUMBERS = 100
"""Whole numbers below this are exact in every type that KV has."""


class Even(NamedTuple):
    """Places in a block that grow evenly along each axis, as strides."""

    first: int
    sizes: list[int]
    strides: list[int]

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """View ``[layer, block, element]`` as ``[layer, block, *sizes]``. Nothing is copied."""
        layer, block, _ = elements.stride()
        sizes, strides = [*elements.shape[:2], *self.sizes], [layer, block, *self.strides]
        return elements.as_strided(sizes, strides, elements.storage_offset() + self.first)


@dataclass(frozen=True, slots=True)
class Packing:
    dtype: torch.dtype
    keys: torch.Tensor
    values: torch.Tensor
    """``[token, head, dim]``: the place of each element in a block. ``keys`` likewise."""
    even: tuple[Even | None, Even | None]
    """Strides of the keys' and the values' places. None if they have none: then elements are
    gathered, which takes several times as long."""

    def read(self, blocks: torch.Tensor, first: int, count: int) -> list[torch.Tensor]:
        """Read keys and values of ``count`` tokens, from token ``first`` of these blocks on.

        ``blocks``: uint8, ``[layers, blocks, bytes]``. Results: ``[layers, count, heads, dim]``."""
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
    """Learn the packing of one layer's ``cache``, whose axis 0 counts blocks of ``tokens``. Its
    last block is written to, and restored. Raises LayoutError unless every element of keys and
    values has a place of its own in the block."""
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
    write: Write, row: torch.Tensor, block: int, form: tuple[int, int, tuple[int, int]], which: int
) -> torch.Tensor:
    """Find places of keys (``which`` 0) or values (1) by writing numbers, digit by digit."""
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
    """Return the strides of ``places``, or None if they do not grow evenly. Each axis is split into
    its prime factors, because kernels interleave some tokens or elements."""
    sizes = [factor for size in places.shape for factor in _factors(size)]
    apart, first, strides = places.reshape(sizes), int(places.flatten()[0]), list[int]()
    built = torch.tensor(first)
    for axis, size in enumerate(sizes):
        second = [int(axis == other) for other in range(len(sizes))]
        strides.append(int(apart[tuple(second)]) - first)
        built = built[..., None] + torch.arange(size) * strides[-1]
    return Even(first, sizes, strides) if torch.equal(built, apart) else None


def _factors(number: int) -> list[int]:
    """Return the prime factors, those of 2 last, because kernels interleave by them."""
    found, factor = list[int](), 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            found.append(factor)
    return found[::-1]


_EXACT_PART, _ROUNDED_PART = 2e-3, 4e-2
"""Largest difference of two equal rotated keys, as a part of the largest element: in float32, and
in the types of half its size."""


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """A model's rotation. ``cos`` and ``sin``: ``[position, pair]``, float32. ``neox``: a pair is
    half of ``width`` apart, else neighbours. Elements from ``width`` on are not rotated."""

    cos: torch.Tensor
    sin: torch.Tensor
    width: int
    neox: bool

    def moved(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """Rotate ``keys``, ``[..., dim]``, by ``distance`` positions. Computed in float32."""
        if not distance:
            return keys
        cos, sin = self.cos[abs(distance)], self.sin[abs(distance)]
        if distance < 0:
            sin = -sin
        turned, rest = keys[..., : self.width].float(), keys[..., self.width :]
        if self.neox:
            one, other = turned.chunk(2, -1)
            out = torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
        else:
            one, other = turned[..., ::2], turned[..., 1::2]
            pair = (one * cos - other * sin, other * cos + one * sin)
            out = torch.stack(pair, -1).flatten(-2)
        return torch.cat((out.to(keys.dtype), rest), -1)

    def explains(self, key: torch.Tensor, other: torch.Tensor, distance: int) -> bool:
        """Whether ``other`` is ``key`` moved: both are of the same token in the first layer,
        where a key depends on nothing but the token and its position."""
        gap = (self.moved(key, distance).float() - other.float()).abs().max()
        allowed = _EXACT_PART if key.dtype == torch.float32 else _ROUNDED_PART
        return bool(gap <= allowed * other.float().abs().max())


def rotation_of(table: torch.Tensor, width: int, neox: bool) -> KeyRotation:
    """Make the rotation of a rotary module's table ``[position, cos | sin]``. A scale that all
    entries have (YaRN's) is taken out: the keys have it already. Raises LayoutError unless
    rotations by the table's rows add up."""
    half = width // 2
    if table.ndim != 2 or table.shape[1] != 2 * half or len(table) < 2:
        raise LayoutError(f"a rotary table of shape {tuple(table.shape)} for {width} elements")
    table = table.float()
    scale = table[0, :1]
    if not bool(scale > 0) or not bool((table[0, :half] == scale).all()):
        raise LayoutError("a rotary table whose first position is rotated")
    cos, sin = table[:, :half] / scale, table[:, half:] / scale
    steps = torch.linspace(1, (len(table) - 1) // 2, 16).long().unique()
    for step in steps:
        at = torch.arange(0, len(table) - int(step), max(1, len(table) // 64))
        ahead = at + step
        cosines = cos[at] * cos[step] - sin[at] * sin[step]
        sines = sin[at] * cos[step] + cos[at] * sin[step]
        gap = max(
            float((cosines - cos[ahead]).abs().max()), float((sines - sin[ahead]).abs().max())
        )
        if gap > 1e-2:
            raise LayoutError(f"rotations do not add up: {gap:.3f} off over {int(step)} positions")
    return KeyRotation(cos, sin, width, neox)
