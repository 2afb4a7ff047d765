"""May this process take so much RAM? In made-up machines."""

import logging
import re

import pytest

from kvtier.assemble import assemble
from kvtier.cli.serve import Stores
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.started import INDEX_BYTES, Started, in_reserved_pages, require_ram
from kvtier.store.store import Store
from tests.huge_pages import reserved_pages

MIB, GIB = 1 << 20, 1 << 30
V2 = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "36 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def machine(folder, *, total=64 * GIB, free=64 * GIB, own=0, **files):
    """A /proc and /sys. ``files``: by path, with ``__`` for a slash."""
    status = f"Name:\tx\nRssAnon:\t{own >> 10} kB\nRssShmem:\t999999999 kB\n"
    meminfo = f"MemTotal:       {total >> 10} kB\nMemAvailable:   {free >> 10} kB\n"
    made = {"proc/meminfo": meminfo, "proc/self/status": status, "proc/self/cgroup": "0::/\n"}
    for name, text in (
        made | {name.replace("__", "/"): str(text) for name, text in files.items()}
    ).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def limited(folder, version, limit, used=0, own=0):
    """A process two groups below the one that is limited."""
    top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    membership = "0::/pod/box/leaf\n" if version == 2 else "4:memory:/pod/box/leaf\n0::/\n"
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (folder / top / "pod/box/leaf").mkdir(parents=True)
    (folder / top / "pod" / names[0]).write_text(str(limit))
    (folder / top / "pod" / names[1]).write_text(str(used))
    mounts = V2 if version == 2 else V1
    return machine(folder, own=own, proc__self__cgroup=membership, proc__self__mountinfo=mounts)


@pytest.mark.parametrize("version", [1, 2])
def test_more_than_an_outer_cgroup_allows_is_an_error_in_words(tmp_path, version):
    root = limited(tmp_path, version, 2 * GIB)
    require_ram(2 * GIB, root=root)
    with pytest.raises(ConfigError) as told:
        require_ram(2 * GIB + 4096, source="environment KVTIER_RAM_BYTES", root=root)
    for words in (
        "(environment KVTIER_RAM_BYTES)",
        "2 GiB",
        "of cgroup /pod",
        "Lower ram_bytes below",
        "raise the limit",
    ):
        assert words in str(told.value)


def test_what_the_process_holds_itself_does_not_go_away(tmp_path):
    root = limited(tmp_path, 2, 2 * GIB, own=512 * MIB)
    require_ram(1536 * MIB, root=root)
    with pytest.raises(ConfigError, match=r"of which it needs 512 MiB itself.*below 1\.5 GiB"):
        require_ram(1537 * MIB, root=root)


def test_the_index_of_small_chunks_counts(tmp_path):
    root = limited(tmp_path, 2, GIB)
    slots = GIB // (4096 + INDEX_BYTES)
    require_ram(slots * 4096, 4096, root=root)
    with pytest.raises(ConfigError, match="more RAM than this process can ever have"):
        require_ram(GIB - (1 << 20), 4096, root=root)


def test_more_than_the_machine_has_is_an_error_and_nothing_is_built(tmp_path):
    with pytest.raises(ConfigError, match="MemTotal"):
        require_ram(65 * GIB, root=machine(tmp_path))
    layout = ChunkLayout(bytes(32), 1, 1, (4096,))
    with pytest.raises(ConfigError, match=re.escape("ram_bytes=1024 TiB")):  # 2.7e11 slots
        assemble(Started(Config().with_keys(ram_bytes=1 << 50)), layout)


def reserved(folder, free, promised):
    pages = {"sys__kernel__mm__hugepages__hugepages-2048kB__free_hugepages": free}
    pages["sys__kernel__mm__hugepages__hugepages-2048kB__resv_hugepages"] = promised
    return machine(folder, total=4 * GIB, free=GIB, **pages)


def test_what_reserved_huge_pages_hold_is_no_other_memory(tmp_path, caplog):
    root = reserved(tmp_path, free=3 * GIB // (2 * MIB), promised=GIB // (2 * MIB))
    with caplog.at_level(logging.WARNING, "kvtier"):
        require_ram(2 * GIB, root=root)
        assert in_reserved_pages(2 * GIB, root) and not in_reserved_pages(2 * GIB + 4096, root)
        assert not caplog.records
        require_ram(2 * GIB + 4096, root=root)
        require_ram(2 * GIB, lent=True, root=root)
    assert [record.getMessage().split(" is more")[0] for record in caplog.records] == [
        "ram_bytes=2 GiB (default)"
    ] * 2
    with pytest.raises(ConfigError, match="MemTotal"):
        require_ram(5 * GIB, root=root)


def test_where_no_huge_pages_can_be_reserved_none_are_counted(tmp_path):
    assert not in_reserved_pages(1, machine(tmp_path))


@pytest.mark.alone
def test_an_engines_store_takes_reserved_pages_and_a_servers_does_not():
    """Whoever attaches to a server could give such pages back, and end it."""
    layout, config = ChunkLayout(bytes(32), 1, 1, (MIB,)), Config().with_keys(ram_bytes=4 * MIB)
    with reserved_pages(2):
        for store, reserved_ in (
            (Stores(Started(config))(MIB), False),
            (assemble(Started(config), layout), True),
        ):
            assert isinstance(store, Store)
            assert store.pool.reserved is reserved_
            store.close()


def test_more_than_is_free_now_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "kvtier"):
        require_ram(3 * GIB, root=machine(tmp_path / "free", free=4 * GIB))
        require_ram(GIB, root=limited(tmp_path / "used", 2, 2 * GIB, used=GIB))
        assert not caplog.records
        require_ram(5 * GIB, root=machine(tmp_path / "free", free=4 * GIB))
        require_ram(GIB + 4096, root=limited(tmp_path / "used more", 1, 2 * GIB, used=GIB))
    first, second = caplog.messages
    assert "more than the 4 GiB that are free now (MemAvailable" in first
    assert "1 GiB that are free now (memory.limit_in_bytes of cgroup /pod less use)" in second


def test_a_machine_that_says_nothing_stops_nobody(tmp_path):
    require_ram(1 << 50, root=tmp_path)
