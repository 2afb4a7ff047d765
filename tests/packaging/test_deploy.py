"""deploy/: every file can be read by what it is for, and names only what there is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier import cli, lmcache, lmi
from kvtier.config import KEYS, NO_KEYS, load
from kvtier.connectors.vllm import versions
from kvtier.openapi import ROUTES
from tests.server_process import attached, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
YAMLS = [path for path in FILES if path.suffix in (".yaml", ".yml")]
TEXT = {path: path.read_text(encoding="utf-8") for path in FILES}
NAMES = {path.relative_to(DEPLOY).as_posix() for path in FILES}


def name(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")))


def found(value: Any, key: str) -> list[Any]:
    """Every value of ``key`` anywhere in a document."""
    if isinstance(value, dict):
        return [one for name, inner in value.items() for one in ([inner] if name == key else []) + found(inner, key)]
    return [one for inner in value for one in found(inner, key)] if isinstance(value, list) else []


def test_every_place_has_its_files() -> None:
    assert {f"{place}/README.md" for place in ("docker", "kubernetes", "lmi", "systemd")} <= NAMES
    assert {"lmi/serving.properties", "docker/compose.yaml", "systemd/kvtier.service"} <= NAMES


@pytest.mark.parametrize("path", YAMLS, ids=name)
def test_yaml_is_yaml(path: Path) -> None:
    assert all(isinstance(document, dict) for document in documents(name(path)))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_variables_and_commands_exist(path: Path) -> None:
    variables = {word for word in re.findall(r"\bKVTIER_[A-Z_]*[A-Z]", TEXT[path]) if "SERVICE_HOST" not in word}
    assert variables - {f"KVTIER_{key.upper()}" for key in KEYS} <= set(NO_KEYS)
    lmcaches = {word.removeprefix("LMCACHE_").lower() for word in re.findall(r"\bLMCACHE_[A-Z_]*[A-Z]", TEXT[path])}
    known = {"config_file", *lmcache.ENVIRONMENT_KEYS}
    assert all(lmcache.is_known(key) or key in known for key in lmcaches)
    options = set(re.findall(r"\bOPTION_LMCACHE_\w+", TEXT[path]))
    assert options <= {"OPTION_LMCACHE_AUTO_CONFIG", "OPTION_LMCACHE_CONFIG_FILE"}
    commands = set(re.findall(r"(?:`|bin/|-- |\n)kvtier ([a-z]+)", TEXT[path]))
    assert commands <= {words.split()[0] for words in cli.COMMANDS}


def test_configuration_files_are_read_whole(tmp_path: Path) -> None:
    service = load(DEPLOY / "systemd/kvtier.yaml", env={})
    assert service.nvme_path == "/var/lib/kvtier"
    config_map, daemon_set = documents("kubernetes/server.yaml")
    (tmp_path / "kvtier.yaml").write_text(config_map["data"]["kvtier.yaml"])
    assert load(tmp_path / "kvtier.yaml", env={}).ram_bytes == 64 << 30
    assert daemon_set["kind"] == "DaemonSet"
    compose = documents("docker/compose.yaml")[0]["services"]
    assert load(env=compose["kvtier"]["environment"]).redis_url == "redis://redis:6379/0"
    assert load(env=compose["engine-2"]["environment"]).server == "unix:///run/kvtier/kvtier.sock"
    (engine,) = documents("kubernetes/engine.yaml")
    variables = {row["name"]: row["value"] for row in found(engine, "env")[0]}
    assert load(env=variables).server == "unix:///run/kvtier/kvtier.sock"


def test_lmis_file_is_read_as_lmi_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(env={lmi.PROPERTIES_VARIABLE: str(DEPLOY / "lmi/serving.properties")})
    assert config.auto and config.sources["auto"].startswith("option.lmcache_auto_config in")


def test_lmis_image_has_a_vllm_that_kvtier_runs_with() -> None:
    """Which LMI has which vLLM is the README's table; the image of the Dockerfile is in its first row."""
    (image,) = re.findall(r"ARG LMI_IMAGE=\S*/(\S+)", TEXT[DEPLOY / "lmi/Dockerfile"])
    rows = [line for line in TEXT[DEPLOY / "lmi/README.md"].splitlines() if image in line]
    assert len(rows) == 1 and rows[0].endswith("| 0.23 and newer | runs |")
    assert versions.judged("0.23.1.dev4+gcd87ce883") == "vLLM 0.23.1.dev4+gcd87ce883"


