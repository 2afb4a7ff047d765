"""A small machine on this one, for programs that size themselves by what they find."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.started import ram_room
from tests.memory_cgroup import memory_cgroup
from tests.mounts import mounted

ROOT = Path(__file__).parents[1]
PLACES = ("/var/tmp", "/tmp")
"""Where auto-config looks for a disk when none is named."""


@contextmanager
def ext4(point, size):
    """A real disk of so many bytes, which takes of this one only what is written. Skips the test
    where none can be made."""
    image = point.with_name(f"{point.name}.image")
    image.touch()
    os.truncate(image, size)
    command = ["mkfs.ext4", "-q", "-m", "0", str(image)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be made here: {error}")
    with mounted(point, "-o", "loop", str(image)):
        yield point
    image.unlink()


def require_free(memory):
    """Skip the test on a machine that has not so much memory to give now."""
    if not ram_room().now(memory):
        pytest.skip(f"less than {memory >> 30} GiB of memory are free")


@contextmanager
def fence(tmp_path, memory, disk_bytes):
    """A machine of so many bytes: a real memory cgroup, and a real ext4 where disks are looked for.

    Gives the disk, which a process inside sees as ``/tmp``, and the shell words that put a process
    inside.
    """
    with memory_cgroup(memory, inner=False) as group, ext4(tmp_path / "disk", disk_bytes) as disk:
        steps = [f"echo $$ > {group}/cgroup.procs"]
        for place in PLACES:
            if ROOT.is_relative_to(place):  # what is tested stays where it was
                inside = disk / ROOT.relative_to(place)
                steps.append(f"mkdir -p {inside} && mount --bind {ROOT} {inside}")
        steps += [f"mount --rbind {disk} {place}" for place in PLACES]
        yield disk, " && ".join(steps)
