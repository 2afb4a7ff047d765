"""Huge pages under a pool: where the machine gives them, and what happens where it does not, or
takes them away."""

import errno
import gc
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.client.attachment import SharedPool
from kvtier.core import pool as region
from kvtier.core.errors import ConfigError
from kvtier.core.pool import HUGE_BYTES, Pool, make_reserved_region
from tests.child_process import DEADLINE_S, wait_for
from tests.command import ran
from tests.descriptors import descriptors
from tests.huge_pages import SLOT, address, free_pages, huge_kilobytes, populated, reserved_pages

PAGE = 4096
SLOTS = 4
PAGES = SLOTS * SLOT // HUGE_BYTES


def test_every_mapping_begins_with_a_huge_page():
    pools = [Pool(3, PAGE) for _ in range(5)]
    pools += [Pool.attach(pool.path, 3, PAGE) for pool in pools]
    assert {address(pool.buffer) % HUGE_BYTES for pool in pools} == {0}


def test_a_mapping_leaves_no_address_space_behind():
    def reserved():
        with open("/proc/self/statm", encoding="utf-8") as statm:
            return int(statm.read().split()[0])

    Pool(1, PAGE).close()
    before = reserved()
    for _ in range(200):
        Pool(1, PAGE).close()
    assert reserved() < before + 200


def test_the_end_of_a_process_unmaps_nothing():
    code = (
        "import atexit; atexit.register(lambda: print(len(bytes(pool.view(0)))));"
        f"from kvtier.core.pool import Pool; pool = Pool(1, {PAGE})"
    )
    done = ran([sys.executable, "-c", code])
    assert (done.stdout, done.stderr, done.returncode) == (f"{PAGE}\n", "", 0)


def test_a_populated_pool_lies_in_huge_pages():
    pool = populated(SLOTS)
    assert huge_kilobytes(pool.buffer) * 1024 == PAGES * HUGE_BYTES
    assert all(pool.in_huge_pages(pool.view(slot)) for slot in range(SLOTS))


def test_another_process_maps_them_as_huge_pages():
    owner = populated(SLOTS)
    other = Pool.attach(owner.path, SLOTS, SLOT)
    other.touch(0, 0, SLOT)
    assert huge_kilobytes(other.buffer) * 1024 >= 3 * HUGE_BYTES


def test_content_that_was_there_before_stays():
    pool = Pool(SLOTS, SLOT)
    chunk = os.urandom(SLOT)
    pool.view(1)[:] = chunk
    pool.populate(0, SLOTS)
    assert pool.view(1) == chunk
    assert bytes(pool.view(0)) == bytes(pool.view(2)) == bytes(SLOT)


def test_only_whole_pages_of_the_pool_count_as_its_huge_pages():
    pool = populated(SLOTS)
    assert pool.in_huge_pages(pool.view(0)[PAGE:])
    assert not pool.in_huge_pages(pool.view(0)[1:]), "no page begins there"
    assert not pool.in_huge_pages(pool.view(0)[:0])
    assert not pool.in_huge_pages(memoryview(bytes(PAGE)))
    assert not pool.in_huge_pages(memoryview(mmap.mmap(-1, SLOT)))
    assert not pool.in_huge_pages(populated(SLOTS).view(1)), "another pool's"


def test_the_end_of_a_region_that_is_no_whole_huge_page_is_present_and_small():
    pool = populated(1)
    assert pool.in_huge_pages(pool.view(0)[: 3 * HUGE_BYTES])
    assert not pool.in_huge_pages(pool.view(0))
    assert os.fstat(pool.fd).st_blocks * 512 == SLOT


def test_where_the_kernel_makes_none_pages_are_present_and_small(monkeypatch):
    asked, advise = [], region.advise

    def counting(memory, begin, end, advice):
        if advice == 999:
            asked.append(begin)
        return advise(memory, begin, end, advice)

    monkeypatch.setattr(region, "_COLLAPSE", 999)
    monkeypatch.setattr(region, "advise", counting)
    pool = Pool(2 * SLOTS, SLOT)
    pool.populate(0, 2 * SLOTS)
    assert os.fstat(pool.fd).st_blocks * 512 == 2 * SLOTS * SLOT
    assert not any(pool.in_huge_pages(pool.view(slot)) for slot in range(2 * SLOTS))
    assert len(asked) == 8, "each try looks for memory"


def test_memory_that_goes_back_is_no_huge_page_any_more_and_reads_as_zeros():
    pool = populated(SLOTS)
    for slot in range(SLOTS):
        pool.view(slot)[:] = bytes([slot + 1]) * SLOT
    before = os.fstat(pool.fd).st_blocks * 512
    pool.give_back(1)
    assert before - os.fstat(pool.fd).st_blocks * 512 >= SLOT - HUGE_BYTES
    found = [pool.in_huge_pages(pool.view(slot)) for slot in range(SLOTS)]
    assert found == [False, False, True, True]
    assert bytes(pool.view(1)) == bytes(SLOT)
    assert bytes(pool.view(0)) == b"\1" * SLOT
    assert bytes(pool.view(2)) == b"\3" * SLOT
    pool.populate(1, 1)
    assert os.fstat(pool.fd).st_blocks * 512 >= before, "it is there again when it is asked for"


