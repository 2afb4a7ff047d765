"""What the page about several hosts says, word by word, with a stand-in for vLLM: ``kvtier launch``
starts a server on each host, doctor looks at both, and after a restart the disks hit. With the one
switch each server sizes itself."""

import json
import re
import secrets
import shlex
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from kvtier.bench.processes.servers import free_port
from tests.certificates import make_certificates
from tests.child_process import DEADLINE_S, servers, wait_for
from tests.command import bare, ran
from tests.conftest import ROOT
from tests.fence import ext4, require_free
from tests.server_process import short_folder

PAGE = (ROOT / "deploy/multi-host/README.md").read_text()


class Page:
    """The page's file and commands, where two folders stand for two hosts: other paths, a port of
    this machine, and sizes that it has. ``auto``: the page's way without sizes."""

    def __init__(self, shared, folders, *, auto=False):
        (written,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        shell, switch = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        if auto:
            (disk,) = re.findall(r"so that `(nvme: .*)` only says which disk", PAGE)
            ram, nvme, *rest = written.splitlines()
            assert ram.startswith("ram:") and nvme.startswith("nvme:")
            written = "\n".join([disk, *rest])
        lines = shell.replace("\\\n", " ").splitlines()
        self._lines = [line for line in lines if not line.startswith("#")]
        make_certificates(shared)
        for ours, theirs in (("ours.pem", "ca.pem"), ("ours-host.pem", "host.pem")):
            (shared / ours).rename(shared / theirs)
        (shared / "ours-host.key").rename(shared / "host.key")
        (shared / "token").write_text(secrets.token_hex(32))
        for name in ("token", "host.key"):
            (shared / name).chmod(0o400)
        self.folders, port = folders, free_port()
        for folder in folders:
            here = {
                "/etc/kvtier/": f"{shared}/",
                "/run/kvtier/": f"{folder}/run/",
                "/mnt/nvme/": f"{folder}/nvme/",
                "tcp://b:9600": f"tcp://localhost:{port}",
            }
            if not auto:
                here |= {"64GiB": "1MiB", "1TiB": "4MiB"}
            text = written
            for before, after in here.items():
                assert before in text, before
                text = text.replace(before, after)
            (folder / "kvtier.yaml").write_text(text)
        site = shared / "site"
        info = site / "vllm-0.32.7.dist-info"
        for made in (site / "vllm", info):
            made.mkdir(parents=True)
        (site / "vllm/__init__.py").touch()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.7\n")
        vllm = shared / "vllm"
        vllm.write_text(
            f"#!{sys.executable}\nfrom tests.integration.hosts_standin import main\nmain()\n"
        )
        vllm.chmod(0o755)
        clean = bare()
        self._env = clean | {
            "PATH": f"{shared}:{clean['PATH']}",
            "PYTHONPATH": f"{site}:{ROOT}",
            "STANDIN_FOLDER": str(shared),
            "KVTIER_ADMIN": "off",
            "KVTIER_SERVER_TIMEOUT_MS": str(int(1000 * DEADLINE_S)),
        }
        if auto:
            name, value = switch.partition("#")[0].split()[1].split("=")
            self._env |= {name: value, "KVTIER_RAM_BYTES": "1MiB"}  # it is made at once

    def words(self, host, command):
        """The page's one command on this host that begins so."""
        on_b, on_a = ("--node-rank 1", "--node-rank 0")
        wanted = (on_a, on_b)[host] if command == "launch" else ""
        (line,) = (
            one for one in self._lines if one.startswith(f"kvtier {command}") and wanted in one
        )
        line = line.partition("#")[0].replace(
            "/etc/kvtier/kvtier.yaml", f"{self.folders[host]}/kvtier.yaml"
        )
        return [sys.executable, "-m", *shlex.split(line)]

    @contextmanager
    def node(self, host):
        """A host's engine, until it ends and its server has ended with it."""
        log = (self.folders[host] / "log").open("ab")
        with (
            log,
            subprocess.Popen(
                self.words(host, "launch"),
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            try:
                yield process
                process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 0, self.said(host)
            finally:
                process.kill()
        socket = f"{self.folders[host]}/run/kvtier.sock"
        wait_for(lambda: not servers(socket), "the server ends with the engine")

    def said(self, host):
        return (self.folders[host] / "log").read_text()

    def doctor(self):
        done = ran(self.words(0, "doctor"), self._env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def live(self):
        """Start b, then a; stop both. What the engine told, and doctor."""
        with self.node(1), self.node(0) as engine:
            assert engine.stdout is not None
            line = engine.stdout.readline()
            assert line, self.said(0) + self.said(1)
            return json.loads(line), self.doctor()


@pytest.mark.extended
@pytest.mark.parametrize("auto", [False, True], ids=["sizes", "the one switch"])
def test_the_pages_commands_start_a_server_on_each_host_and_hit_after_a_restart(tmp_path, auto):
    with ExitStack() as stack:
        folders = [stack.enter_context(short_folder()) for _ in range(2)]
        if auto:
            require_free(10 << 30)
            for folder in folders:
                stack.enter_context(ext4(folder / "nvme", 12 << 30))
        page = Page(tmp_path, folders, auto=auto)
        first, seen = page.live()
        again, _ = page.live()
        logs = [page.said(host) for host in range(2)]
    assert first == {"known": 0, "ready": 4, "sources": ["ram"]}
    assert again == {"known": 4, "ready": 4, "sources": ["nvme"]}
    if not auto:
        assert "localhost" in seen
        for log in logs:
            assert log.count("this host's server is started at unix://") == 2
            assert "the first engine decides it" in log, "the size of chunks"
        return
    assert f"the tiers are the server's (unix://{folders[0]}/run/kvtier.sock)" in seen
    for folder, log in zip(folders, logs, strict=True):
        assert log.count("auto-config (environment KVTIER_AUTO): the server measures") == 2
        assert log.count("auto-config: ram_bytes 1 MiB (yours; the plan would be ") == 2
        taken = rf"nvme_path {folder}/nvme/kvtier \(yours; [^)]*\), nvme_bytes ([\d.]+ GiB);"
        once, again_so = re.findall(taken, log)
        assert once == again_so
