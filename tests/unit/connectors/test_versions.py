"""Which vLLM kvtier runs with: below the floor every road ends with one sentence, above it what is
missing is off."""

import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli.vllm_command import API_SERVER
from kvtier.connectors.vllm import versions
from kvtier.core.errors import ConfigError
from tests.child_process import DEADLINE_S

ROOT = Path(__file__).parents[3]
OLD = "0.15.1"
TOO_OLD = "vLLM 0.15.1 is too old: kvtier needs 0.23 or newer"
FACTORY = """
import importlib
class KVConnectorFactory:
    _registry = {"LMCacheConnectorV1": None}
    @classmethod
    def register_connector(cls, name, module, attribute):
        cls._registry[name] = lambda: getattr(importlib.import_module(module), attribute)
"""
PLUGIN = """
from kvtier.connectors.vllm import register
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(sorted(KVConnectorFactory._registry))
KVConnectorFactory._registry["{name}"]()
"""
MODULE_PATH = "import importlib; importlib.import_module('kvtier.connectors.vllm').KVTierConnector"


@pytest.fixture
def old(tmp_path):
    """A folder for PYTHONPATH with a vLLM 0.15.1 that has a registry of connectors, and nothing
    else."""
    home = tmp_path / "site"
    factory = home / "vllm/distributed/kv_transfer/kv_connector/factory.py"
    factory.parent.mkdir(parents=True)
    factory.write_text(FACTORY)
    (home / "vllm/__init__.py").write_text(f"__version__ = '{OLD}'\n")
    folder = home / f"vllm-{OLD}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {OLD}\n")
    return home


def run(words, old, **more):
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVTIER_", "OPTION_", "LMCACHE_"))
    }
    env |= {"PYTHONPATH": f"{old}:{ROOT}", **more}
    return subprocess.run(
        words, cwd=old, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def self_check():
    """The last command of deploy/lmi/Dockerfile's build, with this Python."""
    (text,) = re.findall(r"&& (python3 .*)", (ROOT / "deploy/lmi/Dockerfile").read_text())
    return [sys.executable, *shlex.split(text)[1:]]


ROADS = {
    "plug-in": [sys.executable, "-c", PLUGIN.format(name="KVTierConnector")],
    "plug-in, for LMCache": [sys.executable, "-c", PLUGIN.format(name="LMCacheConnectorV1")],
    "module path": [sys.executable, "-c", MODULE_PATH],
    "launch": [
        sys.executable,
        "-m",
        "kvtier",
        "launch",
        "--",
        "{old}/python3",
        "-m",
        API_SERVER,
        "--model",
        "m",
    ],
    "doctor": [sys.executable, "-m", "kvtier", "doctor"],
    "Dockerfile": self_check(),
}


@pytest.mark.parametrize("road", ROADS)
def test_below_the_floor_every_road_ends_with_the_same_sentence(road, old):
    with pytest.raises(ConfigError, match=TOO_OLD) as refusal:
        versions.verdict(OLD)
    (old / "python3").symlink_to(sys.executable)  # launch knows a command by its program's name
    done = run(
        [word.replace("{old}", str(old)) for word in ROADS[road]], old, KVTIER_REPLACE_LMCACHE="1"
    )
    assert done.returncode != 0
    assert str(refusal.value) in done.stdout + done.stderr


def test_an_old_engine_that_does_not_ask_for_kvtier_goes_on(old):
    """vLLM loads the plug-in in every engine of the environment, whatever its connector."""
    done = run([sys.executable, "-c", PLUGIN.rsplit("\n", 2)[0]], old)
    assert done.returncode == 0, done.stderr
    assert "KVTierConnector" in done.stdout


def test_the_self_check_passes_what_kvtier_runs_with(old):
    (old / f"vllm-{OLD}.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.23.1.dev4+gcd\n"
    )
    done = run(self_check(), old)
    assert (done.returncode, done.stdout) == (0, "vLLM 0.23.1.dev4+gcd\n"), done.stderr


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.23.0", "vLLM 0.23.0"),
        ("0.23.0rc1", "vLLM 0.23.0rc1"),
        ("0.33.4", "vLLM 0.33.4"),
        ("0.31.0", "vLLM 0.31.0 (not tested; 0.23.0, 0.29.0, 0.32.0, 0.33.0 are)"),
        ("1.2.0", "vLLM 1.2.0 (not tested; 0.23.0, 0.29.0, 0.32.0, 0.33.0 are)"),
        ("dev", "vLLM dev (not tested; 0.23.0, 0.29.0, 0.32.0, 0.33.0 are)"),
    ],
)
def test_what_is_not_too_old_passes(version, said):
    assert versions.verdict(version) == said


