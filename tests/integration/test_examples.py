"""Each file in ``examples`` does what it says, with small sizes and folders of the test."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import main as cli
from kvtier.config.load import load as load_config
from tests.child_process import wait_for
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, attached, load, run, save, short_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))
pytestmark = pytest.mark.usefixtures("nothing_set")


@pytest.fixture
def folder():
    with short_folder() as place:
        yield place


def small(file, folder):
    sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    changed: dict[str, Any] = {"ram_bytes": "2MiB"}
    if "nvme" in sections:
        changed |= {"nvme_path": folder / "nvme", "nvme_bytes": "64MiB"}
    if "admin" in sections:
        changed["admin"] = "http://127.0.0.1:0"
    if "engines" in sections.get("admin", ()):
        token = folder / "token"
        token.write_text("t" * 32)
        token.chmod(0o600)
        stream = f"ipc://{folder}/engine-1"
        changed |= {"admin_token_file": token}
        changed["admin_engines"] = f"engine-1={stream}?replay={stream}-replay"
    return changed


def flags(changed):
    return [
        word
        for key, value in changed.items()
        for word in (f"--{key.replace('_', '-')}", f"{value}")
    ]


def test_the_page_names_every_example():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for file in EXAMPLES.iterdir():
        assert file.name == "README.md" or f"]({file.name})" in page, file.name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_a_configuration_without_a_remark(file, capsys, caplog):
    assert cli.main(["config", "--config", str(file), "--json"]) == 0
    told = capsys.readouterr()
    assert str(file) in told.out and not told.err and not caplog.records


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem != "fleet"], ids=lambda file: file.stem
)
def test_the_doctor_finds_all_well(file, folder, capsys):
    changed = flags(small(file, folder))
    status = cli.main(["doctor", "--no-engine", "--config", str(file), *changed])
    said = capsys.readouterr().out
    assert (status, " 0 to repair" in said) == (0, True), said


def test_one_server_serves_many_engines_and_is_warm_after_a_crash(folder):
    file = EXAMPLES / "server.yaml"
    server = ServerProcess(folder, flags=["--config", str(file)], **small(file, folder))
    keys = run(1, 4)
    with server, attached(server.access()) as one, attached(server.access()) as other:
        assert save(one, keys) == 4
        assert load(other, keys) == ["ram"] * 4
        wait_for(lambda: one.stats()["nvme_held"] == 4, "the disk has it")
    with server, attached(server.access()) as engine:
        assert load(engine, keys) == ["nvme"] * 4


@pytest.mark.redis
def test_hosts_of_a_fleet_find_in_redis_what_another_saved(folder):
    file = EXAMPLES / "fleet.yaml"
    keys = run(2, 4)
    with RedisServer(maxmemory="64mb") as redis:
        url = f"redis://127.0.0.1:{redis.port}/0"
        changed = small(file, folder) | {"redis_url": url, "redis_bytes": "32MiB"}
        servers = []
        for host in ("one", "two"):
            (folder / host).mkdir()
            words = ["--config", str(file)]
            servers.append(ServerProcess(folder / host, flags=words, patient=True, **changed))
        one, two = servers
        with one, two, attached(one.access()) as engine, attached(two.access()) as other:
            assert save(engine, keys) == 4
            wait_for(lambda: engine.stats()["redis_held"] == 4, "Redis has it")
            assert load(other, keys) == ["redis"] * 4


def test_the_environment_of_lmi_has_kvtier_fill_in_the_sizes(monkeypatch):
    text = (EXAMPLES / "lmi.env").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            monkeypatch.setenv(*line.split("="))
    assert load_config().engine.auto


def test_a_tier_of_your_own_keeps_every_promise_and_serves(folder):
    own = runpy.run_path(str(EXAMPLES / "own_tier.py"))
    own["keeps_its_promises"](folder)
    assert own["below_ram"](folder) == 4
