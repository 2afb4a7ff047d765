"""deploy/prometheus and deploy/grafana by a real Prometheus that scrapes a real server: every rule
is evaluated, and every panel has data."""

import json
import re
import shutil
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest
import yaml

from kvtier.bench.processes.companion import companion
from kvtier.bench.processes.servers import answers, free_port
from kvtier.config.keys import Config
from kvtier.core.lookup import Served
from kvtier.started import Started
from tests.admin_server import administered
from tests.child_process import DEADLINE_S, wait_for
from tests.command import ran
from tests.conftest import ROOT
from tests.server_process import LAYOUT, attached, load, run, save

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus")

DEPLOY = ROOT / "deploy"
WINDOW = "1m"


class Prometheus:
    def __init__(self, url):
        self._url = url

    def ask(self, path, **query):
        asked = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as reply:  # noqa: S310
            return json.load(reply)["data"]

    def value(self, expression):
        return [float(one["value"][1]) for one in self.ask("query", query=expression)["result"]]

    def rules(self):
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


@contextmanager
def scraping(port, folder):
    """Prometheus with the configuration of deploy/prometheus, faster, and without the engine that
    is not there."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "500ms",
    }
    config["rule_files"] = [str(DEPLOY / "prometheus/alerts.yml")]
    kvtier, vllm = config["scrape_configs"]
    assert (kvtier["job_name"], vllm["job_name"]) == ("kvtier", "vllm")
    kvtier["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    config["scrape_configs"] = [kvtier]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    own = free_port()
    url = f"http://127.0.0.1:{own}"
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn"]
    log = folder / "prometheus.log"
    with companion(command, {}, lambda: answers(f"{url}/-/ready"), log, DEADLINE_S):
        yield Prometheus(url)


def use(server, times):
    named = replace(LAYOUT, model="tiny")
    with attached(
        Started(Config().with_keys(server=str(server.address))).access(str(server.address), named)
    ) as client:
        for prompt in range(times):
            save(client, run(prompt, 3))
            client.lookup(run(prompt, 3))
            load(client, run(prompt, 3))
            client.served(Served(60, {"ram": 30}, run(prompt, 3)[:2], 10))


def names(expression):
    return set(re.findall(r"\bkvtier_[a-z_]+", expression))


def test_every_rule_is_evaluated_and_every_panel_has_data(tmp_path):
    board = json.loads((DEPLOY / "grafana/kvtier.json").read_text())
    with administered(slot_bytes=8192) as server, scraping(server.port, tmp_path) as prometheus:
        use(server, 20)
        wait_for(
            lambda: prometheus.value(f"count_over_time(kvtier_ready[{WINDOW}]) > 3") != [],
            "some scrapes",
        )
        for name, tokens in (("asked", 60), ("ideal", 50), ("hit", 30)):
            asked, wanted = f"sum(kvtier_{name}_tokens_total)", [20 * tokens]
            wait_for(lambda: prometheus.value(asked) == wanted, f"{asked} is {wanted}")  # noqa: B023
        wait_for(
            lambda: all(rule["health"] == "ok" for rule in prometheus.rules()),
            "rules were evaluated",
        )
        rules = prometheus.rules()
        wrong = [
            rule["name"] for rule in rules if rule["health"] != "ok" or rule["state"] == "firing"
        ]
        assert len(rules) > 10 and wrong == []
        there = set(prometheus.ask("label/__name__/values"))
        for rule in rules:
            assert names(rule["query"]) and names(rule["query"]) <= there, rule["name"]
        for panel in board["panels"]:
            for target in panel["targets"]:
                if re.search("vllm:|kvtier_(sglang|tier|disk)_", target["expr"]):
                    continue  # an engine has it, or a server with several disks
                expression = target["expr"].replace("$__rate_interval", WINDOW)
                expression = expression.replace("$instance", ".*")
                wait_for(
                    lambda asked=expression: prometheus.value(asked) != [],
                    f"{panel['title']}: {expression}",
                )
        assert prometheus.value("sum(kvtier_lookup_seconds_count)")[0] >= 20
        (slowest,) = prometheus.value(
            "histogram_quantile(1, sum by (le) (kvtier_lookup_seconds_bucket))"
        )
        assert 0 < slowest < 5
        worn = "sum(kvtier_lifetime_written_bytes)"
        written = 'sum(kvtier_stores_total{tier="nvme"})'
        assert prometheus.value(f"{worn} == 8192 * {written}") != []
        (room,) = board["templating"]["list"][1:]
        variable = re.fullmatch(r"label_values\((\w+), instance\)", room["query"])
        assert variable and variable[1] in there


def test_an_alert_fires_for_what_it_is_for(tmp_path):
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    with administered() as server, scraping(server.port, tmp_path) as prometheus:
        (gone,) = [rule for rule in rules["groups"][0]["rules"] if rule["alert"] == "KvtierGone"]
        wait_for(lambda: prometheus.value("kvtier_ready") == [1], "a scrape")
        assert prometheus.value(gone["expr"]) == []
        server.kill()
        wait_for(lambda: prometheus.value(gone["expr"]) == [1], "it is missed")


@pytest.mark.parametrize("file", ["prometheus.yml", "fleet.yml"])
def test_promtool_finds_nothing_wrong(tmp_path, file):
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    token = tmp_path / "token"
    token.touch()
    text = (DEPLOY / "prometheus" / file).read_text()
    (tmp_path / file).write_text(text.replace("/run/secrets/metrics-token", str(token)))
    shutil.copy(DEPLOY / "prometheus/alerts.yml", tmp_path)
    done = ran(["promtool", "check", "config", str(tmp_path / file)])
    assert done.returncode == 0, done.stdout + done.stderr
