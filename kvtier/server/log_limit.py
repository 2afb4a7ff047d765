"""A bound on log lines that strangers cause."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

_AGAIN_S = 600.0
_KEPT_TEXTS = 64


class LogLimit(logging.Filter):
    """Passes at most ``lines`` records in ``seconds``, each cut to ``letters`` and without a
    traceback, and of equal ones one in ``again_s``. A record after an omission says how many were
    left out. Any thread."""

    def __init__(
        self,
        lines: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        letters: int = 300,
        again_s: float = _AGAIN_S,
    ) -> None:
        super().__init__()
        self._seconds, self._clock, self._letters = seconds, clock, letters
        self._again_s = again_s
        self._passed: deque[float] = deque(maxlen=lines)
        self._passed_at: dict[str, float] = {}
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        cause = record.exc_info[1] if record.exc_info else None
        said = f"{record.getMessage()}{f': {cause!r}' if cause is not None else ''}"[
            : self._letters
        ]
        is_many = len(self._passed) == self._passed.maxlen and now - self._passed[0] < self._seconds
        before = self._passed_at.get(said)
        if is_many or (before is not None and now - before < self._again_s):
            self._left_out += 1
            return False
        self._passed.append(now)
        self._passed_at.pop(said, None)
        self._passed_at[said] = now
        if len(self._passed_at) > _KEPT_TEXTS:
            del self._passed_at[next(iter(self._passed_at))]
        more = f" ({self._left_out} more such lines were left out)" if self._left_out else ""
        record.msg, record.args = f"{said}{more}", ()
        record.exc_info = record.exc_text = None
        self._left_out = 0
        return True
