"""Processes to be killed, forked from one that has imported everything: a start takes a hundredth
of a second.

They are the product's own (``kvtier serve`` through its command line, engines with a Client or with
a Store of their own under the load of :mod:`tests.engine_process`), with real files and sockets,
each with a process id of its own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.child_process import DEADLINE_S
from tests.engine_process import churn, client_at
from tests.server_process import LAYOUT, ServerProcess

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        "kvtier.cli.serve",
        "kvtier.tiers.nvme.tier",
        "kvtier.tiers.redis.tier",
        "kvtier.cli.check",
        __name__,
    ]
)


class Forked:
    """The part of ``subprocess.Popen`` that :class:`ServerProcess` uses, for a forked function."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = _FORK.Process(target=target, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


class ForkedServer(ServerProcess):
    """``kvtier serve``, forked."""

    def _spawn(self) -> Any:
        return Forked(_serve, self._env, self._command[3:], str(self.log))


class Engine:
    """An engine under load, and what it says: see :mod:`tests.engine_process`.

    ``place``: the socket of a server, or the configuration of a store of its own.
    """

    def __init__(self, place: Path | Mapping[str, object], seed: int) -> None:
        self._ear, mouth = _FORK.Pipe(duplex=False)
        self._process = Forked(_engine, place, seed, mouth)
        mouth.close()
        self.pid = self._process.pid

    def hear(self, count: int = 1) -> bytes:
        """The next letters, at least ``count``. AssertionError when it says nothing or has died by
        itself."""
        heard = b""
        while len(heard) < count:
            ready, _, _ = select.select([self._ear], [], [], DEADLINE_S)
            assert ready, "an engine hangs"
            more = os.read(self._ear.fileno(), max(1, count - len(heard)))
            assert more, f"an engine ended with status {self._process.wait(DEADLINE_S)}"
            heard += more
        return heard

    def hear_until(self, letter: bytes) -> None:
        """Read on until it says ``letter``. What it said before this call does not count."""
        while select.select([self._ear], [], [], 0)[0]:
            self.hear()
        while self.hear() != letter:
            pass

    def kill(self) -> None:
        """Send SIGKILL. AssertionError when it had ended by itself."""
        ended = self._process.poll()
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._ear.close()
        assert ended is None, f"an engine ended with status {ended}"


def _serve(environment: Mapping[str, str], words: list[str], log: str) -> None:
    from kvtier.cli.main import main

    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(words))


def _engine(place: Path | Mapping[str, Any], seed: int, mouth: Connection) -> None:
    os.dup2(mouth.fileno(), 1)
    logging.getLogger("kvtier").setLevel(
        logging.CRITICAL + 1
    )  # that it loses its server is why it is here
    if isinstance(place, Path):
        churn(client_at(str(place)), seed)
        return
    from kvtier.assemble import assemble
    from kvtier.config.keys import Config

    churn(assemble(Config(**place), LAYOUT), seed)
