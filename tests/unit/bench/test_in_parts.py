"""What counts in the benchmark of loads in parts, and its rows."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bench.compare.in_parts.__main__ import (
    IN_PARTS,
    VLLM,
    WHOLE,
    Told,
    cost_rows,
    gap_rows,
    raw_read,
)
from kvtier.bench.compare.in_parts.engine import BLOCK, Answer, Window
from kvtier.core.pool import Pool


def answer(cost_ms, *, cached=64, begun=0, **places):
    return Answer(0.5 + cost_ms / 1000, 0.5, [cached], begun, places)


def test_costs_stand_beside_the_same_loads_without_parts_and_the_peers():
    told = Told()
    for cost in (10, 30, 20):
        told.add(f"NVMe, {WHOLE}, 64", answer(cost, nvme=2), 64, None)
        told.add(f"NVMe, {IN_PARTS}, 64", answer(cost / 2, begun=1), 64, None)
    told.add(f"{VLLM}, 64", answer(25), 64, None)
    rows = {row.name: row for row in cost_rows(told, 64, ["NVMe"])}
    in_parts = rows["64 tokens from NVMe: load cost, in parts"]
    assert (in_parts.value, in_parts.min, in_parts.max) == pytest.approx((10, 5, 15))
    assert in_parts.ratio == pytest.approx(10 / 25)
    assert rows["64 tokens from NVMe: load cost, whole"].ratio == pytest.approx(20 / 25)
    beside = rows["64 tokens from NVMe: load cost, in parts beside whole"]
    assert (beside.limit, beside.ratio) == pytest.approx((20, 0.5))
    assert rows["64 tokens from NVMe: loads that began early"].value == 1


def test_a_gap_stands_beside_that_of_the_same_load_whole_and_of_the_peer():
    told = Told()
    for name, longest in ((VLLM, 40), (f"NVMe, {WHOLE}", 20), (f"NVMe, {IN_PARTS}", 30)):
        one = replace(answer(10, begun=1), longest=longest / 1000)
        told.add(name, one, 64, None)
    rows = {row.name: row for row in gap_rows(told, "NVMe")}
    felt = [rows[f"beside a decoding request, {name}: its longest gap"] for name in told.answers]
    assert [row.value for row in felt] == pytest.approx([40, 20, 30])
    assert [row.ratio for row in felt[1:]] == pytest.approx([0.5, 1.5])


def test_a_window_counts_the_gaps_that_lie_in_it_at_least_in_part():
    window = Window.of([0.0, 1.0, 2.0, 3.5, 5.0, 6.0], arrival=3.0, ttft=1.5, cached=7)
    assert (window.quiet, window.gaps) == ([1.0, 1.0], [1.5, 1.5])
    assert window.lost == 1.0


SWITCHED = """
import os
from pathlib import Path
from types import SimpleNamespace as Any
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads
EarlyLoads.promise = lambda self, *given, **more: 5
EarlyLoads.allocated = lambda self, prompt, *given: bool(given)
import kvtier.bench.compare.in_parts.switch
early, file = object.__new__(EarlyLoads), Path(os.environ["COMPARE_WHOLE"])
found = [early.promise(busy=False)]
file.touch()
found.append(early.promise(busy=False))
file.unlink()
found.append(early.promise(busy=False))
asked = Any(leases=[Any(pool=Any(path="/where", slots=3, slot_bytes=4096))])
found += [early.allocated(Any(notes={early: asked}), 1), early.allocated(Any(notes={}))]
print(found)
"""


def test_a_file_keeps_loads_in_parts_out_of_a_running_engine(tmp_path):
    files = {f"COMPARE_{one.upper()}": str(tmp_path / one) for one in ("whole", "begun", "pool")}
    command = [sys.executable, "-c", SWITCHED]
    told = subprocess.check_output(command, env=os.environ | files, text=True)
    assert told == "[5, 0, 5, True, False]\n"
    assert (tmp_path / "begun").stat().st_size == 1
    assert json.loads((tmp_path / "pool").read_text()) == ["/where", 3, 4096]


def test_direct_reads_pass_through_an_engines_slots_and_leave_them_as_they_were(tmp_path):
    own = Pool(4, 4096)
    own.buffer[:] = told = os.urandom(len(own.buffer))
    lab: Any = SimpleNamespace(folder=tmp_path)
    engine: Any = SimpleNamespace(pool=lambda: Pool.attach(own.path, own.slots, own.slot_bytes))
    with raw_read(lab, engine, 8 * BLOCK) as raw:
        (tmp_path / "raw").write_bytes(bytes(8 * own.slot_bytes))
        assert raw() > 0
    assert own.buffer == told
    own.close()
