"""What an operator types and sees, through real processes: ``python -m kvtier ...``."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from kvtier.config.keys import KEYS
from tests.child_process import wait_for
from tests.command import ROOT, bare, kvtier
from tests.model_configs import MODELS
from tests.server_process import ServerProcess, attached, serving


def without(folder, *modules):
    """An environment in which these modules cannot be imported, as in one that lacks their
    packages."""
    blocked = "".join(f"sys.modules[{module!r}] = None\n" for module in modules)
    (folder / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_config_takes_a_file_by_a_relative_path_and_shows_what_is_in_effect(tmp_path):
    (tmp_path / "k.yaml").write_text("ram: {bytes: 107374182400}\nnvme: {path: /var/tmp}\n")
    done = kvtier("config", "--config", "k.yaml", "--nvme-write-limit", "2TiB", cwd=tmp_path)
    heads, *rows = done.stdout.splitlines()
    unit, source = heads.index("unit"), heads.index("source")
    shown = {row.split()[0]: row for row in rows}
    units = {key.path: key.unit for key in KEYS.values()}
    assert list(shown) == list(units)
    for key, row in shown.items():
        assert row[unit - 2 : unit] == row[source - 2 : source] == "  ", (
            "columns are as wide as their widest cell"
        )
        assert row[unit:].startswith(units[key])
    assert "100 GiB" in shown["ram.bytes"] and "file k.yaml" in shown["ram.bytes"]
    assert "2 TiB" in shown["nvme.write_limit"]
    assert shown["nvme.bytes"].split()[2] == "GiB", (
        "what would be taken, not what the key says when it is not there"
    )
    assert not [row for row in rows if row[: heads.index("what for")].split()[1] == "none"]


@pytest.mark.parametrize("words", [("config",), ("plan", "--no-measure")])
def test_a_reader_that_goes_away_ends_it_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvtier", *words]
    done = subprocess.run(
        command, env=bare(), stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_doctor_blames_a_missing_cipher_on_no_disk(tmp_path):
    settings = {
        "KVTIER_ENCRYPTION_KEY": "ab" * 32,
        "KVTIER_NVME_PATH": tmp_path / "n",
        "KVTIER_NVME_BYTES": "256MiB",
    }
    done = kvtier("doctor", "--no-engine", env=without(tmp_path, "cryptography") | settings)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert done.returncode == 1 and "encryption" in line and "pip install 'cryptography>=" in line
    assert "dmesg" not in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "bench long-doc-qa --arms none --model /no/such/model",
        "bench long-doc-qa --server-args '",
        "config --config .",
        "config --ranks 0",
        "plan --model /no/such/model",
        "plan --disk-speed fast",
        "check --nvme /no/such/folder",
        "stats --admin http://127.0.0.1:1",
        "clear --everything --token-file /no/such/token",
        "launch -- vllm serve",
        "launch --config /no/such.yaml -- /no/such/vllm serve m",
        "serve --listen nowhere",
    ],
)
def test_an_operators_mistake_is_2_and_told_in_words(words, tmp_path):
    done = kvtier(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stderr.strip() and "_positive" not in done.stderr
    assert words.startswith("bench") or done.stderr.count("\n") <= 12, "no page of usage"


def test_paths_typed_at_a_shell_may_be_relative(tmp_path):
    token = tmp_path / "tok"
    token.write_text("a" * 64)
    token.chmod(0o600)
    with ServerProcess(tmp_path, admin="http://127.0.0.1:0", admin_token_file=token) as server:
        wait_for(
            lambda: "admin interface at" in server.log.read_text(encoding="utf-8"),
            "its admin interface",
        )
        url = re.findall(
            r"admin interface at (http://[\d.:]+)", server.log.read_text(encoding="utf-8")
        )[0]
        cleared = kvtier(
            "clear", "--everything", "--admin", url, "--token-file", "tok", cwd=tmp_path
        )
        assert (cleared.returncode, cleared.stdout) == (0, "0 chunks dropped\n"), cleared.stderr
        again = kvtier(
            "clear", "--everything", "--json", "--admin", url, "--token-file", "tok", cwd=tmp_path
        )
        assert json.loads(again.stdout)["complete"] is True
    shown = kvtier("config", "--nvme-path", "n", "--json", cwd=tmp_path).stdout
    assert next(row["value"] for row in json.loads(shown) if row["key"] == "nvme_path") == str(
        tmp_path / "n"
    )
    refused = kvtier("config", env={"KVTIER_NVME_PATH": "n"})
    assert refused.returncode == 2 and "expected an absolute path" in refused.stderr


def test_a_servers_log_counts_in_bytes_what_it_does_not_know_in_tokens():
    with serving() as server, attached(server.access()):
        log = server.log.read_text(encoding="utf-8")
    assumed = [line for line in log.splitlines() if "(assumed: a model of" in line]
    assert len(assumed) == 1 and "what a hit saves" in assumed[0]
    assert "chunks of 8 KiB; RAM 32 chunks (256 KiB)" in log
    assert "tokens" not in log.replace(assumed[0], "")


def hub(folder, name, config):
    """A hub cache that has one model, in huggingface_hub's form."""
    model = folder / f"models--{name.replace('/', '--')}"
    files = model / "snapshots" / "0123456789abcdef"
    files.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(files.name)
    (files / "config.json").write_text(json.dumps(config))
    return files


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "HOME"])
def test_plan_finds_a_hub_name_in_the_local_cache(variable, tmp_path):
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "HOME": ".cache/huggingface/hub"}[variable]
    files = hub(tmp_path / below, "Qwen/Qwen2.5-72B-Instruct", MODELS["qwen2.5-72b"])
    (files / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1000000000}}')
    env = {variable: tmp_path, "XDG_CACHE_HOME": ""}
    what_if = shlex.split("--no-measure --ram 1130GiB --gpu A100-80GB:8 --tp 4 --disk 7TiB")
    done = kvtier("plan", "--model", "Qwen/Qwen2.5-72B-Instruct", *what_if, env=env)
    assert done.returncode == 0, done.stderr
    assert "320 KiB" in done.stdout and "hub cache, commit 0123456789ab" in done.stdout
    assert "2 x weights of 953.7 MiB" in done.stdout
