"""What staged copies ask of a device: streams that run their work in order, and events that mark a
place in one.

The names are torch's own, and :class:`CudaStreams` is little more than ``torch.cuda``. Copies are
written against the protocols, so that tests can run them on CPU tensors with streams which hold
work back and let it go in any order that a device may choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_MOST_STAGING, _STAGING_PART = 512 << 20, 8


class Event(Protocol):
    """A place in a stream. CUDA's errors are sticky: once one happened every call raises, also the
    engine's own."""

    def query(self) -> bool:
        """Whether all before it has run; never blocks. Raises RuntimeError when some of it
        failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until :meth:`query`."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this to a later event, when both have happened and were recorded with
        ``timing``."""
        ...


class Stream(Protocol):
    def wait_event(self, event: Any) -> None:
        """What is queued from now on runs after ``event``. The host does not wait."""
        ...


class Streams(Protocol):
    """One device's streams."""

    @property
    def room(self) -> int:
        """Bytes of device memory that staging memory may take: a hard limit."""
        ...

    @property
    def free(self) -> int:
        """Bytes of device memory that nobody has taken."""
        ...

    def current(self) -> Any:
        """The stream the engine queues on now."""
        ...

    def side(self) -> Any:
        """A new stream."""
        ...

    def do(self, stream: Any, work: Callable[[], object]) -> None:
        """Queue ``work`` on ``stream``."""
        ...

    def record(self, stream: Any, *, timing: bool = False) -> Event:
        """The place behind what is queued on ``stream`` now."""
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """``size`` bytes of host memory that the device copies to and from without the host's
        help."""
        ...


class CudaStreams:
    """:class:`Streams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def room(self) -> int:
        """Out of what the engine left free for its own peaks: an eighth of that, and 512 MiB at
        most. Whole 2 MiB, as torch takes them from the driver."""
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
