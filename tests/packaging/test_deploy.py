"""deploy/: every file can be read by what it is for, and names only what there is."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import yaml
from redis import AuthenticationError, Redis

from kvtier.admin.forms import ROUTES
from kvtier.cli import main as cli
from kvtier.config import lmcache, lmi
from kvtier.config.keys import KEYS
from kvtier.config.load import NO_KEYS, load
from kvtier.connectors.vllm import versions
from tests.child_process import wait_for
from tests.command import bare, ran
from tests.server_process import attached, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
YAMLS = [
    path for path in FILES if path.suffix in (".yaml", ".yml") and path.parent.name != "templates"
]
TEXT = {path: path.read_text(encoding="utf-8") for path in FILES}


def name(path):
    return path.relative_to(DEPLOY).as_posix()


def documents(path):
    return list(yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")))


def found(value, key):
    """Every value of ``key`` anywhere in a document."""
    if isinstance(value, dict):
        return [
            one
            for name, inner in value.items()
            for one in ([inner] if name == key else []) + found(inner, key)
        ]
    return [one for inner in value for one in found(inner, key)] if isinstance(value, list) else []


def test_yaml_is_yaml():
    parsed = (one for path in YAMLS for one in documents(name(path)))
    assert all(isinstance(one, dict) for one in parsed)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_variables_and_commands_exist(path):
    text = TEXT[path]
    variables = set(re.findall(r"\bKVTIER_(?!SERVICE_HOST)[A-Z_]*[A-Z]", text))
    assert variables - {f"KVTIER_{key.upper()}" for key in KEYS} <= set(NO_KEYS)
    lmcaches = {word.lower() for word in re.findall(r"\bLMCACHE_([A-Z_]*[A-Z])", text)}
    known = {"config_file", *lmcache.ENVIRONMENT_KEYS}
    assert all(lmcache.is_known(key) or key in known for key in lmcaches)
    options = set(re.findall(r"\bOPTION_LMCACHE_(\w+)", text))
    assert options <= {"AUTO_CONFIG", "CONFIG_FILE"}
    commands = set(re.findall(r"(?:`|bin/|-- |\n)kvtier ([a-z]+)", text))
    assert commands <= {words.split()[0] for words in cli.COMMANDS}


def test_configuration_files_are_read_whole(tmp_path):
    service = load(DEPLOY / "systemd/kvtier.yaml", env={})
    assert service.nvme.path == "/var/lib/kvtier"
    config_map, daemon_set = documents("kubernetes/server.yaml")
    (tmp_path / "kvtier.yaml").write_text(config_map["data"]["kvtier.yaml"])
    assert load(tmp_path / "kvtier.yaml", env={}).ram.bytes_ == 64 << 30
    assert daemon_set["kind"] == "DaemonSet"
    compose = documents("docker/compose.yaml")[0]["services"]
    server = {
        name: value.replace("${REDIS_PASSWORD:?}", "5ec3e7")
        for name, value in compose["kvtier"]["environment"].items()
    }
    assert load(env=server).value("redis_url") == "redis://:5ec3e7@redis:6379/0"
    got = load(env=compose["engine-2"]["environment"]).server.address
    assert got == "unix:///run/kvtier/kvtier.sock"
    engine, *_ = documents("kubernetes/engine.yaml")
    variables = {row["name"]: row["value"] for row in found(engine, "env")[0]}
    assert load(env=variables).server.address == "unix:///run/kvtier/kvtier.sock"


def test_lmis_file_is_read_as_lmi_writes_it(monkeypatch):
    config = load(env={lmi.PROPERTIES_VARIABLE: str(DEPLOY / "lmi/serving.properties")})
    assert config.engine.auto and config.sources["auto"].startswith("option.lmcache_auto_config in")


def test_lmis_image_has_a_vllm_that_kvtier_runs_with():
    """Which LMI has which vLLM is the README's table. The image of the Dockerfile is in its first
    row."""
    (image,) = re.findall(r"ARG LMI_IMAGE=\S*/(\S+)", TEXT[DEPLOY / "lmi/Dockerfile"])
    rows = [line for line in TEXT[DEPLOY / "lmi/README.md"].splitlines() if image in line]
    assert len(rows) == 1 and rows[0].endswith("| 0.23 and newer | runs |")
    assert versions.verdict("0.23.1.dev4+gcd87ce883") == "vLLM 0.23.1.dev4+gcd87ce883"


def test_server_and_engine_meet_at_one_socket_and_share_no_namespace():
    for file in ("kubernetes/server.yaml", "kubernetes/engine.yaml", "docker/compose.yaml"):
        for document in documents(file):
            for forbidden in ("hostPID", "hostIPC", "hostNetwork", "pid", "ipc", "privileged"):
                assert found(document, forbidden) == [], f"{file}: {forbidden}"
    manifests = [*documents("kubernetes/server.yaml")[1:], documents("kubernetes/engine.yaml")[0]]
    mounts = [found(manifest, "hostPath")[0]["path"] for manifest in manifests]
    assert mounts == ["/run/kvtier", "/run/kvtier"]


# ---- least rights --------------------------------------------------------------------------------

DOCKERFILES = [path for path in FILES if path.name.endswith("Dockerfile")]
SERVICES = documents("docker/compose.yaml")[0]["services"]
ENGINE, *_ = documents("kubernetes/engine.yaml")
PODS = [documents("kubernetes/server.yaml")[1], ENGINE]
POD_NAMES = ["server", "engine"]
USER = 10001


def pod(manifest):
    return dict(manifest["spec"]["template"]["spec"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_images_run_as_a_user_that_is_not_root(path):
    users = re.findall(r"^USER (.*)$", TEXT[path], re.MULTILINE)
    if name(path) == "lmi/Dockerfile":
        assert users == [] and "The user stays LMI's own" in TEXT[path]
        return
    assert users == [f"{USER}:{USER}"] and f"useradd --uid {USER}" in TEXT[path]
    assert TEXT[path].index("USER ") < TEXT[path].index("ENTRYPOINT")


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_what_an_image_is_made_of_is_pinned(path):
    """Bases by digest or by a whole version. Packages by the lists in requirements/: nothing is of
    pip's choice."""
    bases = re.findall(r"^ARG \w+_IMAGE=(.*)$", TEXT[path], re.MULTILINE)
    assert bases and all(
        re.search(r"@sha256:[0-9a-f]{64}$|:v?\d+\.\d+\.\d+[^/]*$", base) for base in bases
    ), bases
    got = set(re.findall(r"^FROM (\S+)", TEXT[path], re.MULTILINE))
    assert got <= {"${PYTHON_IMAGE}", "${VLLM_IMAGE}", "${LMI_IMAGE}"}
    installs = [line for line in TEXT[path].splitlines() if "pip install" in line]
    assert len(installs) == 2
    for line in installs:
        assert "--no-deps" in line and (lists := re.findall(r"-r \S*?/([\w-]+\.txt)", line))
        assert all((ROOT / "requirements" / "images" / each).is_file() for each in lists)
    assert all(":latest" not in image for image in found(SERVICES, "image"))
    assert [image for image in found(SERVICES, "image") if ":" in image] == ["redis:8.2.3"]


