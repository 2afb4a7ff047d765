"""A real kvtier server for tests, and what an engine does with it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.api import KVStore
from kvtier.bench.processes.companion import listens
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.client.heard import Heard
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.testing.check_tier import content
from tests.child_process import DEADLINE_S, ChildProcess, wait_for
from tests.command import bare, ran
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
        folder: Path,
        *listen: str,
        flags: Sequence[str] = (),
        patient: bool = False,
        slow_disk: bool = False,
        own_python: bool = False,
        **settings: object,
    ) -> None:
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

    def command(self) -> list[str]:
        return self._command

    def answers(self) -> bool:
        return listens(self.socket)

    def _spawn(self) -> Any:
        if self._own_python:
            return super()._spawn()
        return Forked(serve, self._env, self._command[3:], str(self.log), self._changes)

    def refusal(self) -> str:
        """Start one that cannot start. What it says."""
        done = ran(self._command, self._env)
        assert done.returncode == 2, done
        return done.stderr

    def access(self, layout: ChunkLayout = LAYOUT, namespace: str = "") -> ServerAccess:
        own = hello(
            layout.fingerprint, layout.chunk_bytes, stream=False, namespace=namespace, client="test"
        )
        return ServerAccess(self.address, own)


@contextmanager
def attached(access: ServerAccess, *, later: bool = False) -> Iterator[Client]:
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
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for a socket (108 bytes)."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        yield Path(folder)


@contextmanager
def serving(*listen: str, **settings: Any) -> Iterator[ServerProcess]:
    """A server in a folder of its own. ``settings``: see :class:`ServerProcess`."""
    with short_folder() as folder, ServerProcess(folder, *listen, **settings) as server:
        yield server


def run(prompt: int, length: int, layout: ChunkLayout = LAYOUT) -> list[ChunkKey]:
    """The keys of a prompt. Each ``prompt`` has its own."""
    return layout.keys([prompt, *range(length - 1)])


def save(cache: KVStore, keys: Sequence[ChunkKey]) -> int:
    """Save a run. Returns how many chunks were new. Every client of the server finds them from
    here on."""
    with cache.save(keys) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = content(key, len(view))
        saved = len(lease.keys)
        lease.commit()
    cache.stats()  # a commit has no answer, and this one comes after it
    return saved


def load(cache: KVStore, keys: Sequence[ChunkKey]) -> list[str]:
    """Load what can be had of a run and compare every byte. Returns where the chunks came from."""
    with cache.load(keys) as lease:
        wait_for(lambda: lease.poll().coming == 0, "nothing is coming any more")
        for key, view in zip(lease.keys, lease.views(), strict=False):
            assert view == content(key, len(view)), "a byte that was not saved"
        return lease.sources


def at_rest(cache: KVStore) -> None:
    """Wait until the store, or a client's server, is idle: nothing waits to be written either. Its
    rules must hold all the time."""

    def idle() -> bool:
        cache.check()
        try:
            cache.check(idle=True)
        except Exception as error:
            if "not at rest" in str(error) or "still writes" in str(error):
                return False
            raise
        return True

    wait_for(idle, "it is at rest")


def told_all(watched: Heard, hear: Callable[[], object]) -> None:
    """Call ``hear`` until a server at rest has told everything: it has answered a question that was
    asked from now on, there is no more, and all announcements are sent."""
    begun, asked_at = time.monotonic(), 0.0

    def told() -> bool:
        nonlocal asked_at
        hear()
        if asked_at <= begun:
            asked_at = watched._asked_at
        answered = asked_at > begun and (not watched.is_asked or watched._asked_at > asked_at)
        rest = watched._due or watched._owed or watched._waiting or watched._announced
        return answered and not rest

    wait_for(told, "the server tells all")
