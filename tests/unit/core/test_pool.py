"""The shared region: equal aligned slots that other processes of the user can map, and nothing left
behind."""

import ctypes
import fcntl
import gc
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.client.attachment import SharedPool
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.pool import Pool
from tests.child_process import DEADLINE_S
from tests.command import ran
from tests.descriptors import descriptors

PAGE = 4096


def test_slots_are_apart_and_page_aligned():
    pool = Pool(3, 2 * PAGE)
    for slot in range(3):
        pool.view(slot)[:] = bytes([slot + 1]) * (2 * PAGE)
    assert [bytes(pool.view(slot)) for slot in range(3)] == [
        bytes([slot + 1]) * (2 * PAGE) for slot in range(3)
    ]
    assert all(
        ctypes.addressof(ctypes.c_char.from_buffer(pool.view(slot))) % PAGE == 0
        for slot in range(3)
    )


def test_another_process_writes_into_our_slot():
    pool = Pool(2, PAGE)
    code = (
        f"from kvtier.core.pool import Pool; Pool.attach({pool.path!r}, 2, {PAGE}).view(1)[:5] "
        "= b'hello'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
    assert bytes(pool.view(1)[:5]) == b"hello"


def test_the_region_goes_with_its_owner():
    code = f"from kvtier.core.pool import Pool; print(Pool(1, {PAGE}).path)"
    path = ran([sys.executable, "-c", code]).stdout
    with pytest.raises(TierError, match="is its owner alive"):
        Pool.attach(path.strip(), 1, PAGE)


def test_a_smaller_region_than_told_is_refused():
    pool = Pool(1, PAGE)
    with pytest.raises(ConfigError, match="expected 8192"):
        Pool.attach(pool.path, 2, PAGE)


def test_a_larger_region_than_told_is_refused():
    pool = Pool(2, PAGE)
    with pytest.raises(ConfigError, match="has 8192 bytes, expected 4096"):
        Pool.attach(pool.path, 1, PAGE)


@pytest.mark.parametrize(
    "call", ["os.ftruncate(fd, 0)", "os.ftruncate(fd, 1 << 20)", "fcntl.fcntl(fd, 1033, 8)"]
)
def test_no_process_that_maps_it_can_change_its_size_or_its_seals(call):
    pool = Pool(2, PAGE)
    code = f"import fcntl, os; fd = os.open({pool.path!r}, os.O_RDWR); {call}"
    done = ran([sys.executable, "-c", code])
    assert "PermissionError: [Errno 1]" in done.stderr
    pool.view(1)[:] = bytes(PAGE)


NO_SEALS, NO_SHRINKING = 0, fcntl.F_SEAL_SHRINK


@pytest.mark.parametrize("seals", [NO_SEALS, NO_SHRINKING, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_a_region_without_all_seals_is_refused_and_closed(seals):
    before = descriptors()
    fd = os.memfd_create("rogue", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ConfigError, match="not sealed against shrinking"):
        Pool(1, PAGE, fd=fd)
    assert descriptors() == before


def test_a_file_is_no_region(tmp_path):
    before = descriptors()
    (tmp_path / "file").write_bytes(bytes(2 * PAGE))
    with pytest.raises(ConfigError, match="not sealed against shrinking"):
        Pool.attach(str(tmp_path / "file"), 1, PAGE)
    assert descriptors() == before


def test_a_region_that_is_said_to_have_no_slots_is_closed():
    pool, before = Pool(1, PAGE), descriptors()
    with pytest.raises(ConfigError, match="expected >= 1 slot"):
        Pool.attach(pool.path, 0, PAGE)
    assert descriptors() == before


def shared(owner):
    """A server's pool as an engine maps it, and the server's end of its witness."""
    ours, theirs = os.pipe()
    return SharedPool(owner.slots, owner.slot_bytes, os.dup(owner.fd), theirs), ours


def let_go(witness):
    """Whether the server sees that nobody has the pool mapped."""
    ended = bool(select.select([witness], [], [], 0)[0])
    assert not ended or os.read(witness, 1) == b""
    return ended


def test_a_closed_pool_keeps_its_witness_until_the_last_view_is_gone():
    owner = Pool(2, PAGE)
    pool, witness = shared(owner)
    views = [pool.view(0), pool.view(1)]
    pool.close()
    pool.close()
    assert not let_go(witness), "who has a view can still write"
    views[1][:5] = b"later"
    assert bytes(owner.view(1)[:5]) == b"later"
    del views[0]
    assert not let_go(witness)
    del views[0], pool
    gc.collect()
    assert let_go(witness)
    os.close(witness)


def test_a_closed_pool_without_views_lets_go_at_once():
    pool, witness = shared(Pool(2, PAGE))
    pool.close()
    assert let_go(witness)
    os.close(witness)


def test_a_pool_that_nobody_has_any_more_lets_go():
    pool, witness = shared(Pool(2, PAGE))
    view = pool.view(0)
    del pool
    gc.collect()
    assert not let_go(witness)
    del view
    assert let_go(witness)
    os.close(witness)


def test_the_end_of_a_process_closes_the_witness_last():
    code = (
        "import atexit, os; atexit.register(lambda: print(os.fstat(theirs).st_nlink)); ours, "
        "theirs = os.pipe();"
        "from kvtier.client.attachment import SharedPool; from kvtier.core.pool import Pool;"
        f"owner = Pool(1, {PAGE}); pool = SharedPool(1, {PAGE}, os.dup(owner.fd), theirs)"
    )
    done = ran([sys.executable, "-c", code])
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_shared_pool_that_is_refused_closes_both_descriptors():
    owner, (ours, theirs) = Pool(2, PAGE), os.pipe()
    before = descriptors()
    with pytest.raises(ConfigError):
        SharedPool(3, PAGE, os.dup(owner.fd), theirs)
    assert descriptors() == before - 1
    os.close(ours)


def test_advice_for_a_closed_pool_has_no_effect():
    pool = Pool(2, PAGE)
    pool.close()
    pool.populate(0, 2)
    pool.touch(1, 0, PAGE)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, PAGE), (1, 0), (1, PAGE + 1)])
def test_impossible_sizes_are_refused(slots, slot_bytes):
    with pytest.raises(ConfigError):
        Pool(slots, slot_bytes)


def test_too_much_memory_is_refused_with_the_remedy():
    with pytest.raises(TierError, match="lower ram_bytes"):
        Pool(1 << 40, 1 << 20)


def mapped_pages(pool):
    """Pages of the region that this mapping of it has."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool.buffer))
    for mapping in re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    ):
        if mapping and int(mapping.split("-")[0], 16) <= base < int(
            re.split("[- ]", mapping)[1], 16
        ):
            (kilobytes,) = re.findall(r"^Rss: +(\d+) kB", mapping, re.MULTILINE)
            return int(kilobytes) * 1024 // PAGE
    raise AssertionError("the pool is not mapped")


def test_populate_makes_pages_present():
    pool = Pool(40, PAGE)
    assert mapped_pages(pool) == 0
    pool.populate(0, 30)
    assert mapped_pages(pool) == 30


def test_another_process_maps_pages_that_are_there_and_writes_them():
    owner = Pool(4, 64 * PAGE)
    owner.populate(0, 4)
    other = Pool.attach(owner.path, 4, 64 * PAGE)
    assert mapped_pages(other) == 0
    other.touch(2, 3 * PAGE + 5, 40 * PAGE)
    assert 37 <= mapped_pages(other) < 80
    other.view(2)[39 * PAGE] = 7
    assert owner.view(2)[39 * PAGE] == 7
