"""The looks, against real mounts, a real cgroup and a real Redis, and against made-up /proc and
/sys trees."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.autoconfig.facts import GIB, MIB, UNLIMITED, Facts, Memory
from kvtier.autoconfig.gpus import probe_gpus
from kvtier.autoconfig.memory import probe_memory
from kvtier.autoconfig.model import describe, probe_engine, probe_model
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.start import measure
from kvtier.core import fact, pool
from kvtier.core.errors import ConfigError
from kvtier.core.fact import known
from kvtier.tiers.nvme import disks as disk_probe
from kvtier.tiers.nvme.disks import probe_disk, probe_disks
from kvtier.tiers.redis.parts import Redis, RedisSection, probe
from tests.command import ran
from tests.huge_pages import populated
from tests.memory_cgroup import entering, memory_cgroup
from tests.model_configs import MODELS
from tests.mounts import mounted
from tests.redis_server import RedisServer

SMALL = describe(MODELS["qwen2.5-1.5b"], "small")
ROOMY = Memory(available=known(100 * GIB, "test"), cgroup_headroom=known(UNLIMITED, "test"))


def plant(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "30 20 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 31 0:32 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"


def test_cgroup_v2_takes_the_tightest_level_and_forgives_file_cache(tmp_path):
    base = "sys__fs__cgroup__"
    root = plant(
        tmp_path,
        proc__self__cgroup="0::/pod/box/leaf\n",
        proc__self__mountinfo=V2.format(top="/"),
        **{
            f"{base}pod__memory_dot_max": str(8 * GIB),
            f"{base}pod__memory_dot_current": str(7 * GIB),
            f"{base}pod__memory_dot_stat": f"anon 1\ninactive_file {2 * GIB}\n",
            f"{base}pod__box__memory_dot_max": str(5 * GIB),
            f"{base}pod__box__memory_dot_current": str(GIB),
            f"{base}pod__box__leaf__memory_dot_max": "max",
            f"{base}pod__box__leaf__memory_dot_high": str(6 * GIB),
        },
    )
    memory = probe_memory(root)
    assert memory.cgroup_headroom.value == 3 * GIB  # 8 - (7 - 2) of /pod, not 4 of /pod/box
    assert "memory.max of cgroup /pod less use" in memory.cgroup_headroom.source
    assert (memory.cgroup_limit.value, memory.cgroup_limit.source) == (
        5 * GIB,
        "memory.max of cgroup /pod/box",
    )


def test_the_limit_that_only_slows_down_does_not_kill(tmp_path):
    base = "sys__fs__cgroup__"
    root = plant(
        tmp_path,
        proc__self__cgroup="0::/pod\n",
        proc__self__mountinfo=V2.format(top="/"),
        **{f"{base}pod__memory_dot_max": "max", f"{base}pod__memory_dot_high": str(2 * GIB)},
    )
    memory = probe_memory(root)
    assert (memory.cgroup_headroom.value, memory.cgroup_limit.value) == (2 * GIB, UNLIMITED)


def test_cgroup_v1_in_a_container_whose_mount_starts_at_its_own_group(tmp_path):
    base = "sys__fs__cgroup__memory__"
    root = plant(
        tmp_path,
        proc__self__cgroup="5:cpu:/\n4:memory:/docker/abc\n0::/\n",
        proc__self__mountinfo=V1.format(top="/docker/abc"),
        **{
            f"{base}memory_dot_limit_in_bytes": str(4 * GIB),
            f"{base}memory_dot_usage_in_bytes": str(GIB),
            f"{base}memory_dot_stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n",
        },
    )
    assert probe_memory(root).cgroup_headroom.value == 4 * GIB - GIB // 2
    # set above what is mounted here
    pod = f"hierarchical_memory_limit {3 * GIB}\ntotal_inactive_file 0\n"
    plant(root, **{f"{base}memory_dot_stat": pod})
    assert probe_memory(root).cgroup_headroom.value == 2 * GIB
    assert probe_memory(root).cgroup_limit.value == 3 * GIB


def test_no_limit_is_known_and_no_proc_is_unknown(tmp_path):
    unlimited = plant(
        tmp_path,
        proc__self__cgroup="4:memory:/\n",
        proc__self__mountinfo=V1.format(top="/"),
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712",
    )
    assert probe_memory(unlimited).cgroup_headroom.value == UNLIMITED
    blind = probe_memory(tmp_path / "nothing")
    assert blind.cgroup_headroom.value is blind.available.value is None
    assert "No such file" in blind.available.source


def test_real_cgroup_limit_of_an_outer_group_is_found():
    with memory_cgroup(512 * MIB) as group:
        code = (
            "from kvtier.autoconfig.memory import probe_memory\n"
            "for fact in (probe_memory().cgroup_headroom, probe_memory().cgroup_limit): "
            "print(fact.value, fact.source)"
        )
        command = entering(group, [sys.executable, "-c", code])
        headroom, limit = ran(command).stdout.splitlines()
    assert 256 * MIB < int(headroom.split()[0]) <= 512 * MIB
    assert int(limit.split()[0]) == 512 * MIB
    assert group.parent.name in headroom and group.parent.name in limit


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@needs_root
def test_real_tmpfs_is_seen_through_and_left_out(tmp_path):
    with mounted(tmp_path / "ram", "-t", "tmpfs", "-o", "size=64m", "kvtier-test") as point:
        disk = probe_disk(str(point / "kvtier"))
        assert (disk.filesystem.value, disk.total.value) == ("tmpfs", 64 * MIB)
        plan = make_plan(Facts(memory=ROOMY, disks=(disk,), model=SMALL))
    assert f"nvme {point}/kvtier" in dict(plan.left_out)
    assert "counted twice" in dict(plan.left_out)[f"nvme {point}/kvtier"]


@needs_root
def test_real_nearly_full_disk_counts_free_not_total_and_own_files_as_free(tmp_path):
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 256 * MIB)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as point:
        before = probe_disk(str(point))
        (point / "kvtier/replica1").mkdir(parents=True)
        for name, size in (("others", 100 * MIB), ("kvtier/replica1/slots.kvtier", 120 * MIB)):
            (point / name).write_bytes(os.urandom(MIB) * (size // MIB))
        os.sync()
        disk = probe_disk(str(point / "kvtier"))
        assert (disk.filesystem.value, disk.writable.value, disk.o_direct.value) == (
            "ext4",
            True,
            True,
        )
        assert disk.device.value == "virtual"
        assert before.free.value and disk.free.value is not None and disk.own.value is not None
        assert before.free.value - disk.free.value == pytest.approx(220 * MIB, rel=0.02)
        assert disk.own.value == pytest.approx(120 * MIB, rel=0.01)
        plan = make_plan(Facts(memory=ROOMY, disks=(disk,), model=SMALL))
        assert "too small" in dict(plan.left_out)[f"nvme {point}/kvtier"]
        assert [
            entry.name for entry in point.iterdir() if entry.name.startswith("kvtier-probe")
        ] == []


def test_a_path_that_is_not_there_yet_is_judged_by_what_holds_it(tmp_path):
    disk = probe_disk(str(tmp_path / "not" / "yet"))
    assert disk.free.value and disk.filesystem.value and disk.own.value == 0
    assert list(tmp_path.iterdir()) == []
    assert probe_disk("/proc/kvtier").o_direct.value is not True


def block_device(root, number, where, **files):
    """A disk in a made-up /sys, and the link by which its number finds it."""
    place = root / "sys/devices" / where
    place.mkdir(parents=True)
    plant(place, **files)
    link = root / "sys/dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(place)
    return place


def mount_line(number, point, kind="xfs", source="/dev/x"):
    return f"40 1 {number} / {point} rw - {kind} {source} rw\n"


@pytest.mark.parametrize(
    ("where", "files", "kind"),
    [
        ("nvme1n1", {"device__model": "Amazon EC2 NVMe Instance Storage"}, "nvme"),
        ("nvme0n1", {"device__model": "Amazon Elastic Block Store              "}, "ebs"),
        ("xvda", {"queue__rotational": "1"}, "virtual"),
        ("sda", {"queue__rotational": "1", "device__model": "ST4000"}, "rotational"),
        ("sdb", {"queue__rotational": "0", "device__model": "SSD 870"}, "ssd"),
        ("sdc", {"queue__rotational": "0", "device__model": "PersistentDisk"}, "virtual"),
    ],
)
def test_device_kinds(tmp_path, where, files, kind):
    block_device(tmp_path, "8:0", where, **files)
    plant(tmp_path, proc__self__mountinfo=mount_line("8:0", tmp_path))
    assert probe_disk(str(tmp_path), tmp_path).device.value == kind


def test_device_of_a_partition_and_of_a_raid_is_the_slowest_disk_below(tmp_path):
    block_device(tmp_path, "259:1", "nvme0n1/nvme0n1p1", partition="1")
    plant(tmp_path / "sys/devices/nvme0n1", device__model="Amazon Elastic Block Store")
    plant(tmp_path, proc__self__mountinfo=mount_line("259:1", tmp_path))
    assert probe_disk(str(tmp_path), tmp_path).device.value == "ebs"
    raid = block_device(tmp_path, "9:0", "md0", slaves__none="")
    (raid / "slaves/none").unlink()
    fast = block_device(tmp_path, "259:2", "nvme1n1", device__model="Instance Storage")
    for name in ("a", "b"):
        (raid / "slaves" / name).symlink_to(
            fast if name == "a" else tmp_path / "sys/devices/nvme0n1"
        )
    plant(tmp_path, proc__self__mountinfo=mount_line("9:0", tmp_path))
    assert probe_disk(str(tmp_path), tmp_path).device.value == "ebs"


def test_the_longest_and_latest_mount_holds_a_path_and_escapes_are_undone(tmp_path):
    place = tmp_path / "a b"
    place.mkdir()
    escaped = Path(str(place).replace(" ", "\\040"))
    lines = mount_line("0:1", Path("/"), "ext4") + mount_line("0:2", escaped, "overlay", "overlay")
    plant(
        tmp_path, proc__self__mountinfo=lines + mount_line("0:3", escaped, "nfs4", "host:/export")
    )
    disk = probe_disk(str(place), tmp_path)
    assert disk.filesystem.value == "nfs4"
    assert disk.device.value is None and "not a block device" in disk.device.source
    assert probe_disk(str(tmp_path), tmp_path).filesystem.value == "ext4"


def test_local_disks_are_found_where_they_are_mounted(tmp_path, monkeypatch):
    """But for a system's own places, network disks, and a second folder on one disk."""
    block, lines = tmp_path / "sys/devices/block", ""
    places = {name: tmp_path / name for name in ("one", "two", "again", "ebs")}
    for at, (name, place) in enumerate(places.items()):
        place.mkdir()
        device = block / "nvme0n1/nvme0n1p1" if name == "again" else block / f"nvme{at}n1"
        plant(device, **({"partition": "1"} if name == "again" else {"queue__rotational": "0"}))
        if name == "ebs":
            plant(device, device__model="Amazon Elastic Block Store")
        link = tmp_path / f"sys/dev/block/259:{at}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        lines += mount_line(f"259:{at}", place)
    for system in ("/", "/boot/efi", "/home", "/usr/local"):
        lines += mount_line("259:1", Path(system))
    plant(tmp_path, proc__self__mountinfo=lines)
    devices = {str(place): at for at, place in enumerate(places.values())}
    found = disk_probe.local_mounts(tmp_path)
    assert found == [str(places[name]) for name in ("one", "two", "again")]
    monkeypatch.setattr(disk_probe, "CANDIDATES", ())
    monkeypatch.setattr(disk_probe, "_ALWAYS", ())
    stat = os.stat

    def of_a_device(path, **more):
        real = stat(path, **more)
        at = devices.get(str(path), real.st_dev)
        return os.stat_result((*real[:2], at, *real[3:]))

    monkeypatch.setattr(os, "stat", of_a_device)
    assert [disk.path for disk in probe_disks(root=tmp_path)] == [
        f"{places[name]}/kvtier" for name in ("one", "two")
    ]


