"""A cache that outlives engines, beside an arm's servers: ``kvtier serve`` or ``redis-server``, on a Unix socket."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.bench.servers import ServerError
from kvtier.errors import ConfigError

SOCKET = "sock"
"""Where in its folder a companion listens."""
_START_S, _STOP_S, _POLL_S = 20.0, 20.0, 0.02


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder with a short path: a Unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        yield Path(folder)


@contextmanager
def companion(command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> Iterator[None]:
    """Run ``command`` until the end of the block; begun once it accepts connections at ``folder``/:data:`SOCKET`.

    Raises ConfigError when the program is not installed, ServerError with the log's end when it does not come up.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed (Debian, Ubuntu: apt-get install {command[0]})")
    settings = [f"{name}={value}" for name, value in env.items()]
    with log.open("wb") as out:
        process = subprocess.Popen(["env", *settings, *command], stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_listening(process, folder / SOCKET, log)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        process.kill()
        process.wait()


def _wait_listening(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    until = time.monotonic() + _START_S
    while not _listens(path):
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise ServerError(f"{process.args!r} did not listen at {path}. Its log:\n{said}")
        time.sleep(_POLL_S)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
