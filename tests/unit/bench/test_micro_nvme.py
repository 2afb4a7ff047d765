"""The NVMe benchmark's rows: one for every kind of memory, with its CPU time. Empty where the host
has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench.micro.nvme import bandwidth
from kvtier.bench.report import Row
from tests.huge_pages import reserved_pages

SIZE = 2 << 20


def measured(folder: Path) -> dict[str, Row]:
    return {
        row.name.partition(" (ratio")[0]: row
        for row in bandwidth(folder, SIZE, chunks=4, rounds=1, threads=2)
    }


@pytest.mark.alone
def test_each_kind_of_memory_is_a_row_and_what_the_host_has_not_is_empty(tmp_path: Path) -> None:
    with reserved_pages(0):
        found = measured(tmp_path / "none")
    assert found.pop("NvmeTier write, 2 threads, reserved huge pages").value is None
    assert found.pop("NvmeTier read, 2 threads, reserved huge pages").value is None
    assert {name for name, row in found.items() if not row.value} == set()
    assert {
        f"{way}, 2 threads, {kind}"
        for way in ("write", "read")
        for kind in ("default", "small pages")
    } == {
        name.removeprefix("NvmeTier ")
        for name in found
        if name.startswith("NvmeTier") and "CPU" not in name
    }
    with reserved_pages(16):
        found = measured(tmp_path / "some")
    assert found["NvmeTier write, 2 threads, reserved huge pages"].value
    assert found["NvmeTier read, 2 threads, reserved huge pages: CPU a GiB"].ratio
