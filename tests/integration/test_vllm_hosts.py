"""Real vLLM over two hosts, here over loopback: the second one has PID and mount namespaces, shared
memory, a kvtier server and an NVMe folder of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from tests.integration.conftest import in_modes
from tests.integration.engine_modes import TOLD, V2_ASYNC, Mode
from tests.server_process import short_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ALL = 512
"""The prompt's whole chunks, in tokens."""
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
_OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_RUN_S = 500


class Hosts:
    """Two folders, one a host, and the network between their servers."""

    def __init__(self, model: Path, logs: Path, mode: Mode, stack: ExitStack) -> None:
        self.folders = [stack.enter_context(short_folder()) for _ in range(2)]
        self._model, self._logs, self._mode = model, logs, mode
        self._port = free_port()
        token = logs / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self._env = {key: value for key, value in os.environ.items() if key[:7] != "KVTIER_"} | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "KVTIER_CHUNK_TOKENS": "64",
            "KVTIER_RAM_BYTES": "64MiB",
            "KVTIER_NVME_BYTES": "64MiB",
            "KVTIER_ADMIN": "off",
            "KVTIER_SERVER_TIMEOUT_MS": "5000",
            "KVTIER_SERVER_TOKEN_FILE": str(token),
            TOLD: str(logs / "told.jsonl"),
        }
        self._env |= mode.environment()

    def _node(self, rank: int, port: int, run: int) -> subprocess.Popen[str]:
        folder = self.folders[rank]
        env = self._env | {
            "KVTIER_SERVER": f"unix://{folder}/run/k.sock,tcp://127.0.0.1:{self._port}",
            "KVTIER_NVME_PATH": f"{folder}/nvme",
        }
        words = [sys.executable, "-m", "tests.integration.hosts_node", str(self._model)]
        words += [str(rank), str(port)]
        if rank:
            words = [*_APART, _OWN_MEMORY, "sh", *words]
        with (self._logs / f"node{rank}-{run}.log").open("w") as log:
            out = log if rank else subprocess.PIPE
            return subprocess.Popen(
                words, env=env, stdout=out, stderr=log, text=True, start_new_session=True
            )

    @contextmanager
    def _second(self, port: int, run: int) -> Iterator[None]:
        node = self._node(1, port, run)
        try:
            yield
        finally:
            node.send_signal(signal.SIGTERM)
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()

    def run(self, run: int) -> list[Any]:
        """Start both nodes, ask, and end both. What was answered."""
        port = free_port()
        with self._second(port, run), self._node(0, port, run) as first:
            out, _ = first.communicate(timeout=_RUN_S)
            said = (self._logs / f"node0-{run}.log").read_text()
            assert first.returncode == 0, said[-3000:]
        self._mode.check(Path(self._env[TOLD]))
        lines = (line.partition("ANSWER ")[2] for line in out.splitlines())
        return [json.loads(line) for line in lines if line]


@in_modes(extended=(V2_ASYNC,))
def test_an_engine_over_two_hosts_hits_ram_and_after_a_restart_two_disks(
    tiny: Path, tmp_path: Path, mode: Mode
) -> None:
    with ExitStack() as stack:
        hosts = Hosts(tiny, tmp_path, mode, stack)
        cold, ram = hosts.run(0)
        assert (cold["cached"], ram["cached"]) == (0, ALL)
        disks, _ = hosts.run(1)
        assert disks["cached"] == ALL
        shutil.rmtree(hosts.folders[1] / "nvme")
        lost, again = hosts.run(2)
        assert (lost["cached"], again["cached"]) == (0, ALL), "misses, and then it is filled again"
        assert cold["tokens"] == ram["tokens"] == disks["tokens"] == lost["tokens"]
        assert again["tokens"] == cold["tokens"]
