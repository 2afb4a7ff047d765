"""The GPU benchmark's parts, small and on CPU tensors: it has to run the day a GPU is there. The
programs of ``bench/micro``, which ``make bench`` runs: each says what it does. And how an engine of
a benchmark ran."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from kvtier.bench.gpu import __main__ as command
from kvtier.bench.gpu import copies
from kvtier.bench.gpu.copies import measure_copies
from kvtier.bench.processes.engine import mode_told

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


MICRO = Path(__file__).parents[3] / "bench" / "micro"
PROGRAMS = sorted(path.stem for path in MICRO.glob("[a-z]*.py"))


@pytest.mark.filterwarnings("ignore")  # of torch, and of a module that another test has imported
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_runs_by_its_name(program, monkeypatch, capsys):
    """In this process: one of its own would import vLLM and torch for a line of help."""
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"kvtier.bench.micro.{program}", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage:"), "it measures, and does not only define"


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("vLLM 0.32.0, Model Runner V2, async scheduling", "Model Runner V2, async scheduling"),
        (
            "vLLM 0.40.0 (not tested; 0.32.0, 0.33.0 are), Model Runner V1, synchronous scheduling",
            "Model Runner V1, synchronous scheduling",
        ),
        ("vLLM 0.23.0, synchronous scheduling", "synchronous scheduling"),
    ],
)
def test_an_engines_log_says_how_it_runs(line, mode, tmp_path):
    log = tmp_path / "server.log"
    assert mode_told(log) is None
    log.write_text("INFO [vllm.py:99] Asynchronous scheduling is enabled.\n")
    assert mode_told(log) is None, "vLLM's word is not what it does"
    with log.open("a") as file:
        file.write(f"(EngineCore pid=7) INFO [connector.py:359] kvtier 0.1.0, {line}\nINFO more\n")
    assert mode_told(log) == mode
