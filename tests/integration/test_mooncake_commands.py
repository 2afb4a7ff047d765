"""What the commands say of Mooncake's tier, on a real Mooncake."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from kvtier.assemble import assemble, places
from kvtier.bench.processes.servers import free_port
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from tests.conftest import ROOT
from tests.mooncake_pool import Mooncake, mooncake, python

LAYOUT = ChunkLayout(bytes(32), 1, 1, (4096,))


@pytest.fixture(scope="module")
def pool() -> Iterator[Mooncake]:
    with mooncake() as started:
        yield started


def ran(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``kvtier`` in the environment that has Mooncake's library."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    env |= {"KVTIER_MOONCAKE_URL": url, "KVTIER_RAM_BYTES": "16MiB", "KVTIER_ADMIN": "off"}
    command = [python(), "-m", "kvtier", *arguments]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_doctor_saves_in_one_process_and_loads_in_another(pool: Mooncake) -> None:
    said = ran(pool.url, "doctor").stdout
    rows = {" ".join(line.split()) for line in said.splitlines() if "mooncake " in line}
    answers = f"mooncake://{pool.address}: its master answers; 64 MiB of its pool are ours"
    compared = "chunks written, closed, read and compared by a second process"
    assert rows == {f"ok mooncake {answers}", f"ok self-test mooncake {compared}"}, said


def test_the_doctor_and_a_server_name_an_address_where_nobody_listens(pool: Mooncake) -> None:
    url = f"mooncake://127.0.0.1:{free_port()}"
    words = f"{url}: no master listens there (Connection refused); start mooncake_master"
    assert words in ran(url, "doctor").stdout
    done = ran(url, "serve", "--listen", f"tcp://127.0.0.1:{free_port()}")
    assert done.returncode and words in done.stderr


def test_the_configuration_is_shown_with_its_tier(pool: Mooncake) -> None:
    done = ran(pool.url, "config")
    (row,) = [line for line in done.stdout.splitlines() if "mooncake" in line]
    assert pool.url in row and "environment KVTIER_MOONCAKE_URL" in row


def test_without_the_library_the_start_says_what_to_install() -> None:
    config = Config(ram_bytes=1 << 20, mooncake_url="mooncake://master")
    assert places(config) == ["ram", "mooncake"]
    words = r"mooncake_url: not installed here: mooncake; pip install 'kvtier\[mooncake\]'"
    with pytest.raises(ConfigError, match=words):
        assemble(config, LAYOUT)
