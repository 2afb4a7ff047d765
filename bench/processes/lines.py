"""A process that answers each line on its standard input with a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.core import processes

REST_S = 1.2
"""The pause before a question to an engine. A worker of vLLM spins on its core for a second after
its last step, which would slow the engine that is asked next."""
_MARK = "@ "


def tell(what: object) -> None:
    """In the process: an answer. What else it prints is no answer."""
    print(_MARK + json.dumps(what), flush=True)


class LineProcess:
    """The other end. It has one owner, and is a process group of its own.

    Args:
        command: its words.
        environment: all of it.
        log: the file of what it prints, which is shown when it fails.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("a") as errors:
            self._process: subprocess.Popen[str] = processes.start(
                command,
                environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> Any:
        """The next answer. The whole program ends when there is none."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            with self._log.open("a") as log:
                log.write(line)
        sys.exit(f"{self._log.stem} failed:\n{self._log.read_text()[-3000:]}")

    def say(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        """Send SIGKILL to the whole group, because vLLM's processes outlive the one that began
        them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
