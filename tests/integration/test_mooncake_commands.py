"""What the commands say of Mooncake's tier, on a real Mooncake."""

import subprocess

import pytest

from kvtier.assemble import assemble
from kvtier.bench.processes.servers import free_port
from kvtier.config.keys import Config, places
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.started import Started
from tests.command import bare, kvtier
from tests.conftest import ROOT
from tests.mooncake_pool import mooncake, python

LAYOUT = ChunkLayout(bytes(32), 1, 1, (4096,))


@pytest.fixture(scope="module")
def pool():
    with mooncake() as started:
        yield started


def environment(url):
    return {"KVTIER_MOONCAKE_URL": url, "KVTIER_RAM_BYTES": "16MiB", "KVTIER_ADMIN": "off"}


def test_the_doctor_saves_in_one_process_and_loads_in_another(pool):
    said = kvtier("doctor", "--no-engine", env=environment(pool.url), python=python()).stdout
    rows = {" ".join(line.split()) for line in said.splitlines() if "mooncake " in line}
    answers = f"mooncake://{pool.address}: its master answers; 64 MiB of its pool are ours"
    compared = "chunks written, closed, read and compared by a second process"
    assert rows == {f"ok mooncake {answers}", f"ok self-test mooncake {compared}"}, said


def test_the_doctor_and_a_server_name_an_address_where_nobody_listens(tmp_path):
    port = free_port()
    words = f"no master listens at 127.0.0.1:{port} (Connection refused); start mooncake_master"
    url = f"mooncake://127.0.0.1:{port}"
    said = kvtier("doctor", "--no-engine", env=environment(url), python=python()).stdout
    assert words in said and "its chunks are misses until it can be reached" in said
    command = [python(), "-m", "kvtier", "serve", "--listen", f"unix://{tmp_path}/kvtier.sock"]
    with subprocess.Popen(
        command, env=bare(**environment(url)), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        assert any(words in line for line in server.stderr), "it starts, and says so"
        server.terminate()


def test_without_the_library_the_start_says_what_to_install():
    config = Config().with_keys(ram_bytes=1 << 20, mooncake_url="mooncake://master")
    assert places(config) == ["ram", "mooncake"]
    words = r"mooncake_url: not installed here: mooncake; pip install 'mooncake-transfer-engine>="
    with pytest.raises(ConfigError, match=words):
        assemble(Started(config), LAYOUT)
