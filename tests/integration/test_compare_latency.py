"""What other requests feel while a document is loaded, on a real vLLM, with a short document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bench.compare.latency import __main__ as latency

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]


def test_a_load_is_measured_beside_requests_that_decode(tmp_path: Path) -> None:
    """A gap is as long as a step at least, so the load of 32 MiB shows in the first question of a
    pair, and the document is in vLLM's own cache at the second."""
    out = tmp_path / "latency.json"
    shape = ["--rounds", "1", "--loads", "2", "--document-length", "4096", "--streams", "2"]
    places = ["--output", str(out), "--output-dir", str(tmp_path)]
    assert latency.main(["--arms", "kvtier-ram,kvtier-nvme", *shape, *places]) == 0
    told = json.loads(out.read_text())
    for name, arm in told["arms"].items():
        assert arm["cannot_run"] is None
        assert len(arm["loads"]) == len(arm["no_load"]) == 2
        for window in (*arm["loads"], *arm["no_load"]):
            assert window["cached_tokens"] >= 4096 - 256
            assert window["longest_gap_ms"] >= window["quiet_gap_ms"] > 0 and window["gaps"] >= 1
        place = {"kvtier-ram": "ram", "kvtier-nvme": "nvme"}[name]
        assert arm["hit_tokens"][place] >= 2 * 0.99 * 4096
    rows = {row["name"]: row["value"] for row in told["rows"]}
    assert rows["kvtier-ram: longest step"] > 0
    assert rows["kvtier-ram: ttft"] > 0 and rows["no load: longest gap"] > 0
