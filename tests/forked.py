"""Processes forked from one that has imported kvtier. A start takes a hundredth of a second. A
Python of its own takes a second."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "kvtier.cli.serve",
        "kvtier.admin.http",
        "kvtier.admin.port",
        "kvtier.server.recording",
        "kvtier.tiers.nvme.tier",
        "kvtier.tiers.redis.tier",
        "kvtier.cli.check",
        "tests.trust.victims",
    ]
)


class Forked:
    """The part of ``subprocess.Popen`` that :class:`tests.child_process.ChildProcess` uses, for a
    function."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = FORK.Process(target=target, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


def serve(environment: Mapping[str, str], words: Sequence[str], log: str, patient: bool) -> None:
    """``kvtier`` with these words, which prints into ``log``. ``patient``: see
    :mod:`tests.patient_server`."""
    from kvtier.cli.main import main

    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    if patient:
        from tests.patient_server import be_patient

        be_patient()
    sys.exit(main(words))
