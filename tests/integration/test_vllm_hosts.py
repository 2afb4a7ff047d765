"""Real vLLM over two hosts. Each has PID, mount and network namespaces, shared memory, a kvtier
server, RAM and an NVMe folder of its own, and a cable goes from one to the other. Where this
process may not make a network, they meet on loopback, and a warning says so."""

import json
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from tests.command import bare
from tests.integration.engine_modes import TOLD, V1, V1_ASYNC, V2, V2_ASYNC
from tests.integration.test_vllm import CHUNK, TIMEOUT_S, assert_same, hits
from tests.integration.test_vllm_modes import CHUNKS, assert_as_own, assert_restarted
from tests.integration.transfer import EVERY_HIT
from tests.network import ON_LOOPBACK, two_hosts
from tests.server_process import short_folder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings(f"default:{ON_LOOPBACK}"),
]

_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
_OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


class TwoHosts:
    def __init__(self, ranks, model, logs, mode, folders, net):
        self.disks = [folder / "nvme" for folder in folders]
        self._words = [sys.executable, "-m", "tests.integration.hosts_node", ranks, str(model)]
        self._logs, self._mode, self._folders, self._net = logs, mode, folders, net
        self._lives = 0
        token = logs / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        servers = f"unix://{folders[0]}/run/k.sock,tcp://{net.addresses[1]}:{free_port()}"
        settings = {
            "chunk_tokens": CHUNK,
            "ram_bytes": "64MiB",
            "nvme_bytes": "64MiB",
            "admin": "off",
            "server": servers,
            "server_timeout_ms": 5_000,
            "server_token_file": token,
            "server_unencrypted": "no" if net.is_loopback else "yes",
        }
        self._env = bare(**{f"KVTIER_{key.upper()}": value for key, value in settings.items()})
        self._env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "GLOO_SOCKET_IFNAME": net.interface,
            "WITH_KVTIER": "1",
            EVERY_HIT: "1",
        }
        self._env |= mode.environment()

    def live(self):
        """Start both nodes and end both. What the engine tells."""
        self._lives += 1
        out = self._logs / f"life{self._lives}.json"
        self._env[TOLD] = str(out.with_suffix(".told"))
        port = free_port()
        with self._node(0, port, out) as first, self._node(1, port, out) as second:
            assert first.wait(TIMEOUT_S) == 0, self._said(0, out)
            second.communicate(timeout=TIMEOUT_S)  # its standard input ends
            assert second.returncode == 0, self._said(1, out)
        self._mode.check(Path(self._env[TOLD]))
        told: dict[str, Any] = json.loads(out.read_text())
        return told

    @contextmanager
    def _node(self, node, port, out):
        servers = self._env["KVTIER_SERVER"].replace(
            str(self._folders[0]), str(self._folders[node])
        )
        env = self._env | {
            "KVTIER_SERVER": servers,
            "KVTIER_NVME_PATH": str(self.disks[node]),
            "VLLM_HOST_IP": self._net.addresses[node],
        }
        words = [*self._net.on(node), *_APART, _OWN_MEMORY, "sh", *self._words, str(node)]
        words += [f"{self._net.addresses[0]}:{port}", str(out)]
        with self._log(node, out).open("wb") as log:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()  # and with it all that runs in its namespace
            process.communicate()

    def _log(self, node, out):
        return out.with_name(f"{out.stem}-node{node}.log")

    def _said(self, node, out):
        return self._log(node, out).read_text()[-6_000:]


CELLS = [(ranks, mode) for mode in (V2_ASYNC, V1, V2) for ranks in ("tensor", "pipeline")]
CELLS.append(("tensor", V1_ASYNC))  # for stages vLLM turns async scheduling off on V1


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "mode"),
    CELLS,
    indirect=["mode"],
    ids=[f"{ranks}-{mode.name.replace(' ', '-')}" for ranks, mode in CELLS],
)
def test_an_engine_over_two_hosts_hits_their_ram_and_after_a_restart_their_disks(
    ranks, tiny, tmp_path, mode
):
    with ExitStack() as stack:
        folders = [stack.enter_context(short_folder()) for _ in range(2)]
        net = stack.enter_context(two_hosts())
        hosts = TwoHosts(ranks, tiny, tmp_path, mode, folders, net)
        told, again = hosts.live(), hosts.live()
        shutil.rmtree(hosts.disks[1])
        lost = hosts.live()
    for name, prompts in (("one", 1), ("several", 4)):
        assert_as_own(told[name], prompts=prompts)
        assert_restarted(again[name], told[name], prompts * CHUNKS)
    assert told["most in flight"] == mode.depth(2 if ranks == "pipeline" else 1)
    cold = lost["one"]
    assert (cold["loaded"][0], hits(cold["cold"])) == ({}, [0]), "one of the two has nothing"
    assert_same(cold["cold"], told["one"]["own"], tolerance=1e-4)
    assert sum(cold["loaded"][2].values()) == CHUNKS
    assert_same(cold["warm"], told["one"]["own"])