def test_a_folder_that_the_tier_would_refuse_is_no_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_probe, "CANDIDATES", ())
    monkeypatch.setattr(disk_probe, "_ALWAYS", (str(tmp_path),))
    assert [disk.path for disk in probe_disks()] == [f"{tmp_path}/kvtier"]
    (tmp_path / "kvtier").mkdir(mode=0o700)
    assert [disk.path for disk in probe_disks()] == [f"{tmp_path}/kvtier"]
    (tmp_path / "kvtier").chmod(0o777)
    assert probe_disks() == ()


def test_gpus_from_the_driver_none_and_amd(tmp_path):
    assert probe_gpus(tmp_path).count.value == 0
    plant(tmp_path / "amd", dev__kfd="")
    amd = probe_gpus(tmp_path / "amd")
    assert amd.count.value is None and amd.pin_charged.value is None
    for slot in "01":
        plant(
            tmp_path,
            **{
                f"proc__driver__nvidia__gpus__{slot}__information": (
                    "Model: \t NVIDIA L40S\nIRQ: 1\n"
                )
            },
        )
    gpus = probe_gpus(tmp_path)
    assert (gpus.count.value, gpus.kind.value, gpus.bytes_each.value) == (
        2,
        "NVIDIA L40S",
        46 * GIB,
    )
    assert gpus.pin_charged.value is False


