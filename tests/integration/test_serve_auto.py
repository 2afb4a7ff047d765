"""A real ``kvtier serve`` with the one switch, by README's words, on a machine of its own size."""

import re
import shlex
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.core.chunk import ChunkLayout, fingerprint
from tests.child_process import wait_for
from tests.conftest import ROOT
from tests.fence import fence, require_free
from tests.memory_cgroup import entering, memory_cgroup
from tests.server_process import ServerProcess, at_rest, attached, load, run, save, short_folder

MIB, GIB = 1 << 20, 1 << 30
MEMORY, DISK = 10 * GIB, 16 * GIB
LAYOUT = ChunkLayout(fingerprint({"model": "auto"}), 1, 1, (MIB,))
SWITCH, *SERVE = shlex.split(
    next(
        line.partition("#")[0]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("KVTIER_AUTO=") and "kvtier serve" in line
    )
)


class Alone(ServerProcess):
    """README's command behind the fence, at a socket that is seen from outside. ``ram_bytes``: what
    the operator sets by hand, besides the switch."""

    def __init__(self, folder, enter, ram_bytes=""):
        super().__init__(folder, own_python=True, ram_bytes=ram_bytes)
        name, _, value = SWITCH.partition("=")
        self._env[name] = value
        words = [self._command[0], "-m", *SERVE[:-1], f"unix://{self.socket}"]
        self._command = ["unshare", "-m", "sh", "-c", f'{enter} && exec "$@"', "sh", *words]

    def sizes(self):
        line = re.findall(r"auto-config: (ram_bytes .*); 'kvtier plan'", self.said())[-1]
        return dict(re.findall(r"(ram_bytes|nvme_path|nvme_bytes) ([^,;(]+[^,;( ])", line))


@contextmanager
def outside():
    """A folder that the fence does not cover."""
    with tempfile.TemporaryDirectory(prefix="kvt", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_server_takes_its_part_of_the_machine_says_why_and_is_warm_again(tmp_path):
    require_free(MEMORY)
    with fence(tmp_path, MEMORY, DISK) as (disk, enter), outside() as folder:
        with Alone(folder, enter) as server:
            wait_for(lambda: f"serving at unix://{server.socket}" in server.said(), "ready")
            planned, said = server.sizes(), server.said()
            assert server.stop() == 0
        assert 4 <= float(planned["ram_bytes"].split()[0]) <= MEMORY / GIB / 2
        assert 4 <= float(planned["nvme_bytes"].split()[0]) <= DISK / GIB / 2
        assert planned["nvme_path"] in ("/tmp/kvtier", "/var/tmp/kvtier")
        ram, nvme = (planned[key] for key in ("ram_bytes", "nvme_bytes"))
        assert re.search(rf"auto-config: ram_bytes {ram}: holds .* of cgroup /\S+ less use", said)
        assert re.search(rf"auto-config: nvme_bytes {nvme}: holds .* half of what is free", said)
        with Alone(folder, enter, ram_bytes="8MiB") as server:
            assert "ram_bytes 8 MiB (yours; the plan would be " in server.said()
            by_hand = planned | {"ram_bytes": "8 MiB"}
            assert server.sizes() == by_hand
            with attached(server.access(LAYOUT)) as client:
                assert save(client, run(1, 4, LAYOUT)) == 4
                at_rest(client)
            assert server.stop() == 0
            taken = (disk / "kvtier" / f"slots-{MIB}" / "slots.kvtier").stat().st_blocks * 512
            assert taken > 4 * GIB, "all of it is reserved"
            server.start()
            assert server.sizes() == by_hand
            with attached(server.access(LAYOUT)) as client:
                assert load(client, run(1, 4, LAYOUT)) == ["nvme"] * 4


def test_a_server_without_room_does_not_start_and_gives_every_number(tmp_path):
    with memory_cgroup(GIB) as group, short_folder() as folder:
        server = ServerProcess(
            folder, flags=("--auto", "true"), ram_bytes="", nvme_path=tmp_path / "nvme"
        )
        server._command = entering(group, server._command)
        said = server.refusal()
    assert "kvtier: auto-config finds no room for a RAM tier: " in said
    assert "32,768 tokens take 4 GiB" in said and "set ram_bytes by hand" in said
    assert "Traceback" not in said
    assert not (tmp_path / "nvme").exists(), "nothing is left"
