"""``kvtier`` whose disk is slow: ``python -m tests.slow_disk serve``. So slow that chunks of the
tests' size come one after the other, as large ones do."""

from __future__ import annotations

import sys
import time

from kvtier.cli.main import main
from kvtier.core.chunk import ChunkKey
from kvtier.tiers.nvme.tier import NvmeTier

READ_S = 0.003


def slow_down() -> None:
    """All reads of this process from now on."""
    read = NvmeTier.read

    def slow(self: NvmeTier, key: ChunkKey, into: memoryview) -> bool:
        time.sleep(READ_S)
        return read(self, key, into)

    NvmeTier.read = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    sys.exit(main())
