"""Several disks as SIZING says: a server with that file uses all of them, and finds all again."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier.core.lookup import Progress
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.check import check
from tests.child_process import wait_for
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
