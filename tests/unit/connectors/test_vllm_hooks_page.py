"""connectors/vllm/HOOKS.md: every hook of every vLLM that is here has a row."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import vllm_source, vllm_versions

ROOT = Path(__file__).parents[3]
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


def hooks(version):
    tree = ast.parse((vllm_source(version) / BASE).read_text(encoding="utf-8"))
    (base,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KVConnectorBase_V1"
    )
    return {
        node.name
        for node in base.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


@pytest.mark.vllm
@pytest.mark.parametrize("version", sorted(vllm_versions()))
def test_every_hook_of_vllms_has_a_row(version):
    page = (ROOT / "connectors/vllm/HOOKS.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert hooks(version) <= told