@pytest.mark.alone
def test_reserved_pages_are_taken_when_they_are_free_and_asked_for():
    with reserved_pages(PAGES + 1):
        assert not Pool(SLOTS, SLOT).reserved, "asked for"
        pool = Pool(SLOTS, SLOT, reserved=True)
        assert pool.reserved
        assert free_pages() == 1, "all of them are taken, before anything is touched"
        assert pool.in_huge_pages(pool.buffer)
        pool.view(3)[:] = b"x" * SLOT
        pool.close()
        wait_for(lambda: free_pages() == PAGES + 1, "the kernel has them back")


@pytest.mark.alone
def test_a_size_that_is_no_whole_huge_page_takes_one_more():
    with reserved_pages(4):
        pool = Pool(1, SLOT, reserved=True)
        assert (pool.reserved, free_pages(), len(pool.buffer)) == (True, 0, SLOT)
        view = pool.view(0)
        pool.close()
        view[-1] = 7
        del view, pool
        gc.collect()
        wait_for(lambda: free_pages() == 4, "the kernel has them back")


@pytest.mark.alone
def test_workers_of_the_engine_map_reserved_pages():
    with reserved_pages(PAGES):
        pool = Pool(SLOTS, SLOT, reserved=True)
        code = (
            f"from kvtier.core.pool import Pool; Pool.attach({pool.path!r}, {SLOTS}, "
            f"{SLOT}).view(3)[:5] = b'hello'"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
        assert bytes(pool.view(3)[:5]) == b"hello"
        pool.close()


@pytest.mark.alone
def test_too_few_reserved_pages_are_left_to_others():
    with reserved_pages(PAGES - 1):
        pool = Pool(SLOTS, SLOT, reserved=True)
        assert not pool.reserved
        assert free_pages() == PAGES - 1
        pool.view(3)[:] = b"x" * SLOT


@pytest.mark.alone
def test_pages_that_run_out_in_the_middle_are_left_to_others(monkeypatch):
    whole = os.posix_fallocate

    def half(fd, offset, length):
        whole(fd, offset, length // HUGE_BYTES // 2 * HUGE_BYTES)
        raise OSError(errno.ENOSPC, "no more for you")

    monkeypatch.setattr(os, "posix_fallocate", half)
    with reserved_pages(PAGES):
        pool = Pool(SLOTS, SLOT, reserved=True)
        assert not pool.reserved
        assert free_pages() == PAGES
        pool.view(3)[:] = b"x" * SLOT


@pytest.mark.alone
def test_of_many_that_come_at_once_one_gets_them():
    with reserved_pages(PAGES + PAGES // 2), ThreadPoolExecutor(8) as threads:
        pools = list(threads.map(lambda _: Pool(SLOTS, SLOT, reserved=True), range(8)))
        assert sum(pool.reserved for pool in pools) == 1
        for pool in pools:
            pool.view(0)[:] = pool.view(SLOTS - 1)[:] = b"x" * SLOT
            pool.close()


@pytest.mark.parametrize(
    "size", [13 << 26, None], ids=["no pages of this size", "not known to this system"]
)
def test_a_system_without_such_pages_gives_ordinary_memory(monkeypatch, size):
    if size is None:
        monkeypatch.delattr(os, "MFD_HUGE_2MB")
    else:
        monkeypatch.setattr(os, "MFD_HUGE_2MB", size)
    pool = Pool(SLOTS, SLOT, reserved=True)
    assert not pool.reserved
    pool.view(3)[:] = b"x" * SLOT


KEPT = f"""
from pathlib import Path
from kvtier.core.pool import Pool
pool = Pool({SLOTS}, {SLOT}, reserved=True)
assert pool.reserved
pool.view(1)[:] = b"x" * {SLOT}
pool.give_back(1)
Path("/proc/sys/vm/nr_hugepages").write_text("0")
pool.populate(0, {SLOTS})
pool.touch(1, 0, {SLOT})
pool.view(1)[:] = b"y" * {SLOT}
print(bytes(pool.view(1)[-1:]), len(bytes(pool.buffer)))
"""


@pytest.mark.alone
def test_no_reserved_page_is_ever_missing():
    with reserved_pages(PAGES):
        done = ran([sys.executable, "-c", KEPT])
        assert (done.stdout, done.stderr, done.returncode) == (f"b'y' {SLOTS * SLOT}\n", "", 0)


def of_a_server(fd):
    ours, theirs = os.pipe()
    os.close(ours)
    return SharedPool(SLOTS, SLOT, fd, theirs)


@pytest.mark.alone
@pytest.mark.parametrize("take", [of_a_server, lambda fd: Pool(SLOTS, SLOT, fd=fd)])
def test_reserved_pages_of_a_stranger_are_refused_and_closed(take):
    with reserved_pages(PAGES):
        before = descriptors()
        fd = make_reserved_region(SLOTS * SLOT)
        assert fd is not None
        with pytest.raises(
            ConfigError, match="lies in reserved huge pages, expected ordinary memory"
        ):
            take(fd)
        assert descriptors() == before
