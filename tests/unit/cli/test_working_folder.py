"""Whoever may write the folder in which an operator types a command runs no code by that."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.cli.vllm_command import API_SERVER
from kvtier.core import processes
from kvtier.extensions.mooncake.tier import MooncakeStore
from kvtier.extensions.objects.bucket import Bucket, library_environment
from tests.child_process import DEADLINE_S, wait_for
from tests.command import bare, ran
from tests.conftest import ROOT
from tests.server_process import short_folder

ENGINE = """
import multiprocessing, os, subprocess, sys
def work(): pass
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    print(sys.argv, os.environ.get("PYTHONSAFEPATH"))
"""
LAUNCH = ("launch", "--", "vllm", "serve", "model")
COMMANDS = (
    LAUNCH,
    ("launch", "--print", *LAUNCH[1:]),
    (*LAUNCH, "-dp", "2"),
    ("doctor",),
    ("doctor", "--no-engine"),
    ("plan",),
    ("config",),
    ("version",),
    ("bench", "queue", "--requests", "20"),
    ("bench", "model", "{place}/model", "--preset", "tiny"),
    ("bench", "long-doc-qa", "--model", "{place}/model", "--arms", "none"),
    ("check", "--nvme", "{place}/none"),
    ("clear", "--folder", "{place}/none"),
    ("stats",),
)

COMMAND = (sys.executable, "-P", "-m", "kvtier")
"""As the script ``kvtier``: a Python whose own path is without the working folder."""
_MODULES = (
    *("json", "sitecustomize", "usercustomize", "vllm", "subprocess", "runpy", "numpy", "msgspec"),
    *("torch", "obstore", "aiohttp", "yaml", "resource"),
)
_PACKAGES = ("encodings", "kvtier", "multiprocessing")
_PROGRAMS = ("nvidia-smi", "python", "redis-server")
_CODE = "import sys\nopen({mark!r}, 'a').write(f'{{__name__}} {{sys.argv}} {{sys.flags}}\\n')\n"


class Trap:
    """A folder of a stranger's, whose files say that they ran."""

    def __init__(self, place):
        self.folder, self._mark = place / "strangers", place / "ran"
        code = _CODE.format(mark=str(self._mark))
        for name in _PACKAGES:
            (self.folder / name).mkdir(parents=True)
            for file in ("__init__.py", "__main__.py"):
                (self.folder / name / file).write_text(code)
        for name in _MODULES:
            (self.folder / f"{name}.py").write_text(code)
        for name in _PROGRAMS:
            program = self.folder / name
            program.write_text(f"#!/bin/sh\necho {name} >> {self._mark}\n")
            program.chmod(0o755)

    @property
    def ran(self):
        """What of it ran since the last look."""
        said = self._mark.read_text() if self._mark.exists() else ""
        self._mark.unlink(missing_ok=True)
        return said

    def typed(self, *words, env=None):
        """A command of kvtier's, in that folder."""
        return ran([*COMMAND, *words], env, self.folder)


@pytest.fixture
def trap(tmp_path):
    return Trap(tmp_path)


@pytest.fixture
def env(tmp_path):
    """An operator's environment with a vLLM that starts processes as the real one does."""
    site = tmp_path / "site"
    server = site / (API_SERVER.replace(".", "/") + ".py")
    server.parent.mkdir(parents=True)
    (site / "vllm/__init__.py").touch()
    (site / "vllm-0.32.7.dist-info").mkdir()
    metadata = site / "vllm-0.32.7.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.7\n")
    server.write_text(ENGINE)
    program = tmp_path / "bin/vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{ENGINE}")
    program.chmod(0o755)
    clean = bare()
    path = f"{program.parent}:{clean['PATH']}"
    more = {"KVTIER_RAM_BYTES": "16MiB", "KVTIER_ADMIN": "off", "TMPDIR": str(tmp_path)}
    return clean | {"PYTHONPATH": f"{site}:{ROOT}", "PATH": path} | more


def test_the_trap_closes(trap, env):
    """Python itself does import from the working folder."""
    for words in (["-c", "import json"], ["-m", "kvtier"]):
        command = [sys.executable, *words]
        subprocess.run(command, cwd=trap.folder, env=env, check=False, capture_output=True)
        assert trap.ran, words


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_runs_nothing_of_the_working_folder(words, trap, env, tmp_path):
    done = trap.typed(*(word.format(place=tmp_path) for word in words), env=env)
    assert trap.ran == ""
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
    if "serve" in words and "--print" not in words:
        assert done.returncode == 0 and "serve" in done.stdout and "1" in done.stdout, done.stderr


