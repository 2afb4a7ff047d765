"""Machines whose CPU and GPU share one memory, as files: how they are seen, and what is planned."""

from dataclasses import replace

import pytest

from kvtier.autoconfig.explain import summary
from kvtier.autoconfig.facts import GIB, Facts, Gpus, Memory, Model, Serving
from kvtier.autoconfig.gpus import probe_gpus, read_gpus, shared_memory
from kvtier.autoconfig.memory import probe_memory
from kvtier.autoconfig.plan import make_plan
from kvtier.cli.vllm_command import allocator
from kvtier.config.keys import Config
from kvtier.core.fact import Fact, known, unknown
from kvtier.tiers.nvme.disks import Disk

DRIVER, KFD = "proc/driver/nvidia/gpus/000f:01:00.0", "sys/class/kfd/kfd/topology/nodes"
JETSON = "NVIDIA Jetson AGX Orin Developer Kit"
AMD_CPU = "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\ndevice_id 0\n"


def apu(target, device):
    return f"cpu_cores_count 0\nsimd_count 80\ngfx_target_version {target}\ndevice_id {device}\n"


HALO, RADEON, MI300A, MI300X = (
    apu(110501, 0x1586),
    apu(110000, 0x744C),
    apu(90402, 0x74A0),
    apu(90402, 0x74A1),
)


def machine(folder, files):
    made = {"proc/meminfo": "MemTotal: 126976000 kB\nMemAvailable: 120000000 kB\n", **files}
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


SHARED = {
    "GB10": ({f"{DRIVER}/information": "Model: \t NVIDIA GB10\nIRQ: 1\n"}, "NVIDIA GB10"),
    "DGX Spark without its driver": ({"sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n"},
        "GB10 (NVIDIA_DGX_Spark)"),
    "Jetson": ({"proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0",
            "proc/device-tree/model": f"{JETSON}\0"},
        JETSON),
    "Jetson in a container, which hides the device tree": ({"sys/devices/soc0/family": "Tegra\n",
            "sys/devices/soc0/machine": f"{JETSON}\n"},
        JETSON),
    "Jetson Thor": ({f"{DRIVER}/information": "Model: \t NVIDIA Thor\n"}, "NVIDIA Thor"),
    "Strix Halo": ({f"{KFD}/0/properties": AMD_CPU, f"{KFD}/1/properties": HALO}, "AMD Strix Halo"),
    "MI300A": ({f"{KFD}/{node}/properties": text for node, text in enumerate([AMD_CPU, MI300A,
            MI300A])},
        "AMD MI300A"),
}  # fmt: skip
APART: dict[str, dict[str, str]] = {
    "nothing": {},
    "H100": {f"{DRIVER}/information": "Model: \t NVIDIA H100 80GB HBM3\n"},
    "GH200": {f"{DRIVER}/information": "Model: \t NVIDIA GH200 480GB\n"},
    "a card whose name is not known": {f"{DRIVER}/information": "Model: \t NVIDIA RTX 9990\n"},
    "MI300X": {f"{KFD}/0/properties": AMD_CPU, f"{KFD}/1/properties": MI300X},
    "an APU beside a card": {f"{KFD}/1/properties": HALO, f"{KFD}/2/properties": RADEON},
    "another board": {"proc/device-tree/compatible": "raspberrypi,5\0brcm,bcm2712\0"},
    "another chip": {"sys/devices/soc0/family": "Snapdragon\n"},
    "another PC": {"sys/class/dmi/id/product_name": "PowerEdge R760\n"},
    "a file of nonsense": {f"{KFD}/1/properties": "gfx_target_version " + "9" * 40_000},
}


@pytest.mark.parametrize("name", SHARED)
def test_a_gpu_without_memory_of_its_own_is_seen(tmp_path, name):
    files, product = SHARED[name]
    root = machine(tmp_path, files)
    assert shared_memory(root).value == product and shared_memory(root).source.startswith("/")
    gpus = probe_gpus(root)
    assert (gpus.shared.value, gpus.kind.value) == (product, product)
    assert gpus.count.value != 0, "no machine without a GPU"


