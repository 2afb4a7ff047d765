"""Starts, restarts and always stops vLLM's OpenAI server. It is a process group on a free loopback
port."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvtier.core import processes
from kvtier.core.errors import KVTierError
from kvtier.core.processes import environment

_HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)
_CLAIMS = 200
_claims: deque[int] = deque()
"""Descriptors, of :func:`free_port`."""
# Not the `vllm` command: that of the CPU wheel looks for a distribution called "vllm" and ends.
_SERVER = "vllm.entrypoints.openai.api_server"
_POLL_SECONDS = 0.1
_STOP_SECONDS = 20.0
_PORT_ATTEMPTS = 3
_LOG_LINES = 30
_LOG_BYTES = 256 * 1024
_CAUSES = 4
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .+")


class ServerError(KVTierError):
    """A server did not come up, or it died. The message has the end of its log."""


class VllmServer:
    """One OpenAI server of vLLM. Use as a context manager. It has one owner and is not thread-safe.

    Args:
        model: directory or name.
        args: what would follow ``vllm serve MODEL``, without host and port.
        env: variables that are added to this process's environment.
        log: the file of the server's output. A restart adds to it.
        deadline_s: seconds until ``/health`` must answer.
        interpreter: another environment's Python. The default is this one's.

    Raises ServerError from :meth:`start`, :meth:`restart` and on entering.
    """

    def __init__(
        self,
        model: str,
        args: Sequence[str],
        env: Mapping[str, str],
        log: str | Path,
        deadline_s: float = 300.0,
        interpreter: str = sys.executable,
    ) -> None:
        self.log = Path(log)
        self.port = 0
        self._command = [interpreter, "-m", _SERVER, "--model", model, "--host", _HOST, *args]
        self._env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | dict(env)
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The id of the group's first process. None while none runs."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> VllmServer:
        self.log.unlink(missing_ok=True)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until it is healthy. Another port is tried when another process took
        the first one in between."""
        if self._process is not None:
            raise ServerError("the server is running already; stop it first")
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self.port = free_port()
            begun_at = self.log.stat().st_size if self.log.exists() else 0
            try:
                self._spawn()
                self._wait_healthy()
                return
            except ServerError:
                self.stop()
                if attempt == _PORT_ATTEMPTS or "address already in use" not in self._log_since(
                    begun_at
                ):
                    raise
            except BaseException:
                self.stop()
                raise

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        """Send SIGTERM to the group, and SIGKILL to what is left of it after 20 s. It may be called
        twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + _STOP_SECONDS
        try:
            while time.monotonic() < until and (process.poll() is None or group_lives(process.pid)):
                time.sleep(_POLL_SECONDS)
        finally:  # a signal may end the wait
            _kill_group(process)

    def kill(self) -> None:
        """Send SIGKILL to the whole group at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)

    def log_tail(self) -> str:
        """The last lines of the server's log, and before them its first errors, because the cause
        is often far above."""
        text = self._log_since(0)
        causes = list(dict.fromkeys(_ERROR.findall(text)))[:_CAUSES]
        end = text.splitlines()[-_LOG_LINES:]
        return "\n".join((["its first errors:", *causes, "its end:"] if causes else []) + end)

    def _spawn(self) -> None:
        settings = [f"{name}={value}" for name, value in self._env.items()]
        command = [*self._command, "--port", str(self.port)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            out.write(f"$ {shlex.join(['env', *settings, *command])}\n".encode())
            out.flush()
            with unhandled_signals():
                self._process = processes.start(
                    command,
                    environment(**self._env),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def _wait_healthy(self) -> None:
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until:
            status = self._process.poll() if self._process is not None else None
            if status is not None:
                raise self._failure(f"ended with status {status} before it was healthy")
            if answers(f"{self.base_url}/health"):
                return
            time.sleep(_POLL_SECONDS)
        raise self._failure(f"was not healthy within {self._deadline_s:.0f} s")

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"the vLLM server {what}. From its log, {self.log}:\n{self.log_tail()}")

    def _log_since(self, offset: int) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(offset, self.log.stat().st_size - _LOG_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""


def free_port() -> int:
    """A loopback port on which no process listens now, and that no other caller gets until this
    process has asked for 200 others, or ends. Linux gives connections ports above these, and an
    abstract Unix socket with the port in its name tells other callers of this function."""
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtier port {port}")
            with socket.socket() as probe:
                probe.bind((_HOST, port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim.detach())
        if len(_claims) > _CLAIMS:
            os.close(_claims.popleft())
        return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free")


@contextlib.contextmanager
def unhandled_signals() -> Iterator[None]:
    """Signals that end a benchmark are handled after the block: none comes between the start of a
    process and the moment from which somebody stops it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in ending}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in caught:
            signal.raise_signal(each)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def running() -> Iterator[tuple[int, str, int, int]]:
    """Number, state, parent and group of each process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group, *_ = stat.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # it ended while we looked
        yield int(stat.parent.name), state, int(parent), int(group)


def group_lives(group: int) -> bool:
    """Whether a process of the group still runs. A zombie does not count."""
    return any(own == group and state != "Z" for _, state, _, own in running())
