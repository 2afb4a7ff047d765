"""A real Mooncake for tests, over TCP on free ports: its master, and a process that owns the pool,
so that the pool outlives engines."""

import os
import socket
import subprocess
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.extensions.mooncake.tier import MooncakeStore, MooncakeTier
from kvtier.tiers.away.whole_objects import ObjectForm
from tests.child_process import ChildProcess
from tests.conftest import ROOT
from tests.tier_chunks import CHUNK_BYTES, NAMESPACE

POOL_MB = 256
FORM = ObjectForm("", NAMESPACE)
CALLS = 4


@cache
def programs():
    places = sorted(ROOT.glob(".venv-peers/mooncake-*/ready"))
    if not places:
        pytest.skip("Mooncake is not installed (make peers)")
    folder = places[-1].parent / "bin"
    command = [str(folder / "python"), "-c", "import mooncake.store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "libibverbs" in done.stderr:
        pytest.skip("Mooncake needs libibverbs1 (make programs)")
    assert done.returncode == 0, done.stderr
    return folder


def python():
    return str(programs() / "python")


class Listener(ChildProcess):
    """A program of Mooncake's that listens on ``port``."""

    def __init__(self, port, *arguments):
        super().__init__(Path(os.devnull))
        self.port = port
        name, *rest = arguments
        self._arguments = [str(programs() / name), *rest]

    def command(self):
        return self._arguments

    def answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Mooncake:
    """``master`` and ``pool`` can be stopped, paused and started one by one."""

    def __init__(self):
        port, pool = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.url = f"mooncake://{self.address}?bytes=64MiB"
        self.master = Listener(
            port,
            "mooncake_master",
            f"--rpc_port={port}",
            f"--metrics_port={free_port()}",
            "--metrics_host=127.0.0.1",
        )
        self.pool = Listener(
            pool,
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={pool}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={POOL_MB} MB",
        )

    def tier(self, form=FORM, *, url=None, size=CHUNK_BYTES, clock=None):
        store = MooncakeStore(url or self.url, size, CALLS, python())
        return MooncakeTier(store, form, size, *([] if clock is None else [clock]))

    @contextmanager
    def master_alone(self):
        with self.master:
            yield self


@contextmanager
def mooncake():
    here = Mooncake()
    with here.master, here.pool:
        yield here
