"""``kvtier launch`` and ``kvtier doctor`` with SGLang's commands, on a made-up SGLang: what is run,
what is refused."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from kvtier.cli import launch
from kvtier.cli.doctor import check_command
from kvtier.cli.sglang_command import refuse, server_ram
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.tiers.nvme.check import check, tier_folders
from tests.child_process import DEADLINE_S, wait_for
from tests.command import bare, kvtier
from tests.unit.cli.test_launch import dist

ENGINE = """import json, os, psutil, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(json.dumps(sys.argv[1:]), flush=True)
if "STAYS" in os.environ:
    got = signal.sigwait({signal.SIGTERM})
    for one in psutil.Process().children(recursive=True):
        one.kill()
    sys.exit(got)
"""
DISK = {"nvme_path": "/fast"}
SERVE = (sys.executable, "-m", "sglang.launch_server", "--model-path", "M")


@pytest.fixture
def home(tmp_path):
    place = tmp_path / "site"
    (place / "sglang").mkdir(parents=True)
    (place / "sglang/__init__.py").touch()
    (place / "sglang/launch_server.py").write_text(ENGINE)
    dist(place, "sglang", "0.5.23")
    (place / "kvtier").symlink_to(Path(launch.__file__).parents[1], target_is_directory=True)
    return place


@pytest.fixture
def start(home):
    return lambda *words, **env: kvtier(*words, env={"PYTHONPATH": home, **env})


def test_hicache_gets_the_server_that_is_named(start):
    given = {"KVTIER_SERVER": "unix:///run/a.sock", "KVTIER_NAMESPACE": "team"}
    done = start("launch", "--", *SERVE, "--page-size", "32", **given)
    words = json.loads(done.stdout)
    assert words[:4] == ["--model-path", "M", "--page-size", "32"] and "64" not in words
    assert words[4:7] == ["--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
    extra = {"server": "unix:///run/a.sock", "namespace": "team"}
    assert extra.items() <= json.loads(words[-1]).items() and "kvtier.connectors" in words[-1]
    assert "SGLang 0.5.23; its HiCache has the server" in done.stderr
    printed = start("launch", "--print", "--", *SERVE, "--page-size", "32", **given).stdout
    assert shlex.split(printed)[3:] == words


@pytest.mark.parametrize(("end", "status"), [(signal.SIGTERM, 15), (signal.SIGKILL, -9)])
def test_a_server_beside_the_engine_ends_by_itself_and_last(home, tmp_path, end, status):
    """SGLang kills its children, and whoever stops it gives signals to launch."""
    room = {"KVTIER_RAM_BYTES": "8MiB", "KVTIER_SLOT_BYTES": "4096B", "KVTIER_ADMIN": "off"}
    room |= {"KVTIER_NVME_PATH": tmp_path / "nvme", "KVTIER_NVME_BYTES": "8MiB"}
    command = [sys.executable, "-m", "kvtier", "launch", "--", *SERVE]
    env = bare(PYTHONPATH=home, STAYS=1, **room)
    launched: Any = Popen(command, env=env, stdout=PIPE, stderr=PIPE)
    with launched:
        words = json.loads(launched.stdout.readline())
        assert words[2:5] == ["--enable-hierarchical-cache", "--page-size", "64"]
        folder = Path(json.loads(words[-1])["server"].removeprefix("unix://")).parent
        launched.send_signal(end)
        assert launched.wait(DEADLINE_S) == status
        assert b"started beside it" in launched.stderr.read()
    wait_for(lambda: not folder.exists(), "the server has ended")
    assert [one.closed for one in map(check, tier_folders(tmp_path / "nvme"))] == [True]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--hicache-storage-backend", "file"], "an engine has one storage"),
        (["--dcp-size", "2"], "no storage of another package"),
        (["--page-size", "1"], "small chunks are slow"),
        (["--disaggregation-decode-enable-offload-kvcache"], "no storage of another package"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(words, why):
    with pytest.raises(ConfigError, match=why):
        refuse(words)
    (found,) = check_command(["--", *SERVE, *words])
    assert found.state == "fail" and why in found.seen


def test_a_python_without_sglang_or_kvtier_is_refused(start, home):
    dist(home, "other", "1.0")
    done = start("launch", "--", *SERVE, KVTIER_SERVER="unix:///run/a.sock")
    assert done.returncode == 2 and "has no SGLang" in done.stderr
    dist(home, "sglang", "0.6.0")
    done = start("launch", "--", *SERVE, KVTIER_SERVER="unix:///run/a.sock")
    assert "0.6.0 (not tested: 0.5.23 is)" in done.stderr
    done = start("doctor", "--", *SERVE)
    assert "SGLang 0.6.0" in done.stdout and "vLLM" not in done.stdout.partition("command")[0]


@pytest.mark.parametrize(
    ("words", "given", "size", "why"),
    [
        (["--tp-size", "4"], DISK, 4 << 30, "4 GiB as a bounce"),
        ([], {}, None, "no NVMe is below it: give --hicache-host-memory-mode buffer_only"),
        (["--hicache-host-memory-mode", "buffer_only"], DISK, None, "its RAM is the cache"),
        ([], {"ram_bytes": 1 << 30}, None, "the RAM of"),
    ],
)
def test_the_servers_ram_is_sized_for_what_sglang_keeps_itself(words, given, size, why):
    found, said = server_ram([*SERVE, *words], load(env={}, flags=given))
    assert found == size and why in said
