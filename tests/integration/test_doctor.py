"""``kvtier doctor`` on real tiers: sound, missing, full, slow to answer, and with bytes changed
behind their back."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvtier import selftest
from kvtier.bench.model import PRESETS
from kvtier.bench.processes.servers import free_port
from kvtier.bench.traces.mooncake import lines_of
from kvtier.cli import doctor
from kvtier.cli import main as cli
from kvtier.cli.doctor import check_command
from kvtier.cli.vllm_command import API_SERVER
from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.started import Started
from kvtier.tiers.seam import Finding
from tests import server_process as engines
from tests.child_process import wait_for
from tests.command import kvtier
from tests.mounts import mounted
from tests.redis_server import RedisServer
from tests.server_process import OTHER, attached, serving

pytestmark = pytest.mark.usefixtures("patient", "nothing_set")

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def of(findings, check):
    return [finding for finding in findings if finding.check == check]


def one(findings, check):
    (found,) = of(findings, check)
    return found


def tiers(**settings):
    return list(doctor.tiers(Started(load(env={}, flags=settings))))


@pytest.mark.redis
def test_a_sound_installation_is_0_and_left_as_it_was(tmp_path, capsys):
    file = tmp_path / "kvtier.yaml"
    with RedisServer(maxmemory="64mb") as redis:
        file.write_text(
            f"ram_bytes: 64MiB\nnvme_path: {tmp_path}/not/yet\nnvme_bytes: 64MiB\nredis_url: "
            f"{redis.url}\n"
        )
        assert cli.main(["doctor", "--no-engine", "--config", str(file)]) == 0
        with redis.admin() as admin:
            assert admin.dbsize() == 0
    said = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier.yaml"]
    for check in ("self-test ram", "self-test nvme", "self-test redis"):
        assert f"ok    {check}" in said
    assert said.splitlines()[-1].endswith("0 to repair")


def test_what_is_wrong_is_1_with_what_to_do_and_the_rest_is_looked_at_all_the_same(
    capsys, tmp_path
):
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        f"redis_url: redis://127.0.0.1:{free_port()}\nserver: unix://{tmp_path}/none.sock\n"
    )
    assert cli.main(["doctor", "--no-engine", "--json", "--config", str(file)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == 1
    failed = {row["check"]: row for row in told["findings"] if row["state"] == "fail"}
    assert set(failed) == {"redis", "server"}
    assert "Connection refused" in failed["redis"]["seen"] and "redis_url" in failed["redis"]["do"]
    assert f"kvtier serve --listen unix://{tmp_path}/none.sock" in failed["server"]["do"]
    assert "self-test ram" in {row["check"] for row in told["findings"]}


def test_a_configuration_that_cannot_be_read_is_a_finding(capsys, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text("ram_bites: 1GiB\n")
    assert cli.main(["doctor", "--no-engine", "--config", str(file)]) == 1
    said = capsys.readouterr().out
    assert (
        "fail  config             unknown key 'ram_bites'" in said and "ok    self-test ram" in said
    )


def test_more_ram_than_there_is_and_a_model_that_does_not_fit(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**PRESETS["demo"], "torch_dtype": "float32"}))
    monkeypatch.setenv("KVTIER_RAM_BYTES", "900GiB")
    assert cli.main(["doctor", "--no-engine"]) == 1
    assert (
        "fail  ram                ram_bytes 900 GiB (environment KVTIER_RAM_BYTES) of"
        in capsys.readouterr().out
    )
    monkeypatch.setenv("KVTIER_RAM_BYTES", "256MiB")
    assert cli.main(["doctor", "--no-engine", "--model", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (
        "warn  model              16 KiB of KV a token, 4 MiB a chunk; the RAM tier holds "
        "16,384 tokens" in said
    )
    assert "needs ram_bytes 512 MiB" in said


EXPANDABLE = "max_split_size_mb:64,expandable_segments:True"
SERVE = ("python", "-m", API_SERVER, "--model", "M")


@pytest.mark.parametrize(
    ("words", "env", "state", "seen"),
    [
        (SERVE, {}, "ok", "KVTierConnector added"),
        (SERVE, {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, "fail", "expandable_segments:True beside"),
        ((), {"OPTION_KV_OFFLOADING_SIZE": "4"}, "fail", "vLLM's own offloading"),
    ],
)
def test_the_command_that_starts_the_engine_is_judged(monkeypatch, words, env, state, seen):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (found,) = check_command(["--", *words] if words else [])
    assert (found.check, found.state) == ("command", state) and seen in found.seen
    assert bool(found.do) == (state == "fail")


def test_an_engine_is_looked_at_with_its_command(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "executable", "/no/python"
    )  # its own tests look at vLLM, which takes seconds to load
    command = ["--", *SERVE, "--kv-offloading-size", "4"]
    assert cli.main(["doctor", *command]) == 1
    assert (
        "fail  command            --kv-offloading-size asks for vLLM's own"
        in capsys.readouterr().out
    )
    cli.main(["doctor", "--no-engine", *command])
    assert " command " not in capsys.readouterr().out


def test_a_vllm_that_does_not_load_fails(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('no libcuda.so.1')")
    info = tmp_path / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    done = kvtier("doctor", "--json", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    findings = [Finding(**row) for row in json.loads(done.stdout)["findings"]]
    assert done.returncode == 1
    assert one(findings, "vllm").seen == "vLLM 0.32.0"
    assert (
        one(findings, "connector").state == "fail"
        and "no libcuda.so.1" in one(findings, "connector").seen
    )


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plug_ins", "state", "seen"),
    [
        ({}, "ok", "vLLM loads KVTierConnector, also for LMCacheConnectorV1"),
        pytest.param(
            *({"VLLM_PLUGINS": "others"}, "fail"),
            "vLLM loads no plug-in of kvtier's: LMCacheConnectorV1 is LMCache's",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_the_real_vllm_loads_the_connector_in_lmcaches_place(plug_ins, state, seen):
    done = kvtier("doctor", "--json", env={"KVTIER_REPLACE_LMCACHE": "1", **plug_ins})
    found = one([Finding(**row) for row in json.loads(done.stdout)["findings"]], "connector")
    assert found.state == state and found.seen.endswith(seen)
    assert done.returncode == (state == "fail")


@needs_root
def test_a_full_tmpfs_is_named_twice(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=16m", "kvtier-test") as point:
        (point / "others").write_bytes(bytes(4 * MIB))
        found = tiers(nvme_path=str(point / "kvtier"), nvme_bytes="64MiB", ram_bytes="8MiB")
        assert not (point / "kvtier").exists()
    states = {finding.state: finding for finding in of(found, "nvme")}
    assert (
        states["fail"].seen == "64 MiB (flag) of 12 MiB on tmpfs" and "12 MiB" in states["fail"].do
    )
    assert "counted twice" in states["warn"].seen
    assert of(found, "self-test nvme") == []


def test_bytes_changed_on_disk_between_the_two_processes_are_seen(tmp_path):
    own = Config().with_keys(ram_bytes=8 * MIB, nvme_path=str(tmp_path / "t"), nvme_bytes=5 * MIB)
    trial = selftest.trial("nvme", own)
    assert selftest.run("save", trial) == ""
    with (tmp_path / "t/slots.kvtier").open("r+b") as file:
        file.seek(selftest.SLOT_BYTES // 2)
        before = file.read(1)
        file.seek(selftest.SLOT_BYTES // 2)
        file.write(bytes([before[0] ^ 1]))
    said = selftest.run("load", trial)
    assert said.startswith("load: ") and said.endswith(f"of {selftest.CHUNKS} chunks came back")


def test_a_tier_that_writes_late_or_little_is_tried_all_the_same(tmp_path):
    found = tiers(nvme_path=f"{tmp_path}/t", nvme_bytes="64MiB", nvme_write_limit="1MiB")
    assert one(found, "self-test nvme").state == "ok", found


@pytest.mark.redis
def test_redis_that_forgets_by_itself_has_no_size_or_does_not_answer():
    with RedisServer(maxmemory="64mb", maxmemory_policy="allkeys-lru") as redis:
        found = tiers(redis_url=redis.url)
        assert one(found, "redis").state == "warn" and "noeviction" in one(found, "redis").do
        assert one(found, "self-test redis").state == "ok"
        with redis.admin() as admin:
            admin.config_set("maxmemory", 0)
        found = tiers(redis_url=redis.url)
        assert one(found, "redis").state == "fail" and "set redis_bytes" in one(found, "redis").do
        redis.pause()
        found = tiers(redis_url=redis.url, redis_bytes="16MiB")
        assert one(found, "redis").state == "fail" and of(found, "self-test redis") == []
        redis.resume()


def test_a_server_is_not_disturbed_before_an_engine_is_there_and_tried_afterwards():
    with serving() as server:
        found = tiers(server=str(server.address))
        assert one(found, "server").state == "ok"
        assert one(found, "self-test server").state == "warn"
        with attached(server.access()) as engine:
            found = tiers(server=str(server.address))
            assert one(found, "self-test server").state == "ok", found
            assert "chunks of 8 KiB" in one(found, "self-test server").seen
            wait_for(lambda: engine.stats()["ram_ready"] == 0, "the trial's chunks are gone")


def test_a_recording_server_is_well_and_none_of_it_is_recorded(tmp_path):
    record = tmp_path / "record"
    with serving(record=record) as server, attached(server.access()) as engine:
        own = {"record": str(record), "nvme_path": str(tmp_path / "kv"), "nvme_bytes": "64MiB"}
        found = tiers(**own, server=str(server.address))
        assert [finding for finding in found if finding.state == "fail"] == []
        assert len(of(found, "self-test server")) == len(of(found, "self-test nvme")) == 1
        engines.save(engine, engines.run(1, 2))
        assert engines.load(engine, engines.run(1, 2)) == ["ram"] * 2
        wait_for(lambda: engine.stats()["recorded"] == 1, "the engine's own request")
    (line,) = lines_of(str(record))
    assert len(json.loads(line)["hash_ids"]) == 2


def test_a_server_whose_chunks_are_never_hit_says_why():
    with serving() as server, attached(server.access()) as engine:
        assert "no chunk was asked for yet" in one(tiers(server=str(server.address)), "hits").seen
        engines.save(engine, engines.run(1, 2))
        for number in range(2, 102):
            assert engines.load(engine, engines.run(number, 20)) == []
        found = one(tiers(server=str(server.address)), "hits")
        assert found.state == "warn"
        assert found.seen.startswith(
            "0 of 2,000 chunks asked for were hits since the start: 100% cold: "
        )
        for _ in range(20):
            assert engines.load(engine, engines.run(1, 2)) == ["ram"] * 2
        assert one(tiers(server=str(server.address)), "hits").state == "ok"


def test_a_server_on_another_host_with_and_without_its_token(tmp_path):
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    for file in (token, wrong):
        file.write_text(f"{file.name} of thirty-two characters or so")
        file.chmod(0o600)
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        serving(address, server_token_file=token) as server,
        attached(server.access()),
        attached(server.access(OTHER)),
    ):
        found = tiers(server=address, server_token_file=str(token))
        assert [one(found, check).state for check in ("token", "server", "self-test server")] == [
            "ok"
        ] * 3, found
        found = tiers(server=address, server_token_file=str(wrong))
        assert (
            one(found, "server").state == "fail"
            and "does not know the server's token" in one(found, "server").seen
        )
    wrong.chmod(0o644)
    found = tiers(server=address, server_token_file=str(wrong))
    assert "open to every user" in one(found, "token").seen
