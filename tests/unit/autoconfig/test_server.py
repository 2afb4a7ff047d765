"""What a server plans at its start, on machines made of files and of facts."""

import logging
from dataclasses import replace

import pytest

from kvtier.autoconfig import start
from kvtier.autoconfig.explain import PLANNED
from kvtier.autoconfig.facts import GIB, MIB, Facts, Gpus, Memory, Serving
from kvtier.autoconfig.memory import probe_memory
from kvtier.autoconfig.model import usual
from kvtier.autoconfig.plan import make_plan
from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.core.fact import known, unknown
from kvtier.core.terminal import size_text
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.nvme.disks import Disk, probe_disk, reusable

DISK = Disk(
    "/mnt/nvme/kvtier",
    free=known(400 * GIB, "statvfs"),
    total=known(500 * GIB, "statvfs"),
    own=known(0, "files"),
    filesystem=known("ext4", "mountinfo"),
    writable=known(True, "a page was written"),
    o_direct=known(True, "a page was written"),
    device=known("nvme", "/sys"),
    read_speed=known(3e9, "measured"),
)
AUTO = {"KVTIER_AUTO": "true"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A host of 100 GiB, of which a cgroup leaves so many, with these disks and GPUs."""
    proc, group = tmp_path / "proc", tmp_path / "sys/fs/cgroup/pod"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {100 << 20} kB\nMemAvailable: {90 << 20} kB\n")
    (proc / "self/cgroup").write_text("0::/pod\n")
    (proc / "self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (group / "memory.current").write_text("0")
    monkeypatch.setattr(start, "probe_memory", lambda: probe_memory(tmp_path))
    monkeypatch.setattr(start, "measure", lambda facts: facts)
    monkeypatch.setattr(start, "reusable", lambda disk, server: disk)

    def make(gib, *disks, gpus=None):
        (group / "memory.max").write_text(str(gib * GIB))

        def probe(paths):
            return tuple(replace(disk, path=path) for disk in disks for path in paths) or disks

        monkeypatch.setattr(start, "probe_disks", probe)
        monkeypatch.setattr(start, "probe_gpus", lambda: gpus or Gpus(known(0, "none")))

    return make


def planned(**env):
    return start.sized(load(env=AUTO | env))


def test_without_the_switch_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(start, "probe_host", lambda *_, **__: pytest.fail("it was"))
    config = load(env={})
    assert start.sized(config) is config


def test_a_server_takes_half_of_what_its_cgroup_and_its_disk_leave(machine, caplog):
    """One server for all ranks: no share is set aside for others. The engines' chunks are not its
    to size."""
    machine(40, DISK)
    with caplog.at_level(logging.INFO, "kvtier"):
        config = planned()
    assert (config.ram.bytes_, config.nvme.path) == (20 * GIB, DISK.path)
    assert config.nvme.bytes_ == 200 * GIB
    found = {key for key, source in config.sources.items() if source == PLANNED}
    assert found == {"ram_bytes", "nvme_path", "nvme_bytes"}
    lines = [record.getMessage() for record in caplog.records]
    (told,) = [
        line for line in lines if line.startswith("auto-config: ram_bytes 20 GiB, nvme_path")
    ]
    assert "nvme_bytes 200 GiB" in told
    ram, path, disk = [line for line in lines if not line.endswith("gives the reasons")]
    assert ram.startswith("auto-config: ram_bytes 20 GiB: holds 163,840 tokens; ")
    assert ram.endswith("(memory.max of cgroup /pod less use)")
    assert path == f"auto-config: nvme_path {DISK.path}: nvme, 3 GB/s (measured) (/sys)"
    assert disk.startswith("auto-config: nvme_bytes 200 GiB: holds 1,638,400 tokens; 50 GiB kept ")
    assert "; half of what is free: --trace says what more would bring (statvfs)" in disk


def test_servers_of_one_host_get_equal_shares(machine):
    machine(40, DISK)
    config = planned(KVTIER_HOST_ENGINES="2")
    assert (config.ram.bytes_, config.nvme.bytes_) == (10 * GIB, 100 * GIB)


def test_what_is_set_by_hand_holds_and_the_log_says_whose_word_it_was(machine, caplog):
    machine(40, DISK)
    with caplog.at_level(logging.INFO, "kvtier"):
        config = planned(
            KVTIER_RAM_BYTES="1GiB", KVTIER_NVME_PATH="/mnt/other", KVTIER_SLOT_BYTES="4MiB"
        )
    assert (config.ram.bytes_, config.server.slot_bytes) == (GIB, 4 * MIB)
    assert (config.nvme.path, config.nvme.bytes_) == ("/mnt/other", 200 * GIB)
    assert "ram_bytes 1 GiB (yours; the plan would be 20 GiB)" in caplog.text
    assert "auto-config: nvme_bytes 200 GiB: holds" in caplog.text
    assert "auto-config: ram_bytes 20 GiB: " not in caplog.text, "not what is used"
    assert "nvme_path /mnt/other (yours;" in caplog.text


def test_without_a_disk_a_server_has_ram_and_says_so(machine, caplog):
    machine(40)
    with caplog.at_level(logging.INFO, "kvtier"):
        config = planned()
    assert (config.ram.bytes_, config.nvme.path, config.nvme.bytes_) == (20 * GIB, None, None)
    assert "nvme left out: no candidate path was given or found" in caplog.text
    machine(40, replace(DISK, o_direct=known(False, "EINVAL")))
    assert planned(KVTIER_NVME_PATH="/mnt/slow").nvme.path is None


def test_no_room_is_refused_in_an_engines_words(machine):
    machine(4, DISK)
    with pytest.raises(ConfigError, match="auto-config finds no room for a RAM tier: ") as refused:
        planned()
    assert "32,768 tokens take 4 GiB (4 GiB available, 2 GiB reserved)" in str(refused.value)
    assert str(refused.value).endswith("set ram_bytes by hand")
    assert planned(KVTIER_RAM_BYTES="64MiB").ram.bytes_ == 64 * MIB


@pytest.mark.parametrize(("read", "used"), [(4e9, True), (1e9, False)])
def test_a_disk_pays_where_a_long_prompt_of_a_usual_model_comes_sooner(machine, read, used):
    """On an H100, whose prefill is fast: 4 GB/s, and not 1 GB/s."""
    fast = known(read, "measured")
    gpus = Gpus(known(1, "t"), known("NVIDIA H100 80GB HBM3", "t"), pin_charged=known(False, "t"))
    machine(40, replace(DISK, read_speed=fast), gpus=gpus)
    assert (planned().nvme.path is not None) is used


def chunks(folder, size):
    """An earlier run's file. Returns the bytes that it has on the disk."""
    folder.mkdir(parents=True)
    file = folder / "slots.kvtier"
    file.write_bytes(b"\1" * size)
    return file.stat().st_blocks * 512


def test_servers_and_engines_count_their_own_files_alone(tmp_path):
    """An engine's chunks in the same folder are no room for a server, nor the other way round."""
    theirs = chunks(tmp_path / "kv/slots-8192", MIB) + chunks(tmp_path / "kv/slots-4096", MIB)
    engines = chunks(tmp_path / "kv/replica1", 3 * MIB)
    disk = probe_disk(str(tmp_path / "kv"))
    assert disk.own.value == theirs + engines
    assert reusable(disk, server=True).own.value == theirs
    assert reusable(disk, server=False).own.value == engines
    config = Config().with_keys(nvme_path=disk.path)
    for is_server, own in ((True, theirs), (False, engines)):
        (seen,) = start.probe_host(config, usual("a test"), Serving(), server=is_server).disks
        assert seen.own.value == own
    untold = replace(disk, own=unknown("no right"))
    assert reusable(untold, server=False) == untold
    none = reusable(probe_disk(str(tmp_path / "none")), server=True)
    assert none.own.value == 0


def test_a_folder_that_a_dead_engine_left_is_named_to_the_server_that_lacks_the_room(
    tmp_path, caplog
):
    """README's first block and then its second, on one host."""
    engines = tmp_path / "kv"
    tier = DiskSet([DiskPlace(engines, 96 * MIB, 1)], MIB)
    config = Config().with_keys(nvme_path=str(engines))
    (used,) = start.probe_host(config, usual("a test"), Serving(), server=True).disks
    assert used.left == (), "it is no dead engine's"
    tier.close()
    (mine,) = start.probe_host(config, usual("a test"), Serving()).disks
    assert mine.left == (), "the next engine uses it"
    (left,) = start.probe_host(config, usual("a test"), Serving(), server=True).disks
    size = size_text(sum(file.stat().st_blocks * 512 for file in engines.glob("*.kvtier")))
    assert left.left == (f"an engine's folder holds {size}: kvtier clear --folder {engines}",)
    full = replace(left, free=known(3 * GIB, "statvfs"), o_direct=known(True, "tried"))
    facts = Facts(
        memory=Memory(available=known(90 * GIB, "t")),
        gpus=Gpus(known(0, "none")),
        model=usual("t"),
        disks=(full,),
    )
    assert any(left.left[0] in why for _, why in make_plan(facts).left_out)
    roomy = replace(full, free=known(3000 * GIB, "statvfs"), read_speed=known(6e9, "measured"))
    assert any(left.left[0] in why for why in make_plan(replace(facts, disks=(roomy,))).warnings)
    with_chunks = engines / "slots-1048576"
    chunks(with_chunks, 65 * MIB)
    assert reusable(probe_disk(str(engines)), server=True).left[0].endswith("below it go too)")
    (servers,) = reusable(probe_disk(str(engines)), server=False).left
    assert servers.endswith(f"kvtier clear --folder {with_chunks}")


def test_the_next_start_keeps_its_folders_and_their_size(machine):
    both = replace(DISK, path="/a/kvtier"), replace(DISK, path="/b/kvtier")
    machine(40, *both)
    first = planned()
    assert (first.nvme.path, first.nvme.bytes_) == ("/a/kvtier,/b/kvtier", 400 * GIB)
    free, own = known(200 * GIB, "statvfs"), known(200 * GIB, "files")
    machine(40, *(replace(disk, free=free, own=own) for disk in both))
    assert planned().nvme == first.nvme


def test_the_next_start_keeps_its_folder_and_its_size(machine):
    """The other disk seems twice as fast this time. What the first start took counts as free."""
    here = replace(DISK, device=known("virtual", "seen"))
    other = replace(here, path="/data/kvtier", read_speed=known(2e9, "measured"))
    machine(40, here, other)
    first = planned()
    assert (first.nvme.path, first.nvme.bytes_) == (here.path, 200 * GIB)

    here = replace(here, free=known(200 * GIB, "statvfs"), own=known(200 * GIB, "files"))
    machine(40, here, replace(other, read_speed=known(6e9, "measured")))
    assert planned().nvme.path == here.path
    assert planned().nvme.bytes_ == 200 * GIB
    machine(40, here, replace(other, read_speed=known(60e9, "measured")))
    assert planned().nvme.path == other.path


def test_the_facts_are_of_one_server(machine, monkeypatch):
    """Not of an engine with the server's address, which has no store of its own."""
    machine(40, DISK)
    seen: list[Facts] = []

    def measure(facts):
        seen.append(facts)
        return facts

    monkeypatch.setattr(start, "measure", measure)
    config = planned(KVTIER_SERVER="unix:///run/kvtier/kvtier.sock,tcp://b:9600")
    assert config.ram.bytes_ == 20 * GIB
    (facts,) = seen
    assert facts.engine.data_parallel.value == facts.engine.engines.value == 1
