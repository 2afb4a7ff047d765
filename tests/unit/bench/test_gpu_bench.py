"""The GPU benchmark's parts, small and on CPU tensors: it has to run the day a GPU is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvtier.bench.gpu import __main__ as command
from kvtier.bench.gpu import copies
from kvtier.bench.gpu.compute import measure_slowdown
from kvtier.bench.gpu.copies import measure_copies
from kvtier.bench.gpu.prefill import MODEL, measure_prefill
from kvtier.bench.report import Row, write_results

CPU = torch.device("cpu")
SMALL = MODEL | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copies.SHAPES, "7B", (2, 64))
    monkeypatch.setitem(copies.SHAPES, "72B", (2, 64))


def test_without_cuda_it_says_so_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--output", str(tmp_path / "gpu.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_row_of_copies_stands_beside_its_limit(tmp_path: Path) -> None:
    rows = measure_copies(["7B", "72B"], 1, 2, CPU)

    assert [row.name for row in rows] == [
        f"{name} (2 layers x 64 B); blocks of {tokens}: {way}"
        for name in ("7B", "72B")
        for tokens in (16, 32, 64)
        for way in ("save", "load")
    ]
    assert all(row.value and row.ratio and row.limit and row.unit == "GB/s" for row in rows)
    write_results(tmp_path / "gpu.json", "gpu", rows)
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 12


def test_wrong_bytes_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies.Paged, "save", lambda _: None)
    with pytest.raises(SystemExit, match="not what was saved"):
        measure_copies(["7B"], 1, 2, CPU)


def test_slowdown_is_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copies.SHAPES, "72B", (8, 64))
    monkeypatch.setattr("kvtier.bench.gpu.compute.WEIGHTS", {"7B": 1.0, "72B": 1.0})
    rows = measure_slowdown(["7B", "72B"], 1, 2, CPU, width=64)
    assert [(row.unit, row.limit) for row in rows] == [("%", 3.0)] * 2
    assert "1 of 8 ranks" in rows[1].name


def test_a_prompt_is_computed_and_loaded() -> None:
    pytest.importorskip("transformers")
    computed, loaded = measure_prefill(512, 1, CPU, SMALL)
    assert computed.name == "TTFT of 512 tokens computed (transformers)"
    assert computed.value
    assert loaded.limit == computed.value
    assert loaded.ratio


def test_without_any_engine_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (row,) = measure_prefill(512, 1, CPU)
    assert row == Row("TTFT: skipped, neither a CUDA build of vLLM nor transformers is installed", None, "s")
