"""A process beside an arm's servers: ``kvtier serve``, ``redis-server``, or a peer's own server. It
runs longer than they do."""

from __future__ import annotations

import contextlib
import csv
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvtier.bench.processes.servers import ServerError, free_port, unhandled_signals
from kvtier.core import processes
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment

SOCKET = "sock"
_STOP_S, _POLL_S = 20.0, 0.02


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder with a short path, because the path of a Unix socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        yield Path(folder)


@contextmanager
def companion(
    command: Sequence[str],
    env: Mapping[str, str],
    ready: Callable[[], bool],
    log: Path,
    start_s: float = 20.0,
) -> Iterator[int]:
    """Run ``command`` until the end of the block, which begins when ``ready()`` holds. Its process
    id.

    Raises ConfigError when the program is not installed, and ServerError with the end of the log
    when it is not ready in time.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not installed (Debian, Ubuntu: apt-get install {command[0]})"
        )
    around = environment()
    if command[0] != sys.executable:  # no kvtier
        around = processes.without_settings(around)
    with ExitStack() as ends:
        with log.open("wb") as out, unhandled_signals():
            process = processes.start(
                command, around | dict(env), stdout=out, stderr=subprocess.STDOUT
            )
            ends.callback(_stop, process)
        _wait_ready(process, ready, log, start_s)
        yield process.pid


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:  # a signal may end the wait
        process.kill()
        process.wait()


def _wait_ready(
    process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path, start_s: float
) -> None:
    until = time.monotonic() + start_s
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise ServerError(
                f"{process.args!r} was not ready within {start_s:.0f} s. Its log:\n{said}"
            )
        time.sleep(_POLL_S)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


RUN_BYTES = 1_000_000_000
_LIMIT_S = 30.0


@contextmanager
def redis_server(env: Mapping[str, str] | None = None) -> Iterator[tuple[str, str, int]]:
    """A redis-server without persistence: its port, the path of its Unix socket, its process id."""
    port = str(free_port())
    with run_folder() as run:
        path = run / SOCKET
        command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--unixsocket", str(path)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(run)]
        with companion(command, env or {}, partial(listens, path), run / "log") as pid:
            yield port, str(path), pid


def redis_benchmark(
    where: Sequence[str], test: str, value_bytes: int, names: int, connections: int
) -> float:
    """GB/s of its ``test`` (GET or SET) with values of this size, over so many names. Raises
    SubprocessError when it fails or takes more than half a minute."""
    command = ["redis-benchmark", *where, "-t", test.lower(), "-d", value_bytes, "-c", connections]
    command += ["-n", RUN_BYTES // value_bytes, "-r", names, "--csv"]
    words = [str(word) for word in command]
    env = processes.chosen(environment())
    told = processes.run(words, env, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    (row,) = csv.DictReader(told.stdout.splitlines())
    return float(row["rps"]) * value_bytes / 1e9
