"""A real kvtier server for tests, and what an engine does with it."""

import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from kvtier.bench.processes.companion import listens
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.testing import content
from tests.child_process import DEADLINE_S, ChildProcess, wait_for
from tests.command import ROOT, bare
from tests.forked import Forked, be_patient, serve, slow_down

SLOT = 8192
LAYOUT = ChunkLayout(fingerprint({"model": "a"}), 1, 1, (SLOT,))
OTHER = ChunkLayout(fingerprint({"model": "b"}), 1, 1, (SLOT,))


class ServerProcess(ChildProcess):
    """``kvtier serve`` with ``settings`` (configuration keys) at a Unix socket in ``folder`` and
    where ``listen`` says.

    Use as a context manager. The socket's folder does not exist before the first start. It is
    forked from a process that has imported everything (:mod:`tests.forked`), or has a Python of its
    own (``own_python``) where its start is tested. ``patient``, ``slow_disk``: changes of that
    module.
    """

    def __init__(
        self,
        folder,
        *listen,
        flags=(),
        patient=False,
        slow_disk=False,
        own_python=False,
        **settings,
    ):
        self.socket = folder / "run" / "kvtier.sock"
        self.address = Address(str(self.socket), "", 0)
        addresses = [*listen, f"unix://{self.socket}"]
        self._changes = [be_patient] * patient + [slow_down] * slow_disk
        self._own_python = own_python
        self._command = [sys.executable, "-m", "kvtier", "serve", *flags]
        self._command += [word for address in addresses for word in ("--listen", address)]
        given = {"ram_bytes": 32 * SLOT, "admin": "off"} | settings
        env = bare()
        for name, value in given.items():
            exact = name.endswith("_bytes") and isinstance(value, int)
            env[f"KVTIER_{name.upper()}"] = f"{value}B" if exact else str(value)
        super().__init__(folder / "server.log", env)

    def command(self):
        return self._command

    def answers(self):
        return listens(self.socket)

    def _spawn(self):
        if self._own_python:
            return super()._spawn()
        return Forked(serve, self._env, self._command[3:], str(self.log), self._changes)

    def refusal(self):
        """Start one that cannot start, even if it listens before it finds out. What it says."""
        with subprocess.Popen(
            self._command, env=self._env, cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                wait_for(lambda: process.poll() is not None, "it gives up")
            finally:
                process.kill()
            said = process.communicate()[1]
        assert process.returncode == 2, said
        return said

    def access(self, layout=LAYOUT, namespace=""):
        own = hello(
            layout.fingerprint, layout.chunk_bytes, stream=False, namespace=namespace, client="test"
        )
        return ServerAccess(self.address, own)


@contextmanager
def attached(access, *, later=False):
    """A client, which waits longer than an engine does, because tests share the machine. ``later``:
    there is no server yet, or it has no room."""
    client = Client(access, DEADLINE_S)
    try:
        if not later:
            wait_for(lambda: client.pool is not None, "attached")
        yield client
    finally:
        client.close()


@contextmanager
def short_folder():
    """A folder whose name leaves room for a socket (108 bytes)."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        yield Path(folder)


@contextmanager
def serving(*listen, **settings):
    """A server in a folder of its own. ``settings``: see :class:`ServerProcess`."""
    with short_folder() as folder, ServerProcess(folder, *listen, **settings) as server:
        yield server


def run(prompt, length, layout=LAYOUT):
    """The keys of a prompt. Each ``prompt`` has its own."""
    return layout.keys([prompt, *range(length - 1)])


def save(cache, keys):
    """Save a run. Returns how many chunks were new. Every client of the server finds them from
    here on."""
    with cache.save(keys) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = content(key, len(view))
        saved = len(lease.keys)
        lease.commit()
    cache.stats()  # a commit has no answer, and this one comes after it
    return saved


def load(cache, keys):
    """Load what can be had of a run and compare every byte. Returns where the chunks came from."""
    with cache.load(keys) as lease:
        wait_for(lambda: lease.poll().coming == 0, "nothing is coming any more")
        for key, view in zip(lease.keys, lease.views(), strict=False):
            assert view == content(key, len(view)), "a byte that was not saved"
        return lease.sources


def at_rest(cache):
    """Wait until the store, or a client's server, is idle: nothing waits to be written either. Its
    rules must hold all the time."""

    def idle():
        cache.check()
        try:
            cache.check(idle=True)
        except Exception as error:
            if "not at rest" in str(error) or "still writes" in str(error):
                return False
            raise
        return True

    wait_for(idle, "it is at rest")


def told_all(watched, hear):
    """Call ``hear`` until a server at rest has told everything: it has answered a question that was
    asked from now on, there is no more, and all announcements are sent."""
    begun, asked_at = time.monotonic(), 0.0

    def told():
        nonlocal asked_at
        hear()
        if asked_at <= begun:
            asked_at = watched._asked_at
        answered = asked_at > begun and (not watched.is_asked or watched._asked_at > asked_at)
        rest = watched._due or watched._owed or watched._waiting or watched._announced
        return answered and not rest

    wait_for(told, "the server tells all")
