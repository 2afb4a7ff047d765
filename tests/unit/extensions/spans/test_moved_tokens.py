"""Keys that move: where a block has them, and what a rotation makes of them."""

import pytest
import torch

from kvtier.core.errors import LayoutError
from kvtier.extensions.spans.packing import KeyRotation, learned, rotation_of

TOKENS, HEADS, DIM = 8, 2, 6


class Writer:
    """An engine's form of a block: keys and values shuffled over it in some order. ``packed``: keys
    as kernels for CPUs have them, two elements of four tokens beside each other, behind values."""

    def __init__(self, dtype, width=DIM, blocks=4, *, packed=False):
        """``width``: elements of a value."""
        size = TOKENS * HEADS * (DIM + width)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(3))
        parts = order.split([TOKENS * HEADS * DIM, TOKENS * HEADS * width])
        self.keys, self.values = (part.view(TOKENS, HEADS, -1) for part in parts)
        if packed:
            self.values = torch.arange(TOKENS * HEADS * width).view(TOKENS, HEADS, width)
            keys = torch.arange(TOKENS * HEADS * width, size)
            keys = keys.view(HEADS, TOKENS // 4, DIM // 2, 4, 2).permute(1, 3, 0, 2, 4)
            self.keys = keys.reshape(TOKENS, HEADS, DIM)
        self.cache = torch.zeros(blocks, size, dtype=dtype)

    def write(self, keys, values, slots):
        for index, slot in enumerate(slots.tolist()):
            row, token = self.cache[slot // TOKENS], slot % TOKENS
            row[self.keys[token]] = keys[index]
            row[self.values[token]] = values[index]


@pytest.mark.parametrize("packed", [False, True], ids=["shuffled", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [DIM, 5 * DIM], ids=["heads", "latents"])
def test_a_form_that_no_stride_shows_is_learnt_and_read(dtype, width, *, packed):
    engine = Writer(dtype, width, packed=packed)
    engine.cache.fill_(7)
    packing = learned(engine.write, engine.cache, TOKENS, HEADS, (DIM, width))
    assert [even is not None for even in packing.even] == [packed, packed]
    assert (engine.cache == 7).all(), "what lay in the block lies there again"
    keys = torch.randn(2 * TOKENS, HEADS, DIM).to(dtype)
    values = torch.randn(2 * TOKENS, HEADS, width).to(dtype)
    engine.write(keys, values, torch.arange(TOKENS, 3 * TOKENS))
    rows = engine.cache[1:3].view(torch.uint8)[None]
    for first, count in ((0, 2 * TOKENS), (3, 1), (5, 9), (TOKENS + 2, 4)):
        read = packing.read(rows, first, count)
        assert torch.equal(read[0][0], keys[first : first + count])
        assert torch.equal(read[1][0], values[first : first + count])


def test_a_form_that_loses_elements_is_refused():
    engine = Writer(torch.float32)
    engine.values = engine.keys
    with pytest.raises(LayoutError, match="0 of 96 elements were found in a block"):
        learned(engine.write, engine.cache, TOKENS, HEADS, (DIM, DIM))
    engine = Writer(torch.float32)
    engine.keys[0] = engine.keys[1]
    with pytest.raises(LayoutError, match="elements were found in a block"):
        learned(engine.write, engine.cache, TOKENS, HEADS, (DIM, DIM))
    with pytest.raises(LayoutError, match="expected keys and values"):
        learned(engine.write, engine.cache, TOKENS, HEADS, (DIM, DIM + 1))


def tables(width, scale=1.0):
    """As vLLM has them: cosines, then sines."""
    angles = torch.arange(512)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    return torch.cat((angles.cos(), angles.sin()), 1) * scale


def rotated(raw, position, rotation):
    """A key at a position, element by element, as the definition has it."""
    out, half = raw.clone(), rotation.width // 2
    for pair in range(half):
        one, other = (pair, pair + half) if rotation.neox else (2 * pair, 2 * pair + 1)
        cos, sin = rotation.cos[position, pair], rotation.sin[position, pair]
        out[..., one] = raw[..., one] * cos - raw[..., other] * sin
        out[..., other] = raw[..., other] * cos + raw[..., one] * sin
    return out


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("width", [DIM, DIM - 2])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_a_moved_key_is_the_key_of_the_other_position(neox, width, scale):
    rotation = rotation_of(tables(width, scale), width, neox)
    raw = torch.randn(3, HEADS, DIM)
    for position, distance in ((0, 5), (17, 300), (400, -399), (9, 0)):
        here = rotated(raw, position, rotation)
        there = rotated(raw, position + distance, rotation)
        assert torch.allclose(rotation.moved(here, distance), there, atol=1e-4)
        assert rotation.explains(here, there, distance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_rotation_is_seen(dtype):
    rotation = rotation_of(tables(DIM), DIM, neox=True)
    raw = torch.randn(HEADS, DIM)
    here, there = (rotated(raw, position, rotation).to(dtype) for position in (20, 29))
    assert rotation.explains(here, there, 9)
    wrong: list[tuple[KeyRotation, int]] = [
        (rotation, 8),
        (rotation, 10),
        (rotation, -9),
        (rotation, 0),
        (rotation_of(tables(DIM), DIM, neox=False), 9),
        (rotation_of(tables(DIM - 2), DIM - 2, neox=True), 9),
    ]
    for other, distance in wrong:
        assert not other.explains(here, there, distance)


def bent():
    """Angles that do not grow evenly, as those of tables for long prompts."""
    angles = (torch.arange(512)[:, None] ** 1.1) * torch.tensor([1.0, 0.1, 0.01])
    return torch.cat((angles.cos(), angles.sin()), 1)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (bent(), "do not add up"),
        (tables(DIM)[1:], "first position is rotated"),
        (torch.zeros(512, DIM), "first position is rotated"),
        (tables(DIM)[:, :-1], "a rotary table of shape"),
    ],
)
def test_tables_that_do_not_rotate_evenly_are_refused(table, told):
    with pytest.raises(LayoutError, match=told):
        rotation_of(table, DIM, neox=True)
