"""One server for the data-parallel ranks that an engine has on this host, or for the part that an
engine over several hosts has on it.

``kvtier launch`` starts it and becomes the engine, or its parent. A supervisor (this file) stays
beside the engine: it starts the server again when it dies, and ends it when the engine ends. The
kernel tells it when that is, however the engine ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cli.vllm_command import given
from kvtier.core import processes
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment

if TYPE_CHECKING:
    from kvtier.config.keys import ServerSection

_AGAIN_S = 1.0
_START_S = 120.0
_POLL_S = 0.02
_SIZE = ("--data-parallel-size", "-dp")
_LOCAL = ("--data-parallel-size-local", "-dpl")
_BACKEND = ("--data-parallel-backend", "-dpb")
_ONE_OF_SEVERAL = ("--data-parallel-rank", "-dpn")
"""Flags of a single rank, whose others are engines of their own."""


def local_ranks(arguments: Sequence[str]) -> int:
    ray = str(given(arguments, _BACKEND)) == "ray"  # it chooses the hosts
    if ray or given(arguments, _ONE_OF_SEVERAL) is not None:
        return 1
    count = given(arguments, _LOCAL) or given(arguments, _SIZE)
    return int(str(count)) if str(count).isdecimal() else 1


def start(env: Mapping[str, str]) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server and its supervisor, which end with this process. Returns its address when
    engines can connect, and the supervisor. Raises ConfigError when the server does not start."""
    address = new_address()
    return address, start_at([address], env, temporary=True)


def new_address() -> str:
    """Return the address of a socket in a new folder."""
    folder = tempfile.mkdtemp(prefix="kvtier-ranks-")
    return f"unix://{folder}/kvtier.sock"


def start_at(
    listen: Sequence[str], env: Mapping[str, str], *, temporary: bool = False
) -> subprocess.Popen[bytes]:
    """Do :func:`start` at these addresses, first a socket, maybe in a ``temporary`` folder."""
    path = listen[0].removeprefix("unix://")
    folder = str(Path(path).parent) if temporary else ""
    supervisor = processes.start(
        processes.python(sys.executable, "-m", __name__, str(os.getpid()), folder, *listen),
        env,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),  # what an engine prints is its own
        start_new_session=True,  # ^C is for the engine, which may still save then
    )
    deadline = time.monotonic() + _START_S
    while not answers(path):
        if supervisor.poll() is not None or time.monotonic() > deadline:
            supervisor.terminate()
            raise ConfigError(
                "the server that kvtier launch starts for this host did not start: its own words "
                "are above. KVTIER_SERVER=unix:///path names one that you start yourself"
            )
        time.sleep(_POLL_S)
    return supervisor


def answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


# ---- the supervisor ------------------------------------------------------------------------------


def supervise(engine: int, folder: str, listen: Sequence[str]) -> int:
    """Keep a server at these addresses until the process ``engine`` ends, then remove ``folder``.
    Returns 1 when the first one ends before it listens."""
    path = Path(listen[0].removeprefix("unix://"))
    waited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    processes.end_with_parent(signal.SIGTERM)
    server = _server(listen)
    try:
        while os.getppid() == engine:
            got = signal.sigwait(waited)
            if got == signal.SIGTERM:
                break
            if server.poll() is None:
                continue
            if not path.exists():  # it never listened: to try again would not mend it
                return 1
            print(
                f"kvtier: this host's server ended with {server.returncode}: it is started again",
                file=sys.stderr,
                flush=True,
            )
            if signal.sigtimedwait({signal.SIGTERM}, _AGAIN_S) is not None:
                break
            server = _server(listen)
    finally:
        server.terminate()
        server.wait()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _server(listen: Sequence[str]) -> subprocess.Popen[bytes]:
    command = processes.python(sys.executable, "-m", "kvtier", "serve")
    command += [word for address in listen for word in ("--listen", address)]
    return processes.start(command, environment(), preexec_fn=_begin_server)


def _begin_server() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    processes.end_with_parent(signal.SIGTERM)


_NODES = ("--nnodes", "-n")
_RANK = ("--node-rank", "-r")


def nodes(arguments: Sequence[str]) -> tuple[int, int]:
    count, rank = (_number(arguments, names) for names in (_NODES, _RANK))
    return max(1, count), rank


def _number(arguments: Sequence[str], names: Sequence[str]) -> int:
    found = str(given(arguments, names))
    return int(found) if found.isdecimal() else 0


def listens_at(arguments: Sequence[str], server: ServerSection) -> list[str]:
    """Return the addresses of this node's server: its socket, and where the first node asks it.
    Empty if the hosts have not a server each. Raises ConfigError if this node has none."""
    (count, rank), servers = nodes(arguments), server.addresses
    if count == 1 or len(servers) < 2:
        return []
    if rank >= len(servers):
        raise ConfigError(
            f"--node-rank {rank}: server_address names {len(servers)} servers ({server.address}), "
            "expected one for each node, in the order of --node-rank"
        )
    return [servers[0], *servers[rank:][:1]] if rank else [servers[0]]


def start_here(listen: Sequence[str], env: Mapping[str, str]) -> str:
    """Start this node's server, which ends with this process, unless one answers at its socket.
    Returns a log line. Raises ConfigError when it does not start."""
    if answers(listen[0].removeprefix("unix://")):
        return f"this host's server at {listen[0]} runs already"
    start_at(listen, env)
    return f"this host's server is started at {' and '.join(listen)}"


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
