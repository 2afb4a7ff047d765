"""The server of each node of an engine over several hosts, as ``kvtier launch`` starts it."""

import re
from pathlib import Path

import pytest

from kvtier.cli.ranks import listens_at, nodes
from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from tests.server_process import ServerProcess, short_folder

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
