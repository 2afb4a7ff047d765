"""What reading a configuration has to say besides its values: collected, and logged once by who has
set up logging."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Remark(NamedTuple):
    """``level`` as in logging: a warning is for what was asked for in vain."""

    level: int
    text: str


def tell(remarks: Iterable[Remark]) -> None:
    """Log them. Of several processes that read the same configuration, in one."""
    for level, text in remarks:
        logger.log(level, "%s", text)
