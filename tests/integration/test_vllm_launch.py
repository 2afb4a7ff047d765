"""The operator's first five minutes on a real vLLM: one variable and one word. LMCache's place
taken as LMI has it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from tests.command import bare, ran
from tests.engine_python import engine_python
from tests.fence import fence
from tests.integration.http_engine import HttpEngine
from tests.integration.scenarios import ARGUMENTS, document

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("nothing_set")]

GIB = 2**30
MEMORY = 8 * GIB
DISK = 6 * GIB
HIT = 512
START_S = 300.0
ENGINE = """--served-model-name tiny --dtype float32 --enforce-eager --block-size 32
    --enable-prompt-tokens-details"""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Launched(HttpEngine):
    """``kvtier launch -- vllm serve MODEL ...`` behind the fence. ``words``: launch's own."""

    def __init__(self, enter, model, args, env, log, *words):
        super().__init__(model, args, env, log, START_S)
        python = engine_python()
        vllm = Path(python).with_name("vllm")
        launch = [python, "-m", "kvtier", "launch", *words, "--", str(vllm), "serve", model]
        begin = ["unshare", "-m", "bash", "-c", f'{enter} && exec "$@"', "bash"]
        self._command = [*begin, *launch, "--host", "127.0.0.1", *args]

    def answer(self, prompt):
        told = self.complete(prompt)
        return told["tokens"], told["cached"]


def test_one_variable_and_one_word_are_all(tmp_path):
    with fence(tmp_path, MEMORY, DISK) as (disk, enter):
        make_model(disk / "tiny", "tiny")
        args = shlex.split(f"{ENGINE} --max-model-len 736 --num-gpu-blocks-override 24")
        (disk / "lmcache.yaml").write_text(
            "chunk_size: 256\nmax_local_cpu_size: 900\nenable_p2p: true\n"
        )
        env = QUIET | {
            "OPTION_LMCACHE_AUTO_CONFIG": "true",
            "LMCACHE_CONFIG_FILE": "/tmp/lmcache.yaml",
        }
        log = tmp_path / "server.log"
        server = Launched(enter, "/tmp/tiny", args, env, log)
        with server:
            first = [server.answer(document(seed)) for seed in range(3)]
            again, cached = server.answer(document(0))
            served = server.metric("vllm:external_prefix_cache_hits_total")
            loaded = server.metric("vllm:kvtier_loaded_chunks_total")
            said = log.read_text()
    assert [hit for _, hit in first] == [0, 0, 0]
    assert (again, cached, served) == (first[0][0], HIT, HIT)
    assert loaded == HIT / 256, "kvtier's own counts on vLLM's /metrics"
    assert re.search(r"kvtier \d[.\d]*, vLLM", said), "whose lines these are"
    assert re.search(rf"kvtier: {HIT} of [\d,]+ tokens from (RAM|NVMe) in \d+ ms", said)
    assert len([one for one in said.splitlines() if "auto-config:" in one]) < 4, "no table"
    assert "auto-config (environment OPTION_LMCACHE_AUTO_CONFIG)" in said
    (used,) = re.findall(r"auto-config: (ram_bytes .*)", said)
    planned = dict(re.findall(r"(ram_bytes|nvme_path|nvme_bytes) ([^,;]+)", used))
    assert float(planned["ram_bytes"].split()[0]) < MEMORY / GIB
    assert planned["nvme_path"] in ("/tmp/kvtier", "/var/tmp/kvtier")
    assert float(planned["nvme_bytes"].split()[0]) < DISK / GIB
    assert_told_once(said, "INFO", "LMCache key chunk_size=256 -> chunk_tokens=256")
    assert_told_once(said, "WARNING", "LMCache key enable_p2p=True: has no effect in kvtier")
    assert_told_once(
        said,
        "WARNING",
        "environment LMCACHE_CONFIG_FILE names /tmp/lmcache.yaml: sizes are auto-config's",
    )


def assert_told_once(said, level, text):
    """In the log of an engine's three processes there is one such line, as vLLM writes its own:
    level, time, file. ``launch`` may have said it before."""
    form = rf"\b{level} \d\d-\d\d [\d:]+ \[\w+\.py:\d+\].*{re.escape(text)}"
    assert len([line for line in said.splitlines() if re.search(form, line)]) == 1


def test_lmcaches_connector_is_served_by_kvtier_as_lmi_configures_it(tmp_path):
    model, out, disk = (
        make_model(tmp_path / "tiny", "tiny"),
        tmp_path / "answers.json",
        tmp_path / "lmcache",
    )
    djl = {
        "OPTION_LMCACHE_AUTO_CONFIG": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "1.0",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1.0",
        "LMCACHE_LOCAL_DISK": f"file://{disk}/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "True",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "PYTHONHASHSEED": "0",
    }
    command = [engine_python(), "-m", "tests.integration.scenarios", "plain", str(out), str(model)]
    lmi = {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}
    more = {ARGUMENTS: json.dumps(lmi), "KVTIER_REPLACE_LMCACHE": "1"}
    done = ran(command, bare() | QUIET | djl | more)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    answers = json.loads(out.read_text())
    assert [answer["cached"] for answer in answers] == [0, 0, 0, HIT, HIT, HIT]
    assert [answer["tokens"] for answer in answers[:3]] == [
        answer["tokens"] for answer in answers[3:]
    ]
    assert "kv_connector LMCacheConnectorV1 is served by kvtier" in said
    assert "RAM 2048 chunks (1 GiB)" in said
    assert re.search(r"auto-config: ram_bytes 1 GiB \(yours; the plan would be ", said)
    (used,) = re.findall(r"configuration: (.*)", said)
    assert "ram_bytes=1 GiB (environment LMCACHE_MAX_LOCAL_CPU_SIZE)" in used
    assert list(disk.glob("*.kvtier")), "LMCACHE_LOCAL_DISK was not read"
    for key in (
        *(name.removeprefix("LMCACHE_").lower() for name in djl if name.startswith("LMCACHE_")),
        "pythonhashseed",
    ):
        shown = "extra_config.use_odirect" if key == "extra_config" else key
        assert_told_once(said, "INFO", f"LMCache key {shown}=")
