"""``kvtier launch`` with data-parallel ranks: one real server for them, which lives as long as the
engine. The engine is made up. And the server of each node of an engine over several hosts."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cli import ranks, vllm_command
from kvtier.cli.ranks import listens_at, nodes
from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from tests.child_process import DEADLINE_S, servers, wait_for
from tests.command import bare
from tests.conftest import ROOT
from tests.server_process import ServerProcess, short_folder
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


THREE = Config().with_keys(server="unix:///run/kvtier.sock,tcp://b:9600,tcp://c:9600").server


@pytest.mark.parametrize(
    ("words", "listens"),
    [
        ("m", []),
        ("m --nnodes 3", ["unix:///run/kvtier.sock"]),
        ("m --nnodes=3 --node-rank 0", ["unix:///run/kvtier.sock"]),
        ("m --nnodes 3 --node-rank 2 --headless", ["unix:///run/kvtier.sock", "tcp://c:9600"]),
        ("m -n 3 -r 1", ["unix:///run/kvtier.sock", "tcp://b:9600"]),
    ],
)
def test_a_node_listens_at_its_socket_and_where_the_first_node_asks_it(words, listens):
    assert listens_at(words.split(), THREE) == listens


def test_engines_that_share_one_server_start_none():
    words = ["m", "--nnodes", "2", "--node-rank", "1"]
    assert nodes(words) == (2, 1)
    assert listens_at(words, Config().with_keys(server="unix:///run/kvtier.sock").server) == []
    assert listens_at(words, Config().server) == []


def test_a_node_without_an_address_is_told_so():
    said = re.escape("--node-rank 3: server_address names 3 servers")
    with pytest.raises(ConfigError, match=said):
        listens_at(["m", "--nnodes", "4", "--node-rank", "3"], THREE)


def test_without_listen_a_server_is_at_the_first_of_several_addresses():
    with short_folder() as folder:
        server = ServerProcess(folder)
        both = f"unix://{server.socket},tcp://b:9600"
        server._command = server._command[: server._command.index("--listen")]
        server._env["KVTIER_SERVER"] = both
        with server:
            assert server.answers()


def test_what_the_page_says_names_a_server_on_each_of_its_hosts(tmp_path):
    page = (Path(__file__).parents[3] / "deploy/multi-host/README.md").read_text()
    (written,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "kvtier.yaml").write_text(written)
    config = load(str(tmp_path / "kvtier.yaml"), env={})
    assert config.server.addresses == ("unix:///run/kvtier/kvtier.sock", "tcp://b:9600")
    commands = re.findall(r"-- vllm serve (.*? \\\n.*?)\n", page)
    b, a = (listens_at(words.replace("\\\n", " ").split(), config.server) for words in commands)
    assert (a, b) == ([config.server.addresses[0]], list(config.server.addresses))
    assert config.server.addresses[1] in page.partition("A server that outlives")[2]