def test_server_and_engine_meet_at_one_socket_and_share_no_namespace() -> None:
    for file in ("kubernetes/server.yaml", "kubernetes/engine.yaml", "docker/compose.yaml"):
        for document in documents(file):
            for forbidden in ("hostPID", "hostIPC", "hostNetwork", "pid", "ipc", "privileged"):
                assert found(document, forbidden) == [], f"{file}: {forbidden}"
    manifests = [*documents("kubernetes/server.yaml")[1:], *documents("kubernetes/engine.yaml")]
    mounts = [found(manifest, "hostPath")[0]["path"] for manifest in manifests]
    assert mounts == ["/run/kvtier", "/run/kvtier"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            shlex.split(re.findall(r"ExecStart=(.*)", TEXT[DEPLOY / "systemd/kvtier.service"])[0])[2:], id="unit"
        ),
        pytest.param(found(documents("kubernetes/server.yaml")[1], "args")[0], id="kubernetes"),
        pytest.param(["--listen", "unix:///run/kvtier/kvtier.sock"], id="docker"),
    ],
)
def test_the_servers_command_lines_are_understood(words: list[str], tmp_path: Path) -> None:
    """With the paths moved to a folder of the test's, the server starts and tells where it listens."""
    moved = [word.replace("/run/kvtier", str(tmp_path)).replace("/etc/kvtier", str(tmp_path)) for word in words]
    (tmp_path / "kvtier.yaml").write_text("ram_bytes: 1MiB\nadmin: 'off'\n")
    command = [sys.executable, "-m", "kvtier.cli", "serve", *moved]
    env = os.environ | {"KVTIER_RAM_BYTES": "1MiB", "KVTIER_ADMIN": "off"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next((line for line in server.stderr if "serving at" in line), "")
        server.terminate()
        server.stderr.read()
    assert f"unix://{tmp_path}/kvtier.sock" in said


def test_probes_ask_for_what_there_is() -> None:
    asked = {path for text in TEXT.values() for path in re.findall(r"127\.0\.0\.1:9588(/[a-z/]+)", text)}
    assert {"/healthz/live", "/healthz/ready"} <= asked <= {route.path for route in ROUTES}
    probes = found(documents("kubernetes/server.yaml")[1], "containers")[0][0]
    assert "ready" in str(probes["startupProbe"]) and "ready" in str(probes["readinessProbe"])
    assert "live" in str(probes["livenessProbe"]) and "ready" not in str(probes["livenessProbe"])


def test_systemd_waits_until_the_server_says_that_it_is_ready() -> None:
    unit = TEXT[DEPLOY / "systemd/kvtier.service"]
    assert "\nType=notify\n" in unit and re.search(r"^WatchdogSec=\d+$", unit, re.MULTILINE)


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "kvtier.service"
    unit.write_text(TEXT[DEPLOY / "systemd/kvtier.service"].replace("/opt/kvtier/bin/kvtier", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kvtier" in line]) == (0, [])


def test_an_engine_in_other_namespaces_maps_the_servers_memory() -> None:
    """What the manifests rest on: another PID, IPC and network namespace, and only the socket in common."""
    apart = ["unshare", "--pid", "--ipc", "--net", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    with serving() as server, attached(server.door()):
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}
        command = [*apart, sys.executable, "-m", "kvtier.cli", "doctor", "--no-engine"]
        env["KVTIER_SERVER"] = str(server.address)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    self-test server" in done.stdout and "ok    self-test ram" in done.stdout