def test_a_search_path_with_nothing_between_two_colons_is_not_the_working_folder(trap, env):
    """``PATH=$MORE:/usr/bin`` with an empty ``$MORE``. What the operator's own Python looks up is
    his, and sitecustomize of his PYTHONPATH is run before any code of kvtier's."""
    for words in (("plan",), ("doctor", "--no-engine")):
        trap.typed(*words, env=env | {"PATH": f":{env['PATH']}"})
        assert trap.ran == ""


def test_a_server_runs_nothing_of_the_working_folder(trap, env):
    """With a bucket, whose library has a process of its own."""
    with short_folder() as folder:
        path = folder / "kvtier.sock"
        keys = {"KVTIER_OBJECT_URL": "s3://bucket", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
        with subprocess.Popen(
            [*COMMAND, "serve", "--listen", f"unix://{path}"],
            cwd=trap.folder,
            env=env | keys | {"AWS_ALLOW_HTTP": "true"},
            stderr=subprocess.DEVNULL,
        ) as server:
            wait_for(lambda: server.poll() is not None or path.exists(), "it listens")
            server.send_signal(signal.SIGTERM)
            server.wait(DEADLINE_S)
    assert trap.ran == ""


def test_only_absolute_places_are_left_of_the_paths():
    given = {
        "PATH": ":/usr/bin:.:bin:/bin:",
        "PYTHONPATH": "",
        "LD_LIBRARY_PATH": "lib",
        "PYTHONPYCACHEPREFIX": "cache",
        "PYTHONUSERBASE": "/home/me",
        "PYTHONSAFEPATH": "",
    }
    left = {"PATH": "/usr/bin:/bin", "PYTHONUSERBASE": "/home/me", "PYTHONSAFEPATH": "1"}
    assert processes.isolated(given) == left


def test_an_operators_own_safe_path_is_left_to_the_engine(trap, env):
    done = trap.typed(*LAUNCH, env=env | {"PYTHONSAFEPATH": ""})
    assert done.stdout.strip().endswith("]"), done.stdout


def test_settings_stay_with_kvtier():
    secrets = {"KVTIER_ENCRYPTION_KEY": "k", "KVTIER_REDIS_URL": "r", "LMCACHE_REMOTE_URL": "l"}
    found = processes.without_settings(secrets | {"A": "1"}, "KVTIER_REDIS_URL")
    assert found == {"KVTIER_REDIS_URL": "r", "A": "1"}
    own = {"AWS_SECRET_ACCESS_KEY": "s", "PATH": "/bin", "LC_ALL": "C"}
    assert processes.chosen(secrets | own | {"PATHETIC": "1"}, "AWS_*") == own


LIBRARY = """
import os
class MooncakeDistributedStore:
    setup = register_buffer = lambda self, *words: 0
    close = lambda self: None
    batch_is_exist = lambda self, names: [1 if name in os.environ else 0 for name in names]
"""


def test_a_librarys_process_has_its_own_variables_and_no_other_secret(tmp_path, monkeypatch):
    """Mooncake's, and a bucket's: whoever is at the other end may be hostile."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/store.py").write_text(LIBRARY)
    secrets = ("KVTIER_ENCRYPTION_KEY", "KVTIER_REDIS_URL", "LMCACHE_REMOTE_URL", "HF_TOKEN")
    clouds = ("AWS_SECRET_ACCESS_KEY", "GOOGLE_API_KEY")
    for name in (*secrets, *clouds, "MC_GID_INDEX", "https_proxy"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        with closing(MooncakeStore(f"mooncake://127.0.0.1:{port}", 4096, 1)) as store:
            assert store.has(["MC_GID_INDEX", "PATH"]) == 2
            assert [name for name in (*secrets, *clouds) if store.has([name])] == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "1")
    had = {"s3": started_with("s3://bucket")}
    had |= {scheme: library_environment(scheme) for scheme in ("gs", "az")}
    for scheme, own in (("s3", {clouds[0]}), ("gs", {clouds[1]}), ("az", set())):
        assert {*secrets, *clouds} & had[scheme].keys() == own, scheme
        assert had[scheme]["https_proxy"] == "1"


def started_with(url):
    """The environment of the process of a bucket's library, as the kernel has it."""
    before = set(children())
    with closing(Bucket(url, 4096)) as bucket, bucket._library.seat():
        (pid,) = set(children()) - before
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
