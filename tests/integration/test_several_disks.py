"""Several disks as SIZING says: a server with that file uses all of them, and finds all again. The
room of RAM and of disks follows the load from one chunk size to another."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from kvtier.bench.processes.servers import free_port
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.lookup import Progress
from kvtier.testing import content
from kvtier.tiers.nvme.check import check
from tests.child_process import DEADLINE_S, wait_for
from tests.mounts import silent
from tests.nvme_place import FIVE, room, section
from tests.server_process import (
    SLOT,
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    save,
    short_folder,
)

PAGE = Path(__file__).parents[2] / "deploy" / "SIZING.md"


def test_the_pages_file_has_both_disks_used_and_found_again():
    yaml = re.search(r"### Several disks\n\n```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert yaml is not None
    with short_folder() as folder:
        config = folder / "kvtier.yaml"
        config.write_text(yaml[1].replace("/mnt", str(folder)).replace("2TiB", "4MiB"))
        server = ServerProcess(folder, flags=("--config", str(config)))
        keys = run(1, 12)
        with server, attached(server.access()) as client:
            assert save(client, keys) == 12
            assert server.stop() == 0
            reports = [check(folder / f"nvme{at}/kvtier/slots-{SLOT}") for at in range(2)]
            assert sum(report.good for report in reports) == 12
            assert min(report.good for report in reports) >= 4
            assert sum(report.slots for report in reports) * SLOT > 3 << 20
            assert not any(report.bad for report in reports)
            server.start()
            wait_for(lambda: client.lookup(keys).progress == Progress(0, 12), "warm")
            assert load(client, keys) == ["nvme"] * 12
            with client.load(keys) as lease:
                assert lease.views() == [content(key, SLOT) for key in keys]


def test_a_server_starts_on_a_disk_that_does_not_answer_and_uses_it_when_it_does():
    with short_folder() as folder, ExitStack() as stack:
        disk, port = folder / "nvme", free_port()
        disk.mkdir(mode=0o700)
        address = f"http://127.0.0.1:{port}"
        server = ServerProcess(folder, nvme_path=disk, nvme_bytes=1 << 20, admin=address)

        def trouble():
            with urllib.request.urlopen(f"{address}/healthz") as answer:  # noqa: S310
                return json.load(answer)["trouble"]

        with silent(disk):
            server.start()
            client = stack.enter_context(attached(server.access()))
            assert save(client, run(1, 2)) == 2 and load(client, run(1, 2)) == ["ram"] * 2
            assert f"{disk / f'slots-{SLOT}'} (it has not answered since the start)" in trouble()[1]
        wait_for(lambda: not trouble(), "it is back")
        save(client, run(2, 2))
        wait_for(lambda: client.stats()["nvme_held"] == 2, "written")
        assert server.stop() == 0


RAM, PART = 96 * 8192, 100 << 10
NVME = sum(room(parts, PART) for parts in FIVE)
SMALL, LARGE = 4096, 12288
_PROMPTS = count()


def of_size(slot_bytes):
    return ChunkLayout(fingerprint({"slot": slot_bytes}), 1, 1, (slot_bytes,))


def busy(client, slot_bytes):
    """Save prompt after prompt until nine tenths of RAM and disk are this size's. Returns
    how much is at the end."""
    until, parts = time.monotonic() + DEADLINE_S, {"ram": 0.0, "nvme": 0.0}
    while min(parts.values()) < 0.9 and time.monotonic() < until:
        save(client, run(next(_PROMPTS), 8, of_size(slot_bytes)))
        stats = client.stats()
        parts = {
            "ram": stats["ram_ready"] * slot_bytes / RAM,
            "nvme": stats["nvme_held"] * slot_bytes / NVME,
        }
    return parts


def test_a_load_that_moves_between_sizes_has_nine_tenths_of_the_bytes_each_time():
    with (
        short_folder() as folder,
        ServerProcess(folder, ram_bytes=RAM, **section(folder / "nvme", FIVE, PART)) as server,
        attached(server.access(of_size(SMALL))) as small,
        attached(server.access(of_size(LARGE))) as large,
    ):
        for client, size in ((small, SMALL), (large, LARGE), (small, SMALL)):
            parts = busy(client, size)
            assert min(parts.values()) >= 0.9, f"{size}: {parts}"
            last = run(next(_PROMPTS), 4, of_size(size))
            save(client, last)
            assert load(client, last) == ["ram"] * 4
        for client in (small, large):
            assert client.pool is not None, "nobody was sent away"
            assert client.pool.take_renewed(), "a device that had locked these has old pages"
            at_rest(client)
