"""Huge pages for tests: what the machine gives, reserved for as long as a test needs them."""

import ctypes
import fcntl
import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.core.pool import HUGE_BYTES, Pool

_RESERVED = Path("/proc/sys/vm/nr_hugepages")
SLOT = 7 << 20
"""The size of a real chunk: it begins and ends in the middle of a huge page as often as not."""


def meminfo(name):
    """A count, or kilobytes."""
    found = re.search(rf"^{name}: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def free_pages():
    """Reserved huge pages that nobody has, nor was promised."""
    return meminfo("HugePages_Free") - meminfo("HugePages_Rsvd")


@contextmanager
def reserved_pages(count):
    """The machine has exactly so many free, for one test run at a time. Skips the test where they
    cannot be had."""
    with (Path(tempfile.gettempdir()) / "kvtier-test-huge-pages").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _reserved(count):
            yield


@contextmanager
def _reserved(count):
    before = int(_RESERVED.read_text()) if _RESERVED.exists() else 0
    try:
        used = before - free_pages()
        _RESERVED.write_text(str(used + count))
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved here: {error}")
    try:
        if free_pages() != count:
            pytest.skip(f"the kernel has {free_pages()} huge pages to reserve, wanted {count}")
        yield
    finally:
        _RESERVED.write_text(str(before))


def populated(slots, *, slot_bytes=SLOT):
    """A pool of ordinary memory in huge pages. Skips the test where the kernel makes none."""
    pool = Pool(slots, slot_bytes)
    pool.populate(0, slots)
    if not pool.in_huge_pages(pool.buffer[: slots * slot_bytes // HUGE_BYTES * HUGE_BYTES]):
        pool.close()
        pytest.skip(f"this kernel ({os.uname().release}) makes no huge pages of shared memory now")
    return pool


def address(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def huge_kilobytes(view):
    """How much of the mapping that ``view`` begins is mapped as huge pages, as the kernel tells
    it."""
    for mapping in re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    ):
        if mapping.startswith(f"{address(view):x}-"):
            kinds = re.findall(
                r"^(?:ShmemPmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB",
                mapping,
                re.MULTILINE,
            )
            return sum(map(int, kinds))
    raise AssertionError("no mapping begins there")
