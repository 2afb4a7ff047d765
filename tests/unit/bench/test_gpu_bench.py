"""The GPU benchmark's parts, small and on CPU tensors: it has to run the day a GPU is there."""

import pytest
import torch

from kvtier.bench.gpu import __main__ as command
from kvtier.bench.gpu import copies
from kvtier.bench.gpu.copies import measure_copies

CPU = torch.device("cpu")
SMALL = {"7B": 64, "8B": 128}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setitem(copies.SHAPES, name, (2, size))


def test_without_cuda_it_says_so_and_exits_with_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--output", str(tmp_path / "gpu.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_row_of_copies_stands_beside_its_limit():
    rows = measure_copies(["7B", "8B"], 1024, 2, CPU)

    each = [
        "save",
        "load",
        *(
            f"{way} of 1024 tokens, {what}"
            for way in ("load", "save")
            for what in ("kernels launched", "DMAs", "host time")
        ),
    ]
    shapes = [f"{name} (2 layers x {size} B); blocks of 16" for name, size in SMALL.items()]
    assert [row.name for row in rows] == [f"{one}: {what}" for one in shapes for what in each]
    speeds = [row for row in rows if row.unit == "GB/s"]
    assert len(speeds) == 4 and all(row.value and row.ratio and row.limit for row in speeds)
