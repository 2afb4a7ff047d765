"""A bound on log lines that strangers cause."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable


class LogLimit(logging.Filter):
    """Lets at most ``lines`` records pass in ``seconds``, and no tracebacks of them. Any thread may
    use it.

    The first record after an omission says how many records were left out.
    """

    def __init__(
        self, lines: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, clock
        self._passed: deque[float] = deque(maxlen=lines)
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if len(self._passed) == self._passed.maxlen and now - self._passed[0] < self._seconds:
            self._left_out += 1
            return False
        self._passed.append(now)
        cause = record.exc_info[1] if record.exc_info else None
        said = f"{record.getMessage()}{f': {cause!r}' if cause is not None else ''}"
        more = f" ({self._left_out} more such lines were left out)" if self._left_out else ""
        record.msg, record.args = f"{said[:300]!s}{more}", ()
        record.exc_info = record.exc_text = None
        self._left_out = 0
        return True
