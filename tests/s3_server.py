"""A real S3 server (moto) for tests, as a process: started on a free port, stopped, killed and
started again, empty."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pytest

from kvtier.bench.servers import free_port
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.tiers.objects.bucket import Bucket
from kvtier.tiers.objects.layout import Form
from kvtier.tiers.objects.tier import ObjectTier
from tests.clock import Clock
from tests.server_process import wait_for

ROOT = Path(__file__).parents[1]
CHUNK_BYTES = 10_000
NAMESPACE = bytes(range(8))
FORM = Form("cache/a", NAMESPACE)
KEYS = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys(range(8))
URL = "s3://bucket/cache/a"
SECRET = "5ec3e75ec3e75ec3e7"
_LOOK_S = 10


def chunk(key: ChunkKey, size: int = CHUNK_BYTES) -> memoryview:
    """Bytes that are this key's only."""
    return memoryview((key * (size // len(key) + 1))[:size])


def holds(tier: ObjectTier, key: ChunkKey) -> bool | None:
    """Read a chunk; it must be the right one if there is one. None: the store cannot be asked
    now."""
    into = memoryview(bytearray(CHUNK_BYTES))
    held = tier.read(key, into)
    assert not held or into == chunk(key)
    return held


class S3Server:
    """One moto server with an empty bucket called ``bucket``. ``refuses_after``: requests from
    which on it lets nobody in whose access key it does not know."""

    def __init__(self, refuses_after: int | None = None) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._env = (
            {} if refuses_after is None else {"INITIAL_NO_AUTH_ACTION_COUNT": str(refuses_after)}
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What an operator sets."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        places = sorted(ROOT.glob(".venv-peers/moto-*/bin/python"))
        if not places:
            pytest.skip("moto is not installed (make peers)")
        command = [
            str(places[0]),
            "-c",
            "from moto.server import main; main()",
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        env = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        } | self._env
        self._process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=places[0].parent,
        )
        wait_for(self._is_up, "the S3 server answers", 60)
        self._ask("PUT", "/bucket")

    def reset(self) -> None:
        """An empty bucket."""
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", "/bucket")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It accepts connections (the kernel does) and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def tier(self, url: str = URL, *, capacity: int = 64, clock: Clock | None = None) -> ObjectTier:
        bucket = Bucket(url, CHUNK_BYTES)
        bytes_ = capacity * (CHUNK_BYTES + 80)
        return ObjectTier(bucket, FORM, bytes_, CHUNK_BYTES, *([] if clock is None else [clock]))

    def _is_up(self) -> bool:
        try:
            self._ask("GET", "/moto-api/")
        except OSError:
            return False
        return True

    def _ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(self.endpoint + path, method=method)  # noqa: S310 - a server of our own
        with urllib.request.urlopen(request, timeout=_LOOK_S) as answer:  # noqa: S310
            answer.read()


@contextmanager
def operated(environment: dict[str, str]) -> Iterator[None]:
    """The environment of an operator in this process, and nothing else of its kind."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
                patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