@pytest.mark.parametrize("name", APART)
def test_other_machines_are_as_they_were(tmp_path, name):
    root = machine(tmp_path, APART[name])
    assert shared_memory(root).value is None
    assert probe_gpus(root).shared.value is None


def test_nvidia_smi_has_the_last_word(tmp_path):
    """It tells the size of a card on a Jetson's board, and of a shared memory it tells none."""
    jetson = machine(tmp_path, SHARED["Jetson"][0])
    assert read_gpus("Orin (nvgpu), [N/A]\n", jetson).shared.value == "Orin (nvgpu)"
    card = read_gpus("NVIDIA RTX 9990, 49140\n", jetson)
    assert card.shared.value is None and card.bytes_each.value == 49140 << 20
    empty = tmp_path / "empty"
    newer = read_gpus("NVIDIA GB99, [N/A]\n", empty)
    assert (newer.count.value, newer.shared.value) == (1, "NVIDIA GB99")
    assert read_gpus("NVIDIA L40S, [Insufficient Permissions]\n", empty).shared.value is None


GRACE = {
    f"{DRIVER}/information": "Model: \t NVIDIA GH200 480GB\n",
    f"{DRIVER}/numa_status": "Node:      1\nStatus:    online\nAddress:   1\nSize:      1\n",
    "sys/devices/system/node/node0/cpulist": "0-71\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 500 kB\nNode 0 MemFree: 400 kB\n",
    "sys/devices/system/node/node1/cpulist": "\n",
    "sys/devices/system/node/node1/meminfo": (
        "Node 1 MemTotal:  98000000 kB\nNode 1 MemFree:  90000000 kB\n"
    ),
}


def test_gpu_memory_that_the_kernel_counts_as_ram_is_no_room(tmp_path):
    """A Grace superchip in the driver's NUMA mode: its GPU has memory, which Linux lists as a node
    without CPUs. Without the driver's word a node is the host's."""
    memory = probe_memory(machine(tmp_path / "numa", GRACE))
    assert (memory.total.value, memory.available.value) == (28976000 << 10, 30000000 << 10)
    assert memory.available.source.endswith("less the GPUs' own")
    for name, files in {
        "driver": {name: text for name, text in GRACE.items() if "numa_status" not in name},
        "no node": GRACE | {f"{DRIVER}/numa_status": "Node:      -1\nStatus:    offline\n"},
        "host's": GRACE | {f"{DRIVER}/numa_status": "Node:      0\nStatus:    online\n"},
    }.items():
        memory = probe_memory(machine(tmp_path / name, files))
        assert memory.available == known(120000000 << 10, "MemAvailable in /proc/meminfo")


def seen(value):
    return known(value, "test")


SPARK = Facts(
    Memory(seen(121 * GIB), seen(115 * GIB), seen(1 << 62), memlock=seen(1 << 62)),
    Gpus(seen(1), seen("NVIDIA GB10"), seen(119 * GIB), seen(False), seen("NVIDIA GB10")),
    (
        Disk(
            "/nvme",
            free=seen(3000 * GIB),
            total=seen(3600 * GIB),
            device=seen("nvme"),
            filesystem=seen("xfs"),
            writable=seen(True),
            o_direct=seen(True),
            own=seen(0),
        ),
    ),
    Model(
        kv_bytes_per_token=seen(128 << 10),
        weight_bytes=seen(60 * GIB),
        active_parameters=seen(8_000_000_000),
        max_tokens=seen(65_536),
    ),
)
CARD = replace(SPARK, gpus=replace(SPARK.gpus, shared=unknown("a card")))
STARTED = Serving(started=seen(True), kv_cache_tokens=seen(100_000))


def rows(plan):
    return {row.key: row.value for row in (*plan.derived, *plan.settings)}


