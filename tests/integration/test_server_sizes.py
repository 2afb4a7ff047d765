"""Several chunk sizes on one real server: the room of RAM and of its disks follows the load."""

import time
from itertools import count

from kvtier.core.chunk import ChunkLayout, fingerprint
from tests.child_process import DEADLINE_S
from tests.nvme_place import FIVE, room, section
from tests.server_process import ServerProcess, at_rest, attached, load, run, save, short_folder

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
