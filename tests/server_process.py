"""A real kvtier server for tests, and what an engine does with it: started, paused, killed and
started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from kvtier.api import KVStore
from kvtier.bench.companion import listens
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.testing.check_tier import content

SLOT = 8192
LAYOUT = ChunkLayout(fingerprint({"model": "a"}), 1, 1, (SLOT,))
OTHER = ChunkLayout(fingerprint({"model": "b"}), 1, 1, (SLOT,))
DEADLINE_S = 20.0


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return when ``condition`` holds; AssertionError when it does not in time."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s} s: {what}"
        time.sleep(0.002)


class ServerProcess:
    """``kvtier serve`` with ``settings`` (configuration keys) at a Unix socket in ``folder`` and
    where ``listen`` says.

    Use as a context manager. The socket's folder does not exist before the first start.
    """

    def __init__(
        self, folder: Path, *listen: str, flags: Sequence[str] = (), **settings: object
    ) -> None:
        self.socket = folder / "run" / "kvtier.sock"
        self.address = Address(str(self.socket), "", 0)
        self.log = folder / "server.log"
        addresses = [*listen, f"unix://{self.socket}"]
        self._command = [sys.executable, "-m", "kvtier", "serve", *flags]
        self._command += [word for address in addresses for word in ("--listen", address)]
        given = {"ram_bytes": 32 * SLOT, "admin": "off"} | settings
        self._env = {
            name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")
        }
        self._env |= {f"KVTIER_{name.upper()}": str(value) for name, value in given.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = self._spawn()
        try:
            wait_for(self._listens, "the server listens")
        except BaseException:
            self.kill()
            raise

    def refusal(self) -> str:
        """Start one that cannot; what it says."""
        done = subprocess.run(
            self._command,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 2, done
        return done.stderr

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(DEADLINE_S)
        self._process = None
        return status

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP for as long as the context lasts."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    def access(self, layout: ChunkLayout = LAYOUT, namespace: str = "") -> ServerAccess:
        own = hello(
            layout.fingerprint, layout.chunk_bytes, stream=False, namespace=namespace, client="test"
        )
        return ServerAccess(self.address, own)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.said()
        return listens(self.socket)


@contextmanager
def attached(access: ServerAccess, timeout_s: float = 2.0) -> Iterator[Client]:
    """A client; by default with more patience than an engine has, because tests share the
    machine."""
    client = Client(access, timeout_s)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for a socket (108 bytes)."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        yield Path(folder)


@contextmanager
def serving(*listen: str, flags: Sequence[str] = (), **settings: object) -> Iterator[ServerProcess]:
    """A server in a folder of its own."""
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        yield stack.enter_context(ServerProcess(folder, *listen, flags=flags, **settings))


def run(prompt: int, length: int, layout: ChunkLayout = LAYOUT) -> list[ChunkKey]:
    """Keys of a prompt of its own."""
    return layout.keys([prompt, *range(length - 1)])


def save(cache: KVStore, keys: Sequence[ChunkKey]) -> int:
    """Save a run; how many chunks were new."""
    with cache.save(keys) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = content(key, len(view))
        saved = len(lease.keys)
        lease.commit()
    return saved


def load(cache: KVStore, keys: Sequence[ChunkKey]) -> list[str]:
    """Load what can be had of a run and compare every byte; where the chunks came from."""
    with cache.load(keys) as lease:
        wait_for(lambda: lease.poll().coming == 0, "nothing is coming any more")
        for key, view in zip(lease.keys, lease.views(), strict=False):
            assert view == content(key, len(view)), "a byte that was not saved"
        return lease.sources


def at_rest(client: Client) -> None:
    """Wait until nothing of anybody is in progress in the server; its rules hold all the time."""

    def idle() -> bool:
        client.check()
        try:
            client.check(idle=True)
        except Exception as error:
            if "not at rest" in str(error) or "still writes" in str(error):
                return False
            raise
        return True

    wait_for(idle, "the server is at rest")