def test_the_build_context_is_the_package_and_nothing_more(tmp_path):
    """What .dockerignore lets through, by Docker's rule (the last pattern that matches decides),
    builds a wheel. Secrets, environments and results that lie in a checkout stay out."""
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]

    def kept(path):
        inside = True
        for rule in rules:
            pattern = rule.removeprefix("!").removeprefix("**/")
            parts = path.split("/")
            parents = ["/".join(parts[: count + 1]) for count in range(len(parts))]
            if pattern == "*" or pattern in parents or ("**/" in rule and pattern in parts):
                inside = rule.startswith("!")
        return inside

    secrets = (
        ".git/config .venv/bin/python build/demo/x .env id_rsa bench/results/a.json dist/a.whl"
    )
    assert [path for path in secrets.split() if kept(path)] == []
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for path in filter(kept, tracked):
        target = tmp_path / "context" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target, follow_symlinks=False)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", f"{tmp_path}/dist"]
    subprocess.run(command, cwd=tmp_path / "context", check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert {"kvtier/cli/main.py", "kvtier/bench/long_doc_qa/run.py"} <= set(archive.namelist())
    for copied in re.findall(
        r"^COPY (requirements\S+)", "\n".join(TEXT[path] for path in DOCKERFILES), re.MULTILINE
    ):
        assert kept(copied)


@pytest.mark.parametrize("service", SERVICES, ids=str)
def test_compose_gives_each_service_the_least(service):
    given = SERVICES[service]
    assert given["cap_drop"] == ["ALL"] and "cap_add" not in given
    assert given["security_opt"] == ["no-new-privileges:true"]
    if service.startswith("engine"):
        assert "run:/run/kvtier:ro" in given["volumes"], (
            "an engine must not put another socket there"
        )
        assert "networks" not in given
    else:
        assert given["read_only"] is True and given["networks"] == ["cache"]
        assert "ports" not in given
    assert documents("docker/compose.yaml")[0]["networks"]["cache"] == {"internal": True}
    if given["image"].startswith("redis"):
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", given["user"])


@pytest.mark.parametrize("file", ["compose", "fleet"])
def test_every_container_comes_back_after_a_reboot(file):
    services = documents(f"docker/{file}.yaml")[0]["services"]
    started = [one for one in services.values() if "image" in one]
    assert started and all(one["restart"] == "unless-stopped" for one in started)


def test_composes_redis_asks_for_the_password_that_the_server_gives():
    """Its command line, run here as compose would run it."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server")
    shell, flag, script = SERVICES["redis"]["command"]
    assert "${REDIS_PASSWORD:?}" in SERVICES["kvtier"]["environment"]["KVTIER_REDIS_URL"]
    assert SERVICES["redis"]["environment"] == {"REDIS_PASSWORD": "${REDIS_PASSWORD:?}"}
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "sock"
        script = script.replace("$$", "$").replace(
            "END\n", f"END\nport 0\nunixsocket {socket}\n", 1
        )
        env = os.environ | {"REDIS_PASSWORD": "5ec3e7"}
        with subprocess.Popen(
            [shell, flag, script], env=env, cwd=folder, stdout=subprocess.DEVNULL
        ) as server:
            try:
                wait_for(socket.exists, "redis-server listens")
                with (
                    Redis(unix_socket_path=str(socket)) as nobody,
                    pytest.raises(AuthenticationError),
                ):
                    nobody.get("x")
                with Redis(unix_socket_path=str(socket), password=env["REDIS_PASSWORD"]) as known:
                    assert known.config_get("maxmemory") == {"maxmemory": str(32 << 30)}
                    assert known.config_get("maxmemory-policy") == {
                        "maxmemory-policy": "noeviction"
                    }
                    assert known.config_get("save") == {"save": ""}
            finally:
                server.terminate()


@pytest.mark.parametrize("manifest", PODS, ids=POD_NAMES)
def test_kubernetes_pods_have_the_least(manifest):
    spec = pod(manifest)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    found = (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"])
    assert found == (USER, USER)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False and rights["capabilities"] == {
            "drop": ["ALL"]
        }
        assert "runAsUser" not in rights and "runAsNonRoot" not in rights, "the pod's hold"
    for container in spec.get("initContainers", []):
        rights = container["securityContext"]
        assert container["command"][0] == "install", (
            "it gives two folders to the server's user, and ends"
        )
        assert rights["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
        assert (
            rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"] is True
        )
    mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["run"].get("readOnly", False) == (manifest["kind"] == "Deployment")


def test_every_pod_has_a_network_policy():
    policies = {
        tuple(policy["spec"]["podSelector"]["matchLabels"].items()): policy["spec"]
        for policy in documents("kubernetes/network.yaml")
    }
    for manifest in PODS:
        policy = policies[tuple(manifest["spec"]["template"]["metadata"]["labels"].items())]
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    server = policies[(("app", "kvtier"),)]
    assert server["ingress"] == server["egress"] == [], "it speaks through its Unix socket alone"
    (engine,) = policies[(("app", "vllm"),)]["ingress"]
    assert [port["port"] for port in engine["ports"]] == [8000] and all(engine["from"])
    (named,) = found(engine["from"], "matchExpressions")
    assert named[0]["operator"] == "In" and "monitoring" in named[0]["values"]


def test_workflows_run_actions_of_known_commits_with_no_rights_to_write():
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text(encoding="utf-8")
        uses = re.findall(r"uses: (\S+)", text)
        assert uses and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", use) for use in uses), (
            file.name
        )
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_a_release_is_built_whole_and_published_with_a_secret_alone():
    file = ROOT / ".github" / "workflows" / "release.yml"
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    text = yaml.safe_dump(jobs["build"])
    for built in ("-t wheel", "-t sdist", "server.Dockerfile", "engine.Dockerfile"):
        assert built in text
    assert "secrets." not in text and "push" not in text
    given = {"PACKAGE_INDEX_TOKEN", "REGISTRY_TOKEN"}
    guards = {
        name: step.get("if", "")
        for name in given
        for step in jobs["publish"]["steps"]
        if f"secrets.{name}" in yaml.safe_dump(step.get("env", {}))
    }
    assert guards.keys() == given
    for name in given:
        published = [step for step in jobs["publish"]["steps"] if name in yaml.safe_dump(step)]
        assert published and all(f'test -n "${name}"' in step["run"] for step in published)


# ---- command lines -------------------------------------------------------------------------------


def _composed():
    """Command line, file and variables of the server in compose.yaml."""
    (whole,) = documents("docker/compose.yaml")
    given = whole["services"]["kvtier"]["environment"]
    env = {name: re.sub(r"\$\{.*?\}", "secret", value) for name, value in given.items()}
    return ["--listen", "unix:///run/kvtier/kvtier.sock"], "", env


def _unit():
    """Of the systemd unit, with the example's Redis and without its size."""
    (command,) = re.findall(
        r"(?m)^ExecStart=.* serve (.*)$", TEXT[DEPLOY / "systemd/kvtier.service"]
    )
    file = TEXT[DEPLOY / "systemd/kvtier.yaml"]
    file = file.replace("# redis:", "redis:").replace("#   url: redis", "  url: redis")
    return command.split(), file, {"KVTIER_CONFIG_FILE": "/etc/kvtier/kvtier.yaml"}


def _daemon_set():
    config_map, server = documents("kubernetes/server.yaml")
    redis = {"KVTIER_REDIS_URL": "redis://redis.invalid:6379/0"}
    return found(server, "args")[0], config_map["data"]["kvtier.yaml"], redis


def _charted():
    """Of the chart with a Redis."""
    there = documents("helm/rendered/metrics.yaml")
    (file,) = (one["data"]["kvtier.yaml"] for one in there if one["kind"] == "ConfigMap")
    (server,) = (one for one in there if one["kind"] == "DaemonSet")
    (container,) = pod(server)["containers"]
    assert "KVTIER_REDIS_URL" in [one["name"] for one in container["env"]]
    return container["args"], file, {"KVTIER_REDIS_URL": "redis://:secret@redis.invalid:6379/0"}


@pytest.mark.parametrize("form", [_composed, _unit, _daemon_set, _charted])
def test_a_node_that_reboots_while_redis_is_away_has_a_server(form, tmp_path):
    """As written, with smaller sizes: Redis's name leads nowhere, and no size is given."""
    words, file, variables = form()
    moved = [re.sub("/(run|etc)/[a-z-]*/?", f"{tmp_path}/", word) for word in words]
    for word in moved:
        Path(word.removeprefix("unix://")).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kvtier.yaml").write_text(file)
    named = [Path(word) for word in moved if word.endswith("kvtier.yaml")]
    if named:
        named[0].write_text(file)
    if "KVTIER_CONFIG_FILE" in variables:
        variables["KVTIER_CONFIG_FILE"] = str(tmp_path / "kvtier.yaml")
    small = {"RAM_BYTES": "1MiB", "NVME_BYTES": "16MiB", "NVME_PATH": str(tmp_path / "nvme")}
    env = os.environ | variables | {f"KVTIER_{key}": value for key, value in small.items()}
    command = [sys.executable, "-m", "kvtier", "serve", *moved]
    with subprocess.Popen(
        command, env=env | {"KVTIER_ADMIN": "off"}, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        text = ""
        while "serving at" not in text and (line := server.stderr.readline()):
            text += line
        server.terminate()
        text += server.stderr.read()
    assert "serving at unix://" in text and re.search("redis .* cannot be reached", text), text


def test_probes_ask_for_what_there_is():
    asked = {
        path
        for text in TEXT.values()
        for path in re.findall(r"127\.0\.0\.1:9588(/[a-z0-9/]+)", text)
    }
    assert {"/healthz/live", "/healthz/ready"} <= asked <= {route.path for route in ROUTES}
    probes = found(documents("kubernetes/server.yaml")[1], "containers")[0][0]
    assert "ready" in str(probes["startupProbe"]) and "ready" in str(probes["readinessProbe"])
    assert "live" in str(probes["livenessProbe"]) and "ready" not in str(probes["livenessProbe"])


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    unit, made = tmp_path / "kvtier.service", tmp_path / "kvtier.socket"
    text, socket = TEXT[DEPLOY / "systemd/kvtier.service"], TEXT[DEPLOY / "systemd/kvtier.socket"]
    assert "\nType=notify\n" in text and re.search(r"^WatchdogSec=\d+$", text, re.MULTILINE)
    assert "\nSocketMode=0600\n" in socket, "kvtier refuses a wider one"
    assert "\nRuntimeDirectoryPreserve=yes\n" in text, "else a stop removes the socket"
    unit.write_text(text.replace("/opt/kvtier/bin/kvtier", sys.executable))
    made.write_text(socket)
    command = ["systemd-analyze", "verify", str(unit), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "kvtier" not in done.stderr, done.stderr


def test_an_engine_in_other_namespaces_maps_the_servers_memory():
    """What the manifests rest on: another PID, IPC and network namespace, and only the socket in
    common, in a folder that the engine's side mounts read-only."""
    apart = ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    with serving() as server, attached(server.access()):
        run = server.socket.parent
        mount = f"mount --bind {run} {run} && mount -o remount,ro,bind {run} && ! touch {run}/x"
        engine = shlex.join([sys.executable, "-m", "kvtier", "doctor", "--no-engine"])
        command = [*apart, "sh", "-c", f"{mount} 2>/dev/null && exec {engine}"]
        done = ran(command, bare(KVTIER_SERVER=server.address))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    self-test server" in done.stdout and "ok    self-test ram" in done.stdout
