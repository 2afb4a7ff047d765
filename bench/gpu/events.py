"""Work of a device, as torch's profiler saw it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class DeviceWork(NamedTuple):
    kernels: int | None
    copies: int | None


def device_work(work: Callable[[], object], device: torch.device) -> DeviceWork:
    """Kernels and copies that the device ran for ``work``, which waits for them. A CPU has none."""
    if device.type != "cuda":
        work()
        return DeviceWork(0, 0)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.cuda.synchronize(device)
    return count(
        [event.name for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    )


def count(names: list[str]) -> DeviceWork:
    """From the names that CUPTI gives. Those of copies begin like ``Memcpy HtoD (...)``."""
    if not names:
        return DeviceWork(None, None)
    copies = sum(name.startswith("Memcpy") for name in names)
    others = sum(
        name.startswith(("Memset", "Stream Wait", "Event", "Context Sync")) for name in names
    )
    return DeviceWork(len(names) - copies - others, copies)
