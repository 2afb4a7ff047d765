"""Rotary position embedding by a distance: a key from another place, as it would be here.

Rotations add up where each pair of elements turns by an angle that grows evenly with the position.
Then a key moves by ``d`` places when it is rotated by the angles of position ``d``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.core.errors import LayoutError

_EXACT, _ROUNDED = 2e-3, 4e-2
"""Most that two rotated keys may differ by, as a part of the largest element: in float32, and in
the types of half its size."""


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """``cos`` and ``sin``: ``[position, pair]``, float32. ``neox``: a pair's elements are half of
    ``width`` apart, else neighbours. Elements from ``width`` on are not rotated."""

    cos: torch.Tensor
    sin: torch.Tensor
    width: int
    neox: bool

    def moved(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """``keys``: ``[..., dim]``. Computed in float32."""
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
        allowed = _EXACT if key.dtype == torch.float32 else _ROUNDED
        return bool(gap <= allowed * other.float().abs().max())


def rotation_of(table: torch.Tensor, width: int, neox: bool) -> KeyRotation:
    """Of a rotary module's table ``[position, cos | sin]``. A scale that all entries have
    (YaRN's) is taken out: the keys have it already. Raises LayoutError unless rotations by the
    table's rows add up."""
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
