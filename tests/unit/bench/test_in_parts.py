"""What counts in the benchmark of loads in parts, and its rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvtier.bench.compare", reason="the laboratory is in a checkout")
from kvtier.bench.compare.in_parts.__main__ import IN_PARTS, VLLM, WHOLE, Told, cost_rows
from kvtier.bench.compare.in_parts.engine import Answer, Document


def answer(cost_ms: float, *, cached: int = 64, begun: int = 0, **places: int) -> Answer:
    return Answer(0.5 + cost_ms / 1000, 0.5, [cached], begun, places)


def test_only_loads_that_found_everything_in_the_tier_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = Told()
    told.add("one", answer(1, nvme=2), 64, "nvme")
    told.add("one", answer(2, nvme=1, ram=1), 64, "nvme")
    told.add("one", answer(3, nvme=1, cached=32), 64, "nvme")
    told.add("peer", answer(4), 64, None)
    assert [len(found) for found in told.answers.values()] == [1, 1]
    assert capsys.readouterr().out.count("does not count: one") == told.skipped == 2


def test_costs_stand_beside_the_same_loads_without_parts_and_the_peers() -> None:
    told = Told()
    for place, costs in (("NVMe", (10, 30, 20)), ("Redis", (40, 40, 40))):
        for cost in costs:
            told.add(f"{place}, {WHOLE}, 64", answer(cost, nvme=2), 64, None)
            told.add(f"{place}, {IN_PARTS}, 64", answer(cost / 2, begun=1), 64, None)
    told.add(f"{VLLM}, 64", answer(25), 64, None)
    rows = {row.name: row for row in cost_rows(told, 64, ["NVMe", "Redis"])}
    in_parts = rows["64 tokens from NVMe: load cost, in parts"]
    assert (in_parts.value, in_parts.min, in_parts.max) == pytest.approx((10, 5, 15))
    assert in_parts.ratio == pytest.approx(10 / 25)
    assert rows["64 tokens from NVMe: load cost, whole"].ratio == pytest.approx(20 / 25)
    beside = rows["64 tokens from Redis: load cost, in parts beside whole"]
    assert (beside.limit, beside.ratio) == pytest.approx((40, 0.5))
    assert rows["64 tokens from Redis: load cost, in parts"].ratio is None
    assert rows["64 tokens from NVMe: loads that began early"].value == 1


def test_every_question_about_a_document_is_new() -> None:
    one, other = (Document(3, 40).question(number)["prompt_token_ids"] for number in (1, 2))
    assert one[:40] == other[:40] and one[40:] != other[40:]
    assert Document(4, 40).question(1)["prompt_token_ids"][:40] != one[:40]


def test_a_file_keeps_loads_in_parts_out_of_a_running_engine(tmp_path: Path) -> None:
    program = """
import os
from pathlib import Path
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads
EarlyLoads.promise = lambda self, *given, **more: 5
EarlyLoads.allocated = lambda self, *given: bool(given)
import kvtier.bench.compare.in_parts.switch
early, file = object.__new__(EarlyLoads), Path(os.environ["COMPARE_WHOLE"])
found = [early.promise(busy=False)]
file.touch()
found.append(early.promise(busy=False))
file.unlink()
found.append(early.promise(busy=False))
found += [early.allocated(1), early.allocated()]
print(found)
"""
    files = {"COMPARE_WHOLE": str(tmp_path / "whole"), "COMPARE_BEGUN": str(tmp_path / "begun")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | files,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[5, 0, 5, True, False]\n"
    assert (tmp_path / "begun").stat().st_size == 1
