"""Several disks as SIZING says: a server with that file uses all of them, and finds all again."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from kvtier.bench.processes.servers import free_port
from kvtier.core.lookup import Progress
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.check import check
from tests.child_process import wait_for
from tests.mounts import silent
from tests.server_process import SLOT, ServerProcess, attached, load, run, save, short_folder

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
