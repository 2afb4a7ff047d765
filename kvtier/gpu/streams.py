"""Device of staged copies: streams, which run their work in order, and events, which
mark a place in a stream.

:class:`CudaStreams` is little more than ``torch.cuda``, and what it hands out are torch's own
objects. The copies use only what is named here. So tests can run them on CPU tensors, with streams
that delay work and run it in any order that a device may choose: of a stream
``wait_event(event)``, and of an event ``query()``, ``synchronize()`` and ``elapsed_time(later)`` in
milliseconds.

CUDA's errors are sticky: after the first one every call of an event raises RuntimeError, also the
engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MOST_STAGING_BYTES, _STAGING_PART = 512 << 20, 8


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def room(self) -> int:
        """Bytes of device memory that staging memory may take, a hard limit: an eighth of the
        memory that the engine left free for its own peaks, and at most 512 MiB. A multiple of 2
        MiB, the unit in which torch gets memory from the driver."""
        return min(_MOST_STAGING_BYTES, self.free // _STAGING_PART) >> 21 << 21

    @property
    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def side(self) -> Any:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restore the current stream after calls of :meth:`do`. In inference mode: an engine may
        have made its tensors in that mode, and such tensors change only in it."""
        with torch.inference_mode(), torch.cuda.stream(self.current()):
            yield

    def do(self, stream: Any, work: Callable[[], object]) -> None:
        torch.cuda.set_stream(stream)
        work()

    def record(self, stream: Any, *, timing: bool = False) -> Any:
        return stream.record_event(torch.cuda.Event(enable_timing=timing))

    def host_buffer(self, size: int) -> torch.Tensor:
        """Allocate page-locked memory, so that the device copies without the host's help."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
