"""vLLM's OpenAI server as the tests lead it: ``python -m tests.integration.mode_server``, with the server's arguments.

The engine's processes import this file, and are patched then: while the file ``shut`` lies in the folder
``TEST_FOLDER``, a load is not through, and each that begins adds a byte to ``loads``. Each step that a data-parallel
rank takes only because another one works adds a byte to ``dummies``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def _folder() -> Path:
    return Path(os.environ["TEST_FOLDER"])


def _note(name: str) -> None:
    with (_folder() / name).open("a") as file:
        file.write(".")


def gate() -> None:
    """Loads are told to be through as a device's are: later. Those of a CPU are over when their call returns."""
    from kvtier.gpu import Copy, PagedBlocks

    class Gated(Copy):
        def done(self) -> bool:
            return not (_folder() / "shut").exists()

    load = PagedBlocks.load

    def gated(self: PagedBlocks, jobs: Any) -> Copy:
        load(self, jobs)
        _note("loads")
        return Gated(jobs)

    PagedBlocks.load = gated  # type: ignore[method-assign]
    PagedBlocks.copies_at_once = property(lambda _: False)  # type: ignore[assignment, method-assign]


def note_dummies() -> None:
    from vllm.v1.engine.core import EngineCore

    dummy = EngineCore.execute_dummy_batch

    def noted(self: Any) -> None:
        _note("dummies")
        dummy(self)

    EngineCore.execute_dummy_batch = noted


if __name__ == "__mp_main__":
    gate()
    note_dummies()
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