def test_where_memory_is_shared_ram_keeps_slots_for_loads_and_the_disk_the_chunks():
    plan = make_plan(SPARK)
    found = rows(plan)
    assert found["ram_bytes"] == 2 * 32_768 * (128 << 10), "two long contexts, one of 64k"
    assert found["nvme_bytes"] == 1500 * GIB, "half of what is free, as elsewhere"
    assert found["unified_memory"] == "NVIDIA GB10"
    assert found["gpu_memory_utilization"] == 0.83, "0.9 less 8 of 121 GiB"
    assert any("smaller than the engine's own" in text for text in plan.warnings)
    assert "; one memory: NVIDIA GB10; " in summary(plan, Config())
    elsewhere = rows(make_plan(CARD))
    assert "unified_memory" not in elsewhere and "gpu_memory_utilization" not in elsewhere


def test_one_long_context_has_room_and_longer_ones_take_an_eighth_at_most():
    model = replace(SPARK.model, max_tokens=seen(1 << 20))
    assert rows(make_plan(replace(SPARK, model=model)))["ram_bytes"] == 121 * GIB // 8 >> 20 << 20
    thick = replace(SPARK.model, kv_bytes_per_token=seen(600 << 10), weight_bytes=seen(20 * GIB))
    found = rows(make_plan(replace(SPARK, model=thick)))
    assert found["ram_bytes"] == 32_768 * (600 << 10) > 121 * GIB // 8


def test_a_recorded_day_makes_no_more_room_where_memory_is_shared():
    class Day:
        name, block_tokens = "day", 16
        curve = type("Curve", (), {"requests": 1, "asked": 1, "unique": 1})()

        def enough(self, kv_bytes, limit, above=0):
            return limit

        def knee(self, kv_bytes, above=0):
            return 1 << 50

        def largest(self, kv_bytes):
            return 1 << 50

        def percent(self, kv_bytes, size):
            return "9%"

        def why(self, kv_bytes, size):
            return "curve"

    found = rows(make_plan(replace(SPARK, trace=Day())))
    assert found["ram_bytes"] == 8 * GIB and found["nvme_bytes"] > 2600 * GIB


def test_an_engine_that_took_its_share_leaves_what_it_leaves():
    """At its start the weights and the KV cache are out of what is available already."""
    left = replace(SPARK, memory=replace(SPARK.memory, available=seen(12 * GIB)), engine=STARTED)
    found = rows(make_plan(left))
    assert found["ram_bytes"] == 6 * GIB and "gpu_memory_utilization" not in found
    full = make_plan(
        replace(SPARK, memory=replace(SPARK.memory, available=seen(6 * GIB)), engine=STARTED)
    )
    assert "ram_bytes" not in full.values()
    assert any("a lower --gpu-memory-utilization" in text for text in full.warnings)


def test_chunks_have_nowhere_to_stay_without_a_disk():
    plan = make_plan(replace(SPARK, disks=()))
    assert any("no disk tier: what leaves the RAM tier's slots is lost" in w for w in plan.warnings)
    assert not any("no disk tier" in text for text in make_plan(SPARK).warnings)


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CUMEM = "--enable-cumem-allocator"


@pytest.mark.parametrize(
    ("machine_name", "arguments", "env", "lacks"),
    [
        ("NVIDIA GB10", [], {}, f"{CUMEM} and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is"),
        ("NVIDIA GB10", [CUMEM], {}, "(NVIDIA GB10) and PYTORCH_CUDA_ALLOC_CONF=expandable"),
        ("NVIDIA GB10", [CUMEM], EXPANDABLE, None),
        ("NVIDIA GB10", [], {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None),
        (None, [], {}, None),
        ("AMD Strix Halo", [], {}, None),
    ],
)
def test_the_allocator_that_vllm_wants_there_is_named(machine_name, arguments, env, lacks):
    said = allocator(arguments, env, Fact(machine_name, "test"))
    assert (lacks in said) if lacks else said == ""