@pytest.mark.redis
def test_real_redis_is_sized_timed_and_left_clean():
    with RedisServer(maxmemory="64mb", maxmemory_policy="allkeys-random") as server:
        seen = probe(RedisSection(url=server.url))
        assert (seen.reachable.value, seen.maxmemory.value, seen.local) == (True, 64 * MIB, True)
        assert seen.policy.value == "allkeys-random"
        timed = measure(Facts(tiers={"redis": seen}), seconds=10.0).tiers["redis"]
        assert isinstance(timed, Redis) and timed.speed.value and timed.speed.value > 0
        with server.admin() as client:
            assert client.dbsize() == 0


def test_model_folder_index_files_and_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a local model folder or config\.json"):
        probe_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    assert "estimated" in probe_model(str(tmp_path)).weight_bytes.source
    (tmp_path / "model.bin").write_bytes(b"x" * 10)
    assert probe_model(str(tmp_path)).weight_bytes.value == 10
    (tmp_path / "a.safetensors").write_bytes(b"x" * 20)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 22)
    assert probe_model(str(tmp_path)).weight_bytes.value == 42
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 77}}')
    model = probe_model(str(tmp_path), "fp8")
    assert (model.weight_bytes.value, model.kv_bytes_per_token.value) == (77, 72 * 1024)


