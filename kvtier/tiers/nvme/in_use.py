"""Wait for a folder that another process still has, said at once.

An engine or server that was killed may live on for some seconds while it ends. The next one finds
its chunks warm if it waits for that."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvtier.core.errors import TierError
from kvtier.tiers.nvme.files import lock
from kvtier.tiers.nvme.folder import INDEX_NAME, TierFolder, asked

logger = logging.getLogger("kvtier")

_MOST_S = 30.0
"""Longest wait. A killed engine ends within seconds, or never."""
_POLL_S = 0.1


def holder(folder: Path) -> str:
    """Return the process that has this tier open. Empty if none, not this user's, or silent."""
    return asked(folder, lambda: _holder(folder), "")


def _holder(folder: Path) -> str:
    with (
        suppress(OSError, TierError),
        TierFolder(folder) as files,
        files.opened(INDEX_NAME, os.O_RDONLY) as index,
    ):
        return lock(index)
    return ""


def wait_until_free(folders: Iterable[Path], most_s: float = _MOST_S) -> None:
    """Log who has a folder, and wait for its end. Raises TierError after ``most_s`` seconds."""
    until = time.monotonic() + most_s
    for folder in folders:
        told = ""
        while who := holder(folder):
            if who != told:
                logger.warning(
                    "NVMe tier %s: in use by %s. An engine that was killed needs some seconds to "
                    "end: waiting for it, at most %.0f s",
                    folder,
                    who,
                    most_s,
                )
                told = who
            if time.monotonic() >= until:
                raise TierError(
                    f"NVMe tier {folder}: still in use by {who} after {most_s:.0f} s; end it (an "
                    "engine's own processes go on when the one that started them was killed), or "
                    "give this one a folder of its own in nvme_path"
                )
            time.sleep(_POLL_S)
