"""Processes forked from one that has imported kvtier. A start takes a hundredth of a second. A
Python of its own takes a second."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable

from tests.child_process import DEADLINE_S

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "kvtier.cli.serve",
        "kvtier.admin.http",
        "kvtier.admin.places",
        "aiofiles.os",
        "kvtier.tiers.nvme.chunk_folder",
        "kvtier.tiers.redis.tier",
        "kvtier.cli.operate",
        "tests.trust.victims",
    ]
)


class Forked:
    """The part of ``subprocess.Popen`` that :class:`tests.child_process.ChildProcess` uses, for a
    function."""

    def __init__(self, target, *arguments):
        self._process = FORK.Process(target=target, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


Change = Callable[[], None]
READ_S = 0.003
"""Of a slow disk: chunks of the tests' size come one after the other, as large ones do."""


def serve(environment, words, log, changes):
    """``kvtier`` with these words, which prints into ``log``, after these ``changes`` to it."""
    from kvtier.cli.main import main

    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    for change in changes:
        change()
    sys.exit(main(words))


def be_patient():
    """Bounds in time that no busy host reaches, for tests that are about something else: of clients
    that say nothing, and of calls of Redis and of an object store."""
    from kvtier.admin import http, places
    from kvtier.extensions.objects import bucket
    from kvtier.server import connection, strangers
    from kvtier.tiers.redis.servers import RedisServers

    bucket._BEGIN_S, bucket._ANSWER_S = DEADLINE_S, int(DEADLINE_S)
    connection._GREETING_S = strangers._HANDSHAKE_S = 100 * DEADLINE_S
    places.FIRST_REQUEST_S = http._IDLE_S = 100 * DEADLINE_S
    bounds = RedisServers.__init__.__kwdefaults__
    assert bounds is not None and "timeout_s" in bounds
    bounds["timeout_s"] = DEADLINE_S


def slow_down():
    from kvtier.tiers.nvme.chunk_folder import ChunkFolder

    read = ChunkFolder.read

    def slow(self, key, into):
        time.sleep(READ_S)
        return read(self, key, into)

    ChunkFolder.read = slow  # type: ignore[method-assign]
