"""Small engines in every memory layout that vLLM's backends use, for the tests of copies and
regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 9, 2, 4, 6
BLOCKS_PER_CHUNK = 4
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
}


@dataclass
class Engine:
    """KV tensors by layer, each with the blocks on ``axis`` (``kernel_blocks`` of them a block),
    over ``backings``."""

    caches: dict[str, torch.Tensor]
    backings: list[torch.Tensor]
    axis: int = 0
    kernel_blocks: int = 1

    def block(self, layer, block):
        """The block's values in the engine's own view."""
        return self.caches[layer].narrow(self.axis, block * self.kernel_blocks, self.kernel_blocks)

    def memory(self):
        """A copy of every byte the engine owns, padding and neighbours included."""
        return [backing.cpu().clone() for backing in self.backings]


def one_backing(order, device, padding=0, blocks=BLOCKS):
    """All layers in one allocation, logical [L, B, H, N, C] stored in ``order``. ``padding``
    elements after a page."""
    shape = (LAYERS, blocks, HEADS, TOKENS, CONTENT)
    strides, step = [0] * 5, 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis] + (padding if axis == 2 else 0)
    backing = torch.zeros(step, dtype=torch.int16, device=device)
    views = backing.as_strided(shape, strides)
    return Engine({f"layer.{index}": views[index] for index in range(LAYERS)}, [backing])


def kernel_blocks(device):
    engine = one_backing(ORDERS["LBHNC"], device)
    split = {
        name: cache.as_strided(
            (BLOCKS * 2, HEADS, TOKENS // 2, CONTENT),
            (cache.stride(0) // 2, cache.stride(0) // 4, CONTENT, 1),
            cache.storage_offset(),
        )
        for name, cache in engine.caches.items()
    }
    return Engine(split, engine.backings, kernel_blocks=2)


def keys_and_values_apart(device):
    caches = [
        torch.zeros(2, BLOCKS, TOKENS, HEADS, CONTENT, dtype=torch.int16, device=device)
        for _ in range(LAYERS)
    ]
    return Engine({f"layer.{index}": cache for index, cache in enumerate(caches)}, caches, axis=1)


def keys_and_values_inside(device):
    """Shape (2, blocks, ...) whose memory has the blocks outermost."""
    caches = [
        torch.zeros(BLOCKS, 2, TOKENS, HEADS, CONTENT, dtype=torch.int16, device=device)
        for _ in range(LAYERS)
    ]
    return Engine(
        {f"layer.{index}": cache.transpose(0, 1) for index, cache in enumerate(caches)},
        caches,
        axis=1,
    )


def unequal_layers(device):
    """Latent layers and odd-sized byte layers, each in an allocation of its own."""
    caches = [
        torch.zeros(BLOCKS, TOKENS, width, dtype=torch.uint8, device=device)
        for width in (36, 36, 5, 7)
    ]
    return Engine({f"layer.{index}": cache for index, cache in enumerate(caches)}, caches)


def uneven_distances(device):
    """Equal layers in one allocation, the third farther away than the second."""
    backing = torch.zeros(5, BLOCKS, TOKENS, CONTENT, dtype=torch.int16, device=device)
    return Engine({f"layer.{index}": backing[at] for index, at in enumerate((0, 1, 4))}, [backing])


ENGINES: dict[str, Callable[[torch.device], Engine]] = {
    **{
        name: lambda device, order=order: one_backing(order, device)  # type: ignore[misc]
        for name, order in ORDERS.items()
    },
    "padded": lambda device: one_backing(ORDERS["LBHNC"], device, padding=8),
    "kernel_blocks": kernel_blocks,
    "keys_and_values_apart": keys_and_values_apart,
    "keys_and_values_inside": keys_and_values_inside,
    "unequal_layers": unequal_layers,
    "uneven_distances": uneven_distances,
}


def fill(engine):
    generator = torch.Generator().manual_seed(1)
    for backing in engine.backings:
        backing.copy_(torch.randint(1, 100, backing.shape, generator=generator))


def as_bytes(values):
    return bytes(values.cpu().contiguous().view(torch.uint8).numpy())
