"""The shared region: equal aligned slots that other processes of the user can map, and nothing left behind."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierError
from kvtier.pool import Pool

PAGE = 4096


def test_slots_are_apart_and_page_aligned() -> None:
    pool = Pool(3, 2 * PAGE)
    for slot in range(3):
        pool.view(slot)[:] = bytes([slot + 1]) * (2 * PAGE)
    assert [bytes(pool.view(slot)) for slot in range(3)] == [bytes([slot + 1]) * (2 * PAGE) for slot in range(3)]
    assert all(ctypes.addressof(ctypes.c_char.from_buffer(pool.view(slot))) % PAGE == 0 for slot in range(3))


def test_another_process_writes_into_our_slot() -> None:
    pool = Pool(2, PAGE)
    code = f"from kvtier.pool import Pool; Pool.attach({pool.path!r}, 2, {PAGE}).view(1)[:5] = b'hello'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert bytes(pool.view(1)[:5]) == b"hello"


def test_the_region_goes_with_its_owner() -> None:
    code = f"from kvtier.pool import Pool; print(Pool(1, {PAGE}).path)"
    path = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout
    with pytest.raises(TierError, match="is its owner alive"):
        Pool.attach(path.strip(), 1, PAGE)


def test_a_smaller_region_than_told_is_refused() -> None:
    pool = Pool(1, PAGE)
    with pytest.raises(ConfigError, match="expected 12288"):
        Pool.attach(pool.path, 2, PAGE)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, PAGE), (1, 0), (1, PAGE + 1)])
def test_impossible_sizes_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        Pool(slots, slot_bytes)


def test_too_much_memory_is_refused_with_the_remedy() -> None:
    with pytest.raises(TierError, match="lower ram_bytes"):
        Pool(1 << 40, 1 << 20)


def mapped_pages(pool: Pool) -> int:
    """Pages of the region that this mapping of it has."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool.buffer))
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if mapping and int(mapping.split("-")[0], 16) <= base < int(re.split("[- ]", mapping)[1], 16):
            (kilobytes,) = re.findall(r"^Rss: +(\d+) kB", mapping, re.MULTILINE)
            return int(kilobytes) * 1024 // PAGE
    raise AssertionError("the pool is not mapped")


def test_populate_makes_pages_present() -> None:
    pool = Pool(40, PAGE)
    assert mapped_pages(pool) == 0
    pool.populate(0, 30)
    assert mapped_pages(pool) == 30


def test_another_process_maps_pages_that_are_there_and_writes_them() -> None:
    owner = Pool(4, 64 * PAGE)
    owner.populate(0, 4)
    other = Pool.attach(owner.path, 4, 64 * PAGE)
    assert mapped_pages(other) == 0
    other.touch(2, 3 * PAGE + 5, 40 * PAGE)
    assert 37 <= mapped_pages(other) < 80
    other.view(2)[39 * PAGE] = 7
    assert owner.view(2)[39 * PAGE] == 7
