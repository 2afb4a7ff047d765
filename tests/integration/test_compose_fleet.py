"""deploy/docker/fleet.yaml: its command lines as processes, with its files, before two engines that
are stubs and a real kvtier server. And what the file and the files that it mounts say of each
other."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from kvtier.bench.processes.companion import companion
from kvtier.bench.processes.servers import answers, free_port
from kvtier.protocol.admin_proof import metrics_token
from tests.admin_server import administered
from tests.child_process import DEADLINE_S, wait_for
from tests.conftest import ROOT
from tests.integration.test_prometheus import Prometheus
from tests.integration.test_routing import Asker
from tests.stub_engine import stub_engines

FOLDER = ROOT / "deploy/docker"
FLEET = yaml.safe_load((FOLDER / "fleet.yaml").read_text())
BASE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
ADDED = ("router", "prometheus", "grafana")


def service(name):
    return dict(FLEET["services"][name])


def mounted(name):
    """Place in the container -> file or folder of the checkout."""
    parts = [volume.split(":") for volume in service(name)["volumes"]]
    return {
        place: (FOLDER / source).resolve()
        for source, place, *_ in parts
        if source.startswith((".", "/"))
    }


@contextmanager
def router(engines, folder):
    """The router's command line with its environment, on a free port and with these engines."""
    port, given = free_port(), service("router")
    ((inside, file),) = mounted("router").items()
    names = {f"ENGINE_{n}": f"engine-{n}:8000" for n in (1, 2)}
    assert given["environment"] == {**names, "ROUTER_DNS": "1"}, "containers change addresses"
    env = {f"ENGINE_{n}": f"127.0.0.1:{engine.port}" for n, engine in enumerate(engines, 1)}
    env |= {"ROUTER_HOST": "127.0.0.1", "ROUTER_PORT": str(port), "ROUTER_DNS": "1"}
    command = [word.replace(inside, str(file)) for word in given["command"] if word != "-W"]
    url = f"http://127.0.0.1:{port}"
    log = folder / "router.log"
    with companion(command, env, lambda: answers(f"{url}/health"), log, DEADLINE_S):
        yield url


@contextmanager
def prometheus(admin, token, engines, folder):
    """Prometheus' command line with its files: faster, and with these targets. ``admin`` is the
    server's port."""
    port, given = free_port(), service("prometheus")
    etc = folder / "etc"
    etc.mkdir()
    for place, file in mounted("prometheus").items():
        assert Path(place).parent == Path("/etc/prometheus")
        shutil.copy(file, etc / Path(place).name)
    config = etc / "prometheus.yml"
    text = config.read_text().replace("15s", "200ms")
    for old, new in [
        ("kvtier:9588", f"127.0.0.1:{admin}"),
        (f"/run/secrets/{service('prometheus')['secrets'][0]}", str(token)),
        *((f"engine-{n}:8000", f"127.0.0.1:{one.port}") for n, one in enumerate(engines, 1)),
    ]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    config.write_text(text)
    words = {
        "/etc/prometheus/": f"{etc}/",
        "path=/prometheus": f"path={folder / 'data'}",
        "for-grafana:9090": f"localhost:{port}",
    }
    command = ["prometheus", *given["command"]]
    for old, new in words.items():
        assert sum(old in word for word in command) == 1
        command = [word.replace(old, new) for word in command]
    url = f"http://127.0.0.1:{port}"
    log = folder / "prometheus.log"
    with companion(command, {}, lambda: answers(f"{url}/-/ready"), log, DEADLINE_S):
        yield url


def ask(url, session):
    return Asker(url).ask(headers={"X-Session-Id": session})


