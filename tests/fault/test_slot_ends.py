"""Bytes behind a chunk in its slot: whoever asks for more than was written gets zeros, from RAM and
from NVMe, and never what the slot held before."""

from contextlib import closing
from pathlib import Path

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.tier import NvmeTier
from tests.child_process import wait_for
from tests.server_process import LAYOUT, OTHER, SLOT, ServerProcess, attached, run, short_folder

SLOTS, SHORT = 16, SLOT - 4095
NVME = 64 * (SLOT + 4096)


def stream(port, size):
    own = hello(LAYOUT.fingerprint, size, stream=True)
    return RemoteTier(ServerAccess(Address("", "127.0.0.1", port), own))


def save_far(port, key):
    with closing(stream(port, SHORT)) as writer:
        assert writer.write(key, memoryview(content(key, SHORT)))


def save_near(server, key):
    """As a worker does, which knows nothing of the slot's end."""
    own = hello(LAYOUT.fingerprint, SHORT, stream=False)
    with attached(ServerAccess(server.address, own)) as client, client.save([key]) as lease:
        (view,) = lease.views()
        view[:SHORT] = content(key, SHORT)
        lease.commit()


@pytest.mark.parametrize("way", ["stream", "attached"])
def test_what_lies_behind_a_chunk_is_zero_for_every_reader_and_on_nvme(way):
    """A tenant fills all of RAM with whole slots. Then shorter chunks of the same size class take
    its slots."""
    port = free_port()
    victims, keys = run(1, SLOTS, OTHER), run(2, SLOTS)
    with short_folder() as folder:
        with (
            ServerProcess(
                folder,
                f"tcp://127.0.0.1:{port}",
                flags=("--insecure",),
                patient=True,
                ram_bytes=SLOTS * SLOT,
                nvme_path=folder / "nvme",
                nvme_bytes=NVME,
            ) as server,
            closing(stream(port, SLOT)) as whole,
            attached(server.access()) as counting,
        ):

            def on_nvme(chunks):
                wait_for(lambda: counting.stats()["nvme_held"] == chunks, f"{chunks} on NVMe")

            for number, key in enumerate(victims, 1):
                assert whole.write(key, memoryview(b"\xff" * SLOT))
                on_nvme(number)
            for number, key in enumerate(keys, SLOTS + 1):
                save_far(port, key) if way == "stream" else save_near(server, key)
                on_nvme(number)
            for key in keys:
                assert_ends_in_zeros(whole, key)
        (kept,) = Path(folder, "nvme").glob("slots-*")
        with closing(NvmeTier(kept, NVME, SLOT)) as nvme:
            assert len(nvme.recovered()) == 2 * SLOTS
            for key in keys:
                assert_ends_in_zeros(nvme, key)


def assert_ends_in_zeros(tier, key):
    into = memoryview(bytearray(b"\xaa" * SLOT))
    assert tier.read(key, into), "it is not held"
    assert into[:SHORT] == content(key, SHORT)
    assert not any(into[SHORT:]), "bytes of another chunk"
