"""How fast something goes, in a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable


def rate(step: Callable[[int], int], seconds: float, most: int) -> float:
    """Bytes a second of ``step(i)``. It is called at least once, and at most for ``most`` steps or
    ``seconds``."""
    done, begun, last = 0, time.perf_counter(), 0.0
    for index in range(most):
        done += step(index)
        last = time.perf_counter() - begun
        if last > seconds:
            break
    return done / max(last, 1e-9)
