"""Threads of a disk: by its kind, and no more than the CPUs can serve."""

import pytest

from kvtier.core.fact import known
from kvtier.tiers.nvme.disks import Disk, disk_threads


@pytest.mark.parametrize(
    ("device", "cpus", "threads"),
    [
        ("nvme", 16, 4),
        ("nvme", 1, 2),
        ("virtual", 2, 4),
        ("ebs", 16, 2),
        ("rotational", 16, 1),
        (None, 16, 4),
    ],
)
def test_threads(device, cpus, threads):
    disk = Disk("/kv", device=known(device, "here")) if device else Disk("/kv")
    assert disk_threads(disk, cpus) == threads