def test_engine_facts_come_from_its_own_configuration():
    hf_config = SimpleNamespace(to_dict=lambda: MODELS["llama-3.1-8b"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size_local=3
        ),
        cache_config=SimpleNamespace(block_size=16, cache_dtype="fp8", num_gpu_blocks=1000),
        model_config=SimpleNamespace(
            model="a/b", max_model_len=8192, dtype="torch.bfloat16", hf_config=hf_config
        ),
    )
    engine, model = probe_engine(config, engines=2)
    numbers = (
        engine.tensor_parallel,
        engine.pipeline_parallel,
        engine.data_parallel,
        engine.engines,
    )
    assert [fact.value for fact in numbers] == [4, 2, 3, 2]
    assert (engine.block_tokens.value, engine.max_model_len.value) == (16, 8192)
    assert (engine.kv_cache_tokens.value, engine.started.value) == (16_000, True)
    assert model.kv_bytes_per_token.value == 64 * 1024


def test_measuring_fills_speeds_and_leaves_nothing_behind(tmp_path):
    disk = probe_disk(str(tmp_path / "kvtier"))
    if not disk.o_direct.value:
        pytest.skip(f"no O_DIRECT in the test folder: {disk.o_direct.source}")
    slow = replace(disk, filesystem=known("tmpfs", "test"))
    facts = measure(Facts(disks=(disk, slow)), seconds=0.5)
    assert facts.copy_speed.value and facts.disks[0].read_speed.value
    assert facts.disks[1].read_speed.value is None
    assert list(tmp_path.iterdir()) == []


def test_a_trial_stops_when_its_time_is_over(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(fact, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    steps: list[int] = []

    def step(index):
        steps.append(index)
        return 10

    assert fact.rate(step, 3.0, 500) == 10.0
    assert steps == [0, 1, 2, 3]


def test_a_failing_look_never_raises(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("refused by a sandbox")

    monkeypatch.setattr(os, "statvfs", refuse)
    disk = probe_disk(str(tmp_path))
    assert disk.free.value is None and "refused by a sandbox" in disk.free.source
    assert probe_memory().shm.value is None


def test_reserved_huge_pages_that_are_promised_to_others_are_not_free(tmp_path):
    pages = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    assert probe_memory(tmp_path).reserved.value is None
    pages.mkdir(parents=True)
    (pages / "free_hugepages").write_text("100\n")
    (pages / "resv_hugepages").write_text("30\n")
    assert probe_memory(tmp_path).reserved.value == 140 * MIB


def test_whether_the_kernel_makes_huge_pages_is_tried(monkeypatch):
    populated(1).close()
    assert probe_memory().makes_huge.value is True
    monkeypatch.setattr(pool, "_COLLAPSE", 999)  # an advice that no kernel knows
    assert probe_memory().makes_huge.value is False
