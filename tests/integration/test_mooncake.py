"""kvtier and Mooncake's store: a real master and a real pool, over TCP, and real vLLM with
KVTierConnector and MooncakeStoreConnector in one MultiConnector, or with kvtier's own tier."""

import json
import re
import subprocess
from typing import Any

import pytest

from tests.command import bare
from tests.conftest import ROOT
from tests.integration.conftest import EVERY_MODE
from tests.integration.engine_modes import TOLD
from tests.integration.scenarios import CHUNK
from tests.integration.test_vllm import DOCUMENT_HIT
from tests.integration.transfer import EVERY_HIT
from tests.mooncake_pool import mooncake, python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

BUFFER_MB = 64
LIMIT_S = 400.0
DOCUMENTS = 3


def file_for(folder, pool):
    """The file that vLLM's own connector needs to reach it."""
    file = folder / "mooncake.json"
    settings = json.loads((ROOT / "deploy/mooncake/mooncake.json").read_text())
    settings |= {"master_server_address": pool.address, "local_buffer_size": f"{BUFFER_MB}MB"}
    file.write_text(json.dumps(settings))
    return file


def pages_export(pool):
    """The line by which the page gives an engine the tier, with the test's master."""
    text = (ROOT / "deploy/TIERS.md").read_text(encoding="utf-8")
    (url,) = re.findall(r"^export KVTIER_MOONCAKE_URL='(\S+)'", text, re.MULTILINE)
    return {"KVTIER_MOONCAKE_URL": str(url).replace("master.example:50051", pool.address)}


def asked(folder, model, mode, connectors, more):
    folder.mkdir()
    env = (
        bare()
        | more
        | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "KVTIER_RAM_BYTES": "64MiB",
            "KVTIER_CHUNK_TOKENS": str(CHUNK),
            EVERY_HIT: "1",
            TOLD: str(folder / "told"),
            **mode.environment(),
        }
    )
    out = folder / "answers.json"
    module = "tests.integration.mooncake_vllm"
    command = [python(), "-m", module, str(out), str(model), connectors]
    with (folder / "log").open("w") as log:
        subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=LIMIT_S, check=False
        )
    assert out.exists(), (folder / "log").read_text()[-6000:]
    mode.check(folder / "told")
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@EVERY_MODE
def test_another_engine_hits_mooncake_once_and_kvtiers_ram_from_then_on(mode, tiny, tmp_path):
    hit = DOCUMENTS * DOCUMENT_HIT
    with mooncake() as pool:
        more = {"MOONCAKE_CONFIG_PATH": str(file_for(tmp_path, pool))}
        one = asked(tmp_path / "one", tiny, mode, "both", more)
        two = asked(tmp_path / "two", tiny, mode, "both", more)
    assert one["first"]["sources"] == {}, "nothing was there"
    assert one["own"]["sources"] == {"device": hit}
    assert one["again"]["sources"] == {"device": hit, "host": hit}, "kvtier is asked first"
    assert two["first"]["sources"].get("host", 0) == 0, "this engine's kvtier was empty"
    (elsewhere,) = two["first"]["sources"].values()
    assert elsewhere == hit, "all of it came from Mooncake"
    assert two["again"]["sources"]["host"] == hit, "kvtier kept what Mooncake had brought"
    tokens = [answer["tokens"] for answer in one["first"]["answers"]]
    for told in (one["own"], one["again"], two["first"], two["own"], two["again"]):
        assert [answer["tokens"] for answer in told["answers"]] == tokens
        assert [answer["cached"] for answer in told["answers"]] == [DOCUMENT_HIT] * DOCUMENTS


@EVERY_MODE
def test_an_engine_with_empty_ram_finds_what_another_one_wrote_to_the_pool(mode, tiny, tmp_path):
    """kvtier alone, with the tier that README switches on."""
    hit = DOCUMENTS * DOCUMENT_HIT
    with mooncake() as pool:
        more = pages_export(pool)
        one = asked(tmp_path / "one", tiny, mode, "alone", more)
        two = asked(tmp_path / "two", tiny, mode, "alone", more)
    assert one["first"]["sources"] == {}, "nothing was there"
    loaded = two["first"]["sources"]
    assert sum(loaded.values()) == hit and "device" not in loaded, "RAM was empty: from the pool"
    tokens = [answer["tokens"] for answer in one["first"]["answers"]]
    for told in (one["own"], one["again"], two["first"], two["own"], two["again"]):
        assert [answer["tokens"] for answer in told["answers"]] == tokens
        assert [answer["cached"] for answer in told["answers"]] == [DOCUMENT_HIT] * DOCUMENTS
