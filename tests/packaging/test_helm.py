"""deploy/helm: what its templates become is held to what the Kubernetes files are held to. The
rendered files are checked in. Where there is a Go, its own template engine makes them again."""

import copy
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvtier.config.load import NO_KEYS, load
from tests.packaging import test_deploy
from tests.packaging.test_deploy import DEPLOY, USER, documents, found, pod

CHART = DEPLOY / "helm"
FORMS = {"default": (), "metrics": ("values-metrics.yaml",)}
GO = shutil.which("go")


def rendered(form):
    """By kind and name."""
    made = documents(f"helm/rendered/{form}.yaml")
    return {(one["kind"], one["metadata"]["name"]): one for one in made}


def merged(values, more):
    """As Helm merges a file of values into those of the chart."""
    both = dict(values)
    for name, value in more.items():
        old = both.get(name)
        whole = not (isinstance(value, dict) and isinstance(old, dict))
        both[name] = value if whole else merged(dict(old or {}), value)
    return both


def render(values):
    program = Path(__file__).with_name("render_chart.go")
    templates = sorted(map(str, (CHART / "templates").glob("*.yaml")))
    return subprocess.run(
        [str(GO), "run", str(program), *templates],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
    )


def values_of(form):
    values = dict(documents("helm/values.yaml")[0])
    for file in FORMS[form]:
        values = merged(values, documents(f"helm/{file}")[0])
    return values


@pytest.mark.skipif(GO is None, reason="there is no go")
@pytest.mark.parametrize("form", FORMS)
def test_the_rendered_files_are_what_the_templates_make(form):
    done = render(values_of(form))
    assert done.returncode == 0, done.stderr
    made = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert made == documents(f"helm/rendered/{form}.yaml"), "write them again"


