"""Two engines of one model, each from a shell of its own with README's lines, share one server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT
from tests.conftest import ROOT
from tests.integration.scenarios import document
from tests.integration.test_vllm_launch import HIT, QUIET, Launched
from tests.server_process import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def variables(*words: str) -> dict[str, str]:
    """What a shell of README sets, by the name of each variable."""
    (line,) = (one for block in BLOCKS for one in block.splitlines() if one.startswith(words))
    return dict(re.findall(r"\b(KVTIER_\w+)=(\S+)", line.partition("#")[0]))


def test_an_engine_with_the_switch_and_one_without_it_hit_what_the_other_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other --max-model-len, too."""
    for name in ("KVTIER_CHUNK_TOKENS", "KVTIER_AUTO", "KVTIER_SERVER"):
        monkeypatch.delenv(name, raising=False)
    model = str(make_model(tmp_path / "tiny", "tiny"))
    args = ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    args += ["--block-size", "32", "--enable-prompt-tokens-details"]
    always = TRANSFER | {"kv_connector_extra_config": {LOAD_EVERY_HIT: True}}
    args += ["--kv-transfer-config", json.dumps(always)]
    switch, shared = variables("export KVTIER_AUTO="), variables("KVTIER_SERVER=")
    assert (switch, list(shared)) == ({"KVTIER_AUTO": "true"}, ["KVTIER_SERVER"])
    with serving(ram_bytes="64MiB") as server:
        shells = {
            "736": QUIET | switch | {"KVTIER_SERVER": f"unix://{server.socket}"},
            "640": QUIET | {"KVTIER_SERVER": f"unix://{server.socket}"},
        }
        logs = {length: tmp_path / f"{length}.log" for length in shells}
        one, other = (
            Launched("true", model, [*args, "--max-model-len", length], env, logs[length])
            for length, env in shells.items()
        )
        with one, other:
            for seed, (first, second) in enumerate(((one, other), (other, one))):
                computed, cached = first.answer(document(seed))
                assert cached == 0
                assert second.answer(document(seed)) == (computed, HIT)
        assert "other chunk size" not in server.said()
    for log in logs.values():
        said = log.read_text()
        assert "configuration: chunk_tokens=256 (default), " in said
        assert "other chunk size" not in said