@pytest.mark.parametrize("version", ["0.22.9", "0.9.2", "0.0.1"])
def test_what_is_too_old_does_not(version):
    with pytest.raises(ConfigError, match=f"vLLM {version} is too old"):
        versions.verdict(version)


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("0.23.0", True),
        ("0.28.9", True),
        ("0.29.0", False),
        ("0.32.0+cpu", False),
        ("1.2.0", False),
        ("dev", False),
    ],
)
def test_an_older_vllm_is_told_statistics_by_a_worker_first(version, first):
    assert versions.workers_tell_first(version) is first


def test_a_hook_that_is_missing_costs_its_feature_and_is_told():
    class Oldest:
        def wait_for_save(self): ...

    class Newest(Oldest):
        def has_pending_push_work(self): ...
        def get_external_cache_hit_sources(self): ...

    assert versions.limits(Newest) == []
    told = versions.limits(Oldest)
    assert [line.partition(": ")[0] for line in told] == [
        "this vLLM has no has_pending_push_work",
        "this vLLM has no get_external_cache_hit_sources",
    ]
    assert told[1].endswith("vLLM's metrics do not split hits by source")


@pytest.mark.vllm
@pytest.mark.slow
def test_the_class_itself_refuses_too():
    """For who names its module by its own path."""
    script = "import vllm; vllm.__version__ = '0.22.0'\n"
    script += (
        "from kvtier.connectors.vllm import connector; connector.KVTierConnector(None, None, None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "ConfigError: vLLM 0.22.0 is too old: kvtier needs 0.23 or newer" in done.stderr


@pytest.mark.parametrize(
    ("runner", "ahead", "words"),
    [
        (True, True, "Model Runner V2, async scheduling"),
        (False, False, "Model Runner V1, synchronous scheduling"),
        (None, True, "async scheduling"),
    ],
)
def test_the_log_says_which_runner_and_scheduling_an_engine_has(runner, ahead, words):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    if runner is not None:
        config.use_v2_model_runner = runner
    assert versions.mode(config) == words


def test_where_vllm_does_not_say_what_is_in_flight_it_is_one_step():
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=512))
    assert versions.in_flight_tokens(config) == 512
    config.max_in_flight_tokens = 3 * 512
    assert versions.in_flight_tokens(config) == 3 * 512


def test_a_line_in_vllms_log_says_whose_it_is(monkeypatch, capsys):
    """vLLM's format has the name of a file alone. Its handlers keep their own level."""
    stream, loud = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stdout)
    stream.setFormatter(logging.Formatter("[%(filename)s] %(message)s"))
    loud.setLevel(logging.ERROR)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [stream, loud])
    ours = logging.getLogger("kvtier")
    for name, value in (("handlers", []), ("propagate", True), ("level", ours.level)):
        monkeypatch.setattr(ours, name, value)
    for _ in range(2):  # a process has several connectors
        versions.log_like_vllm("INFO")
    logging.getLogger("kvtier.tiers.nvme.files").info("%d chunks", 3)
    logging.getLogger("kvtier").info("kvtier 1.0, vLLM 2.0")
    assert capsys.readouterr().out == (
        "[test_versions.py] kvtier: 3 chunks\n[test_versions.py] kvtier 1.0, vLLM 2.0\n"
    )