@pytest.mark.skipif(GO is None, reason="there is no go")
def test_metrics_without_a_token_are_refused_in_words():
    done = render(merged(values_of("default"), {"metrics": {"enabled": True}}))
    assert done.returncode != 0 and "metrics needs server.secret.adminToken" in done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_pods_have_the_least(form):
    there = rendered(form)
    for kind in (("DaemonSet", "kv-kvtier"), ("Deployment", "kv-vllm")):
        test_deploy.test_kubernetes_pods_have_the_least(there[kind])
        for forbidden in ("hostPID", "hostIPC", "hostNetwork", "privileged"):
            assert found(there[kind], forbidden) == []
        (container,) = pod(there[kind])["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    probes = pod(there["DaemonSet", "kv-kvtier"])["containers"][0]
    assert "ready" in str(probes["readinessProbe"]) and "live" in str(probes["livenessProbe"])


@pytest.mark.parametrize("form", FORMS)
def test_server_and_engine_meet_at_one_socket(form):
    there = rendered(form)
    server, engine = pod(there["DaemonSet", "kv-kvtier"]), pod(there["Deployment", "kv-vllm"])
    assert server["volumes"][0]["hostPath"]["path"] == engine["volumes"][0]["hostPath"]["path"]
    (address,) = found(engine["containers"][0]["env"], "value")
    assert address in server["containers"][0]["args"]
    limits = server["containers"][0]["resources"]
    assert limits["limits"]["memory"] == limits["requests"]["memory"]


@pytest.mark.parametrize("form", FORMS)
def test_the_server_reads_its_file_and_variables(form, tmp_path, monkeypatch):
    there = rendered(form)
    file = tmp_path / "kvtier.yaml"
    file.write_text(there["ConfigMap", "kv-kvtier"]["data"]["kvtier.yaml"])
    (container,) = pod(there["DaemonSet", "kv-kvtier"])["containers"]
    env = {one["name"]: one.get("value", "redis://x") for one in container["env"]}
    config = load(str(file), env=env)
    assert config.ram.bytes_ == 64 << 30
    server, folders = pod(there["DaemonSet", "kv-kvtier"]), (config.nvme.path or "").split(",")
    disks = ["/var/lib/kvtier-one", "/var/lib/kvtier-two"] if form == "metrics" else []
    assert folders == ["/var/lib/kvtier", *disks]
    assert server["initContainers"][0]["command"][-len(folders) :] == folders
    volumes = {volume["name"] for volume in server["volumes"]}
    for one in (container, server["initContainers"][0]):
        mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        assert len({mounts[folder] for folder in folders} & volumes) == len(folders)
    assert not {name.removeprefix("KVTIER_") for name in env} & set(NO_KEYS)
    with_secrets = form == "metrics"
    assert (config.admin.address == "http://0.0.0.0:9588") == with_secrets
    secrets = (
        config.admin.token_file,
        config.engine.encryption_key_file,
        config.value("redis_url"),
    )
    assert all(secrets) == any(secrets) == with_secrets


def test_metrics_are_scraped_with_the_token_and_by_nobody_else():
    plain, there = rendered("default"), rendered("metrics")
    assert plain["NetworkPolicy", "kv-kvtier"]["spec"]["ingress"] == []
    assert plain["NetworkPolicy", "kv-kvtier"]["spec"]["egress"] == []
    assert ("PodMonitor", "kv-kvtier") not in plain
    (rule,) = there["NetworkPolicy", "kv-kvtier"]["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [9588] and rule["from"]
    (endpoint,) = there["PodMonitor", "kv-kvtier"]["spec"]["podMetricsEndpoints"]
    server = pod(there["DaemonSet", "kv-kvtier"])
    (port,) = server["containers"][0]["ports"]
    assert (endpoint["port"], port["containerPort"]) == (port["name"], 9588)
    token = endpoint["authorization"]["credentials"]
    (secret,) = found(server["volumes"], "secret")
    assert (token["name"], secret["defaultMode"]) == (secret["secretName"], 0o440)
    assert server["securityContext"]["fsGroup"] == USER, "or the server cannot read it"
    env = {one["name"]: one.get("value") for one in server["containers"][0]["env"]}
    assert not str(env["KVTIER_ADMIN_TOKEN_FILE"]).endswith(f"/{token['key']}"), "which can clear"
    for form in (plain, there):
        rules = form["NetworkPolicy", "kv-vllm"]["spec"]["ingress"]
        assert {port["port"] for rule in rules for port in rule["ports"]} == {8000}
        assert all(rule["from"] for rule in rules)


def test_engines_are_scraped_from_the_same_namespace_as_the_server():
    there = rendered("metrics")
    (server,) = there["NetworkPolicy", "kv-kvtier"]["spec"]["ingress"]
    assert server["from"] in [
        rule["from"] for rule in there["NetworkPolicy", "kv-vllm"]["spec"]["ingress"]
    ]
    labels = there["PodMonitor", "kv-vllm"]["spec"]["selector"]["matchLabels"]
    assert labels == there["Deployment", "kv-vllm"]["spec"]["selector"]["matchLabels"]
    (endpoint,) = there["PodMonitor", "kv-vllm"]["spec"]["podMetricsEndpoints"]
    (port,) = pod(there["Deployment", "kv-vllm"])["containers"][0]["ports"]
    assert endpoint["port"] == port["name"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("service", ["kv-vllm", "kv-vllm-each"])
def test_a_service_leads_to_the_engines(form, service):
    there = rendered(form)
    spec = there["Service", service]["spec"]
    engine = there["Deployment", "kv-vllm"]["spec"]
    assert spec["selector"].items() <= engine["template"]["metadata"]["labels"].items()
    (port,), (container,) = spec["ports"], pod(there["Deployment", "kv-vllm"])["containers"]
    assert port["targetPort"] in [one["name"] for one in container["ports"]]
    assert (spec.get("clusterIP") == "None") == service.endswith("each")


@pytest.mark.parametrize("form", FORMS)
def test_two_releases_share_no_name_and_no_folder_of_a_host(form):
    there = rendered(form)
    assert all(name.startswith("kv-") for _, name in there)
    for kind in (("DaemonSet", "kv-kvtier"), ("Deployment", "kv-vllm")):
        for path in found(pod(there[kind])["volumes"], "hostPath"):
            assert path["path"].endswith("/kv")


def named(values, schema, path=()):
    """Paths of the values that the chart has names for. Those of an open object are the user's."""
    if not schema.get("properties"):
        return {path}
    return {path}.union(
        *(named(values[key], schema["properties"][key], (*path, key)) for key in values)
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_misspelt_value_is_an_error(form):
    """As Helm holds values to values.schema.json: at every level where the chart has the names."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    check = jsonschema.Draft7Validator(schema)
    values = values_of(form)
    check.validate(values)
    places = named(values, schema)
    assert len(places) > 35, "every value has a row in the schema"
    for place in places - {()}:
        wrong = copy.deepcopy(values)
        inside = wrong
        for step in place[:-1]:
            inside = inside[step]
        inside[place[-1] + "x"] = inside.pop(place[-1])
        (error,) = check.iter_errors(wrong)
        assert f"'{place[-1]}x' was unexpected" in error.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": 0},
        {"engine": {"args": []}},
        {"server": {"nvmeFolder": "mnt"}},
        {"server": {"disks": [{"name": "one"}]}},
        {"server": {"disks": [{"name": "one", "folder": "/mnt", "volume": {}}]}},
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error(wrong):
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert not jsonschema.Draft7Validator(schema).is_valid(merged(values_of("default"), wrong))
