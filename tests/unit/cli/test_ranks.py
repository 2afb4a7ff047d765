"""``kvtier launch`` with data-parallel ranks: one real server for them, which lives as long as the
engine. The engine is made up."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cli import ranks, vllm_command
from tests.child_process import DEADLINE_S, servers, wait_for
from tests.command import bare
from tests.conftest import ROOT
from tests.unit.cli.test_launch import dist

SERVER = vllm_command.API_SERVER
ENGINES_COMMAND = [sys.executable, "-m", SERVER, "--model", "m"]
ENGINE = """import os, sys
print(os.environ.get("KVTIER_SERVER", "none"), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("", 1),
        ("--data-parallel-size 2", 2),
        ("--data_parallel_size=4", 4),
        ("-dp 2", 2),
        ("--data-parallel-size 8 --data-parallel-size-local 4", 4),
        ("-dp 8 -dpl 4", 4),
        ("-dp 2 --data-parallel-rank 0", 1),
        ("-dp 2 -dpb ray", 1),
        ("--data-parallel-size many", 1),
    ],
)
def test_ranks_of_this_host_are_counted(words, count):
    assert ranks.local_ranks(words.split()) == count


class Launched:
    """``kvtier launch`` of an engine that says which server it has, and waits."""

    def __init__(self, folder, *words, **env):
        server = folder / (SERVER.replace(".", "/") + ".py")
        server.parent.mkdir(parents=True)
        server.write_text(ENGINE)
        (folder / "vllm/__init__.py").touch()
        (folder / "kvtier").symlink_to(ROOT / "kvtier", target_is_directory=True)
        dist(folder, "vllm", "0.32.7")
        given = {"PYTHONPATH": str(folder), "TMPDIR": str(folder), "KVTIER_ADMIN": "off"} | env
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtier", "launch", "--", *ENGINES_COMMAND, *words],
                env=bare() | given,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def address(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self):
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(DEADLINE_S) == 0

    def close(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def launched(folder, *words, **env):
    engine = Launched(folder / "site", *words, **env)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def short(tmp_path_factory):
    return tmp_path_factory.mktemp("r")


def answers(path):
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


def test_ranks_get_one_server_that_ends_with_the_engine(short):
    with launched(short, "--data-parallel-size", "2", KVTIER_RAM_BYTES="8MiB") as engine:
        path = engine.address().removeprefix("unix://")
        assert answers(path) and len(servers(path)) == 1
        assert "2 data-parallel ranks share a server" in engine.log.read_text()
        engine.end()
        wait_for(lambda: not servers(path), "the server ended")
        wait_for(lambda: not Path(path).parent.exists(), "nothing is left of it")


def test_a_server_that_dies_comes_back_and_a_killed_engine_takes_it_along(short):
    with launched(short, "-dp", "2", KVTIER_RAM_BYTES="8MiB") as engine:
        path = engine.address().removeprefix("unix://")
        (first,) = servers(path)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: servers(path) not in ([], [first]), "another one is there")
        wait_for(lambda: answers(path), "and answers")
        engine.process.kill()
        wait_for(lambda: not servers(path), "the server ended")


@pytest.mark.parametrize(
    ("words", "env", "address"),
    [
        ((), {}, "none"),
        (("-dp", "2"), {"KVTIER_SERVER": "unix:///run/mine/kvtier.sock"}, None),
        (("-dp", "2", "--kv-transfer-config", '{"kv_connector":"KVTierConnector"}'), {}, "none"),
    ],
)
def test_who_has_a_server_or_needs_none_gets_no_other(short, words, env, address):
    with launched(short, *words, **env) as engine:
        assert engine.address() == (address or env["KVTIER_SERVER"])
        assert not [*(short / "site").glob("kvtier-ranks-*")]
        alone = bool(words) and "KVTIER_SERVER" not in env
        assert ("2 data-parallel ranks keep a store each" in engine.log.read_text()) is alone


def test_with_auto_config_the_ranks_share_a_server_that_sizes_itself(short):
    """It looks for room while the engine has none yet. RAM is given here, so that no host is too
    small."""
    disk = short / "nvme"
    env = {"KVTIER_AUTO": "true", "KVTIER_RAM_BYTES": "8MiB", "KVTIER_NVME_PATH": str(disk)}
    with launched(short, "-dp", "2", **env) as engine:
        path = engine.address().removeprefix("unix://")
        said = engine.log.read_text()
        assert answers(path) and len(servers(path)) == 1
        assert "2 data-parallel ranks share a server" in said
        assert "auto-config (environment KVTIER_AUTO): the server measures the machine" in said
        assert "auto-config: ram_bytes 8 MiB (yours; the plan " in said


def test_a_server_that_cannot_start_ends_the_start_in_words(short):
    with launched(short, "-dp", "2", KVTIER_SLOT_BYTES="4097B") as engine:
        assert engine.process.wait(DEADLINE_S) == 2 and engine.address() == ""
        said = engine.log.read_text()
        assert "slot_bytes=4,097" in said and "did not start: its own words are above" in said
        assert "Traceback" not in said
