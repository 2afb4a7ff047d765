"""A redis-server of a benchmark's own, and what ``redis-benchmark`` reaches on it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.servers import free_port
from kvtier.core import processes
from kvtier.core.processes import environment

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
