"""Paged KV blocks <-> slots, on the engine's device (CPU tensors too). The only core package that
imports torch.

A *region* is one KV tensor of the engine seen as rows: ``[num_blocks, row_bytes]`` uint8, one row a
block. A rank's part of a slot holds one chunk, region-major::

    [region][block in chunk][row_bytes]

so a chunk's bytes do not depend on which blocks it lay in. Regions at one distance from each other
(the layers of vLLM's one backing allocation) are merged into ``[regions, num_blocks, row_bytes]``,
to be moved by one strided copy.

Rules for the caller:

- *Saves*: until :meth:`Copy.done` is true (or :meth:`Copy.wait` returned) nobody may read the slot.
  The blocks may be overwritten at once by work queued on the current stream, which waits for the
  gathers.
- *Loads*: until then, nobody may write to the slot, and nothing of the engine may use the blocks.
  They begin when what was queued on the current stream before :meth:`PagedBlocks.load` is through.
- Work of other streams has to wait for the copy. One thread a :class:`PagedBlocks`: the worker's
  own.
- What the host can see to be wrong (a job, a slot, a call the driver refuses) raises before
  :meth:`PagedBlocks.save` or ``load`` returns, and nothing of the call is under way then. What
  fails later on a CUDA device fails the device: its errors are sticky, so no later step of the
  engine gives a result either, right or wrong.

``regions`` finds the rows, ``blocks`` is the surface, ``host`` copies on a CPU device (done when
the call returns). ``staged`` copies on CUDA over ``streams``, through the memory of ``staging``,
and ``rows`` move between that and the blocks: by ``kernel``, Triton's, which is imported there
only. ``pinning`` page-locks slots. ``tests/unit`` runs all but ``CudaStreams`` on CPU tensors;
``tests/gpu`` runs the same tests where there is a CUDA device.
"""

from kvtier.gpu.blocks import PagedBlocks, nothing
from kvtier.gpu.pinning import Pinning
from kvtier.gpu.regions import Region, regions_of
from kvtier.gpu.slots import Copies, Copy, Job, slot_tensor

__all__ = [
    "Copies",
    "Copy",
    "Job",
    "PagedBlocks",
    "Pinning",
    "Region",
    "nothing",
    "regions_of",
    "slot_tensor",
]