def test_its_command_lines_route_and_scrape(tmp_path):
    for program in ("haproxy", "prometheus"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    port, token = free_port(), tmp_path / "metrics-token"
    token.write_text("wrong")
    with (
        stub_engines(2) as engines,
        administered(admin=f"http://0.0.0.0:{port}", slot_bytes=8192) as server,
        router(engines, tmp_path) as entry,
        prometheus(port, token, engines, tmp_path) as url,
    ):
        names = [ask(entry, f"c{number}") for number in range(4)]
        assert set(names) == {"engine-1", "engine-2"}
        assert names == [ask(entry, f"c{number}") for number in range(4)]
        seen = Prometheus(url)
        wait_for(lambda: seen.value('sum(up{job="vllm"})') == [2], "both engines are scraped")
        wait_for(lambda: seen.value('up{job="kvtier"}') == [0], "another token is refused")
        token.write_text(metrics_token(server.token.read_bytes()))
        wait_for(lambda: seen.value("kvtier_ready") == [1], "the server is scraped")
        alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
        wanted = {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
        assert {rule["name"] for rule in seen.rules()} == wanted


@pytest.mark.parametrize("name", ADDED)
def test_each_service_has_the_least(name):
    given = service(name)
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", given["image"]), "a whole version"
    assert given["read_only"] is True and given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"] and "privileged" not in given
    assert all(file.exists() for file in mounted(name).values())
    written = [volume for volume in given["volumes"] if not volume.endswith(":ro")]
    assert {volume.split(":")[0] for volume in written} <= set(FLEET["volumes"])


def test_no_engine_reaches_the_servers_admin_port_or_prometheus():
    engine, grafana, seen = (
        set(service(name)["networks"]) for name in ("engine-1", "grafana", "prometheus")
    )
    ours, base = service("kvtier"), BASE["services"]["kvtier"]
    assert not engine & {*ours["networks"], *base["networks"]} and seen & set(ours["networks"])
    assert "network_mode" not in service("prometheus")
    listens = next(word for word in service("prometheus")["command"] if "listen-address" in word)
    named = listens.partition("=")[2].partition(":")[0]
    places = service("prometheus")["networks"]
    (shown,) = [net for net, given in places.items() if named in given.get("aliases", [])]
    assert shown in grafana and shown not in engine | set(ours["networks"])
    assert all(FLEET["networks"][name] == {"internal": True} for name in places)
    ports = {name: given.get("ports") for name, given in FLEET["services"].items()}
    assert {name: port for name, port in ports.items() if port} == {
        "router": ["8000:8000"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert "cache" not in {net for name in ADDED for net in service(name).get("networks", [])}


def test_prometheus_has_the_token_that_reads_metrics_and_the_server_alone_the_other():
    assert [service(name)["secrets"] for name in ("kvtier", "prometheus")] == [
        ["admin-token"],
        ["metrics-token"],
    ]
    env = service("kvtier")["environment"]
    assert env["KVTIER_ADMIN_TOKEN_FILE"] == "/run/secrets/admin-token"
    page = (FOLDER / "README.md").read_text()
    for name, user in (("admin-token", "10001"), ("metrics-token", "65534")):
        file = FLEET["secrets"][name]["file"]
        assert re.search(rf"sudo install .*-o {user} -m 0400 /dev/stdin {file}\n", page)
    (words,) = re.findall(r"--entrypoint kvtier kvtier-server (.*) \|\n", page)
    assert "-t kvtier-server ." in page, "a command of the page builds the image"
    command = [sys.executable, "-m", "kvtier", *words.split()]
    for given, code in ((b"5ec3e7" * 6 + b"\n", 0), (b"5ec3e7\n", 2)):
        made = subprocess.run(command, input=given, capture_output=True, check=False)
        assert made.returncode == code
        assert made.stdout.decode().strip() == ("" if code else metrics_token(given))
    assert b"has 6 bytes, expected 16 or more" in made.stderr


def test_grafana_finds_prometheus_and_the_dashboard():
    places = mounted("grafana")
    provisioning = places["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    asked = urlsplit(source["url"])
    listens = next(word for word in service("prometheus")["command"] if "listen-address" in word)
    assert source["type"] == "prometheus"
    assert listens.endswith(f"={asked.hostname}:{asked.port}")
    (provider,) = yaml.safe_load((provisioning / "dashboards/kvtier.yaml").read_text())["providers"]
    board = places[f"{provider['options']['path']}/kvtier.json"]
    assert json.loads(board.read_text())["uid"] == "kvtier"
    assert service("grafana")["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == (
        "${GRAFANA_PASSWORD:?}"
    )
