"""What staged copies need of a device: streams, which run their work in order, and events, which
mark a place in a stream.

The names are torch's own, and :class:`CudaStreams` is little more than ``torch.cuda``. The copies
use only the protocols. So tests can run them on CPU tensors, with streams that delay work and run
it in any order that a device may choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_MOST_STAGING, _STAGING_PART = 512 << 20, 8


class Event(Protocol):
    """A place in a stream. CUDA's errors are sticky: after the first one every call raises, also
    the engine's own."""

    def query(self) -> bool:
        """Whether all work before it has run. It never blocks. Raises RuntimeError when some of
        the work failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until :meth:`query` is true."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one. Both must have happened, and both must have
        been recorded with ``timing``."""
        ...


class Stream(Protocol):
    def wait_event(self, event: Any) -> None:
        """Work queued from now on runs after ``event``. The host does not wait."""
        ...


class Streams(Protocol):
    """One device's streams."""

    @property
    def room(self) -> int:
        """Bytes of device memory that staging memory may take. It is a hard limit."""
        ...

    @property
    def free(self) -> int:
        """Bytes of device memory that nobody has taken."""
        ...

    def current(self) -> Any:
        """The stream on which the engine queues work now."""
        ...

    def side(self) -> Any:
        """A new stream."""
        ...

    def do(self, stream: Any, work: Callable[[], object]) -> None:
        """Queue ``work`` on ``stream``."""
        ...

    def record(self, stream: Any, *, timing: bool = False) -> Event:
        """An event after the work that is queued on ``stream`` now."""
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """``size`` bytes of host memory, from and to which the device copies without the host's
        help."""
        ...


class CudaStreams:
    """:class:`Streams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def room(self) -> int:
        """An eighth of the memory that the engine left free for its own peaks, and at most 512 MiB.
        It is a multiple of 2 MiB, the unit in which torch gets memory from the driver."""
        return min(_MOST_STAGING, self.free // _STAGING_PART) >> 21 << 21

    @property
    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def side(self) -> Any:
        return torch.cuda.Stream(self._device)

    def do(self, stream: Any, work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: Any, *, timing: bool = False) -> Event:
        event: Event = stream.record_event(torch.cuda.Event(enable_timing=timing))
        return event

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
