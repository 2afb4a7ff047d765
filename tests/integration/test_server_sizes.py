"""Several chunk sizes on one real server: they share its bytes, and the room follows the load."""

import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvtier.core.chunk import ChunkLayout, fingerprint
from tests.server_process import ServerProcess, at_rest, attached, load, run, save, short_folder

RAM, NVME = 96 * 8192, 4 << 20
EXTENTS = 64 << 10
"""For what the file system writes of files with holes."""
SMALL, LARGE = 4096, 12288
SHIFT_S = 120.0
_PROMPTS = count()


def of_size(slot_bytes):
    return ChunkLayout(fingerprint({"slot": slot_bytes}), 1, 1, (slot_bytes,))


class Watched:
    def __init__(self, server, folder):
        self._server, self._folder = server, folder
        self.most_ram = self.most_disk = 0

    def look(self):
        self.most_ram = max(self.most_ram, self._pools())
        self.most_disk = max(
            self.most_disk, sum(_blocks(file) for file in self._folder.rglob("*.kvtier"))
        )

    def _pools(self):
        """Bytes of the pages that the pools have."""
        pools = {}
        folder = Path(f"/proc/{self._server.pid}/fd")
        for name in os.listdir(folder):
            with suppress(OSError):
                if "kvtier-pool" in os.readlink(folder / name):
                    pools[(folder / name).stat().st_ino] = _blocks(folder / name)
        return sum(pools.values())


def disks(folder):
    return f"{folder}/nvme/a,{folder}/nvme/b"


def _blocks(file):
    return file.stat().st_blocks * 512


def busy(client, slot_bytes, watched):
    """Save prompt after prompt until nine tenths of RAM and disk are this size's. Returns
    how much is at the end."""
    until, parts = time.monotonic() + SHIFT_S, {"ram": 0.0, "nvme": 0.0}
    while min(parts.values()) < 0.9 and time.monotonic() < until:
        keys = run(next(_PROMPTS), 8, of_size(slot_bytes))
        save(client, keys)
        watched.look()
        stats = client.stats()
        parts = {
            "ram": stats["ram_ready"] * slot_bytes / RAM,
            "nvme": stats["nvme_held"] * slot_bytes / NVME,
        }
    return parts


def test_a_load_that_moves_between_sizes_has_nine_tenths_of_the_bytes_each_time():
    with (
        short_folder() as folder,
        ServerProcess(folder, ram_bytes=RAM, nvme_path=disks(folder), nvme_bytes=NVME) as server,
        attached(server.access(of_size(SMALL))) as small,
        attached(server.access(of_size(LARGE))) as large,
    ):
        watched, seconds = Watched(server, folder / "nvme"), []
        for client, size in ((small, SMALL), (large, LARGE), (small, SMALL)):
            begun = time.monotonic()
            parts = busy(client, size, watched)
            seconds.append(time.monotonic() - begun)
            assert min(parts.values()) >= 0.9, f"{size}: {parts} after {seconds}"
            last = run(next(_PROMPTS), 4, of_size(size))
            save(client, last)
            assert load(client, last) == ["ram"] * 4
        assert 0.9 * RAM <= watched.most_ram <= RAM
        assert 0.9 * NVME <= watched.most_disk <= NVME + EXTENTS
        for client in (small, large):
            assert client.pool is not None, "nobody was sent away"
            assert client.pool.take_renewed(), "a device that had locked these has old pages"
            at_rest(client)
        held = small.stats()["nvme_held"]
        server.stop()
        server.start()
        with attached(server.access(of_size(SMALL))) as again:
            assert again.stats()["nvme_held"] == held, "what was borrowed is warm"
            watched.look()
        assert watched.most_disk <= NVME + EXTENTS
