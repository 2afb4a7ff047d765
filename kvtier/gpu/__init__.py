"""Copies between paged KV blocks and slots, on the engine's device (CPU tensors too). No other core
package imports torch.

A *region* is one KV tensor of the engine seen as rows: ``[num_blocks, row_bytes]`` uint8, with one
row for each block. A rank's part of a slot holds one chunk, region-major::

    [region][block in chunk][row_bytes]

So a chunk's bytes do not depend on the blocks in which it lay. Regions at equal distances from each
other (the layers of vLLM's one backing allocation) are merged into
``[regions, num_blocks, row_bytes]``, so that one strided copy moves them.

Rules for the caller:

- *Saves*: until :meth:`Copy.done` is true (or :meth:`Copy.wait` has returned) no thread may read
  the slot. Work queued on the current stream may overwrite the blocks at once, because it waits
  for the gathers.
- *Loads*: until then the slot must not be written, and the engine must not use the blocks.
  A load begins when the work that was queued on the current stream before
  :meth:`PagedBlocks.load` has run.
- Work on other streams has to wait for the copy. Only one thread uses a :class:`PagedBlocks`: the
  worker's own.
- What the host can see to be wrong (a job, a slot, a call that the driver refuses) raises before
  :meth:`PagedBlocks.save` or ``load`` returns, and then nothing of the call is running. What fails
  later on a CUDA device fails the device: its errors are sticky, so no later step of the engine
  gives a result either, right or wrong.

``regions`` finds the rows. ``blocks`` is the interface, and copies on a CPU device, where a
copy is done when the call returns. ``staged`` copies on CUDA over the streams, and through the
memory, of ``staging``. ``rows`` moves rows between that memory and the blocks. On CUDA it uses
``kernel``, the only file that imports Triton. ``pinning`` page-locks slots. ``tests/unit`` runs all
of it except ``CudaStreams`` on CPU tensors. ``tests/gpu`` runs the same tests where there is a CUDA
device.
"""

from kvtier.gpu.blocks import PagedBlocks, nothing
from kvtier.gpu.pinning import Pinning
from kvtier.gpu.regions import Copy, Job, Region, regions_of, slot_tensor

__all__ = [
    "Copy",
    "Job",
    "PagedBlocks",
    "Pinning",
    "Region",
    "nothing",
    "regions_of",
    "slot_tensor",
]
