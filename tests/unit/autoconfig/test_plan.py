"""make_plan over real kinds of machines: what is set, what is left out, and that the reason is
said."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from kvtier.autoconfig.explain import as_json
from kvtier.autoconfig.facts import GIB, UNLIMITED, Facts, Gpus, Memory, Model, Serving
from kvtier.autoconfig.model import describe
from kvtier.autoconfig.plan import make_plan
from kvtier.core.fact import known, unknown
from kvtier.extensions.objects.parts import ObjectStore
from kvtier.load_policy.prefill import Prefill, PrefillTime
from kvtier.tiers.nvme.disks import Disk, disk_threads
from kvtier.tiers.redis.parts import Redis
from tests.model_configs import MODELS


def seen(value):
    return known(value, "test")


def memory(available, cgroup=None, **more):
    """Sizes in GiB. ``cgroup`` None = no limit."""
    fields: dict[str, Any] = {"memlock": UNLIMITED, "shm": 64 * GIB, "cpus": 8, **more}
    return Memory(
        total=seen(int(available * 1.05 * GIB)),
        available=seen(int(available * GIB)),
        cgroup_headroom=seen(UNLIMITED if cgroup is None else int(cgroup * GIB)),
        **{name: seen(value) for name, value in fields.items()},
    )


def gpus(kind, count, gib):
    return Gpus(
        seen(count), seen(kind), seen(gib * GIB), known(False, "the driver does not charge it")
    )


NO_GPU = Gpus(seen(0))


def disk(path, free, total, device="nvme", **more):
    """Sizes in GiB."""
    fields = {"filesystem": "xfs", "writable": True, "o_direct": True, "own": 0, **more}
    kind = unknown("hidden") if device is None else seen(device)
    facts: dict[str, Any] = {name: seen(value) for name, value in fields.items()}
    return Disk(
        path, free=seen(int(free * GIB)), total=seen(int(total * GIB)), device=kind, **facts
    )


def model(name, kv_dtype="auto"):
    return describe(MODELS[name], name, kv_dtype)


def engine(tp=1, dp=1, engines=1, **more):
    given = {
        "tensor_parallel": tp,
        "pipeline_parallel": 1,
        "data_parallel": dp,
        "engines": engines,
        "block_tokens": 16,
    }
    return Serving(**{name: seen(value) for name, value in {**given, **more}.items()})


def redis(maxmemory, used=0, **more):
    fact = unknown("INFO refused") if maxmemory is None else seen(int(maxmemory * GIB))
    return Redis(
        "redis://cache:6379",
        seen(True),
        maxmemory=fact,
        used=seen(int(used * GIB)),
        policy=seen("noeviction"),
        **more,
    )


def bucket(gib=None, speed=None, **more):
    """``speed`` in bytes a second. None: not measured, and then neither is the latency."""
    return ObjectStore(
        "s3://bucket/prefix",
        unknown("not given") if gib is None else seen(int(gib * GIB)),
        seen(True),
        unknown("not measured") if speed is None else seen(speed),
        **more,
    )


CLOSED_BUCKET = ObjectStore("s3://b", reachable=known(False, "no connection"))
AT_RANDOM = replace(redis(64, speed=seen(3e9)), policy=seen("allkeys-random"))


P4DE = Facts(
    memory(1130, cpus=96),
    gpus("NVIDIA A100-SXM4-80GB", 8, 80),
    (disk("/opt/dlami/nvme", 7000, 7152), disk("/tmp", 80, 100, "ebs")),
)
P5 = Facts(
    memory(2020, cpus=192),
    gpus("NVIDIA H100 80GB HBM3", 8, 80),
    (disk("/opt/dlami/nvme", 28_000, 28_200),),
)
G5 = Facts(memory(182, cpus=48), gpus("NVIDIA A10G", 4, 22), (disk("/opt/dlami/nvme", 3400, 3540),))
G6E = Facts(memory(60), gpus("NVIDIA L40S", 1, 44), (disk("/opt/dlami/nvme", 400, 410),))
LAPTOP = Facts(memory(11, cpus=8), NO_GPU, (disk("/var/tmp", 120, 470),))
DOCKER = Facts(
    memory(60, memlock=65536),
    gpus("NVIDIA L40S", 1, 44),
    (disk("/tmp", 300, 400, None, filesystem="overlay"),),
)
ONE, QUICK = engine(), (disk("/nvme", 3400, 3540, read_speed=2e10),)


class Case(NamedTuple):
    """``ram``, ``nvme``: GiB. None: RAM is left out, or the size does not matter. ``says``: must be
    in a reason, warning or left-out line."""

    name: str
    facts: Facts
    ram: float | None
    path: str | None
    nvme: float | None
    says: tuple[str, ...]
    values: dict[str, Any]


def case(name, facts, *says, ram = 30, nvme = 200,
         path = "/opt/dlami/nvme", **more):  # fmt: skip
    """What is not given is that of SMALL."""
    if ram is None or path is None:
        path = nvme = None
    return Case(name, facts, ram, path, nvme, says, more.get("values", {}))


def on(machine, name, layout=ONE, **more):
    return replace(machine, model=model(name), engine=layout, **more)


SMALL = on(G6E, "llama-3.1-8b")
W8B = 14.957  # GiB of Llama-3.1-8B's weights


def with_disk(*disks):
    return replace(SMALL, disks=disks)


def with_memory(*args, **more):
    return replace(SMALL, memory=memory(*args, **more))


CASES = [
    case("p4de 72B tp4", on(P4DE, "qwen2.5-72b", engine(tp=4)), "nvme /tmp: too slow to pay",
        "2 x weights of 135.4 GiB", "for each of 4 rank(s)", f"chunk_bytes {80 << 20} 256 tokens",
        "smaller working sets fit", ram=1130 / 2, nvme=7000 / 2),
    case("p4de 8 replicas of 7B share fairly", on(P4DE, "qwen2.5-7b", engine(dp=8)), "x 8 engines",
        "divided equally", ram=1130 / 2 / 8, nvme=7000 / 2 / 8),
    case("p4de 2 engines of 70B tp4", on(P4DE, "llama-3.1-70b", engine(tp=4, engines=2)),
        "stores_on_host", "2 engines share /opt/dlami/nvme: give each a folder", ram=1130 / 2 / 2,
        nvme=7000 / 2 / 2),
    case("p5 DeepSeek-V3 tp8", on(P5, "deepseek-v3", engine(tp=8)),
        f"kv_bytes_per_token {61 * 576 * 2} ", ram=2020 - 2 * 624.7, nvme=28000 / 2),
    case("p5 8B: NVMe pays for long hits only", on(P5, "llama-3.1-8b"), "nvme_break_even_tokens",
        "than they are loaded from /opt/dlami/nvme", ram=2020 / 2, nvme=28000 / 2),
    case("g5.12xlarge 72B does not fit beside its weights", on(G5, "qwen2.5-72b", engine(tp=4)),
        "too small: 32,768 tokens take 10 GiB", "270.8 GiB reserved", "without a RAM tier",
        ram=None),
    case("g6e.2xlarge Llama-8B", SMALL),
    case("g6e.2xlarge fp8 KV holds twice the tokens",
        replace(SMALL, model=model("llama-3.1-8b", "fp8")), "holds 491,520 tokens",
        "half of what is free"),
    case("g6e.2xlarge Phi-3-mini: 4k tokens are its long context", on(G6E, "phi-3-mini"),
        "nvme /opt/dlami/nvme: too slow to pay", "no hit of up to 4,096 tokens wins", path=None),
    case("g6e.2xlarge Gemma-3-27B fp8", replace(G6E, model=model("gemma-3-27b", "fp8"), engine=ONE),
        "kv_bytes_per_token_global", ram=None),
    case("laptop 1.5B", on(LAPTOP, "qwen2.5-1.5b"), "CPU cores", "copy_bytes_per_second",
        ram=11 - 5.75, path="/var/tmp", nvme=120 / 2),
    case("laptop: the CPU engine's own KV cache is RAM too",
        on(LAPTOP, "qwen2.5-1.5b", engine(kv_cache_tokens=4 * GIB // (28 << 10))), "own KV cache",
        ram=11 - 5.75 - 4, path="/var/tmp", nvme=120 / 2),
    case("laptop with the 1.5B engine running: one copy of its weights is there already",
        replace(on(LAPTOP, "qwen2.5-1.5b", engine(started=True)), memory=memory(11 - 2.875)),
        "1 x weights", ram=(11 - 2.875) / 2, path="/var/tmp", nvme=120 / 2),
    case("container of 4 GiB", with_memory(60, 3.6), "0 B a store is too small",
        "3.6 GiB available", ram=None),
    case("container of 48 GiB on a big host", with_memory(500, 44), ram=44 - 2 * W8B),
    case("cgroup already full", with_memory(60, 0), "0 B available", ram=None),
    case("cgroup unknown",
        replace(SMALL, memory=replace(SMALL.memory, cgroup_headroom=unknown("no /proc"))),
        "cgroup limit unknown (no /proc); assumed none"),
    case("memlock 64 KiB, NVIDIA", with_memory(60, memlock=65536),
        "no limit here: the driver does not charge it"),
    case("memlock 64 KiB, a driver that may charge it",
        replace(with_memory(60, memlock=65536), gpus=Gpus(seen(1), seen("AMD"),
            pin_charged=unknown("AMD"))),
        "ulimit memlock=-1", "64 KiB", ram=None),
    case("memlock 8 GiB, a driver that may charge it",
        replace(with_memory(60, memlock=8 * GIB), gpus=Gpus(seen(1), seen("AMD"),
            pin_charged=unknown("AMD"))),
        "cut to RLIMIT_MEMLOCK 8 GiB", ram=8),
    case("memlock 64 KiB without a GPU",
        replace(on(LAPTOP, "qwen2.5-1.5b"), memory=memory(11, memlock=65536)), ram=5.25,
        path="/var/tmp", nvme=120 / 2),
    case("docker: overlay of unknown disk", on(DOCKER, "llama-3.1-8b"),
        "nvme /tmp: too slow to pay", "assumed for an unknown device", path=None),
    case("docker: overlay measured fast",
        with_disk(disk("/tmp", 300, 400, None, filesystem="overlay", read_speed=2000000000.0)),
        "mount a volume", path="/tmp", nvme=300 / 2),
    case("tmpfs /tmp", with_disk(disk("/tmp", 30, 30, filesystem="tmpfs")), "nvme /tmp: ",
        "counted twice", path=None),
    case("full disk", with_disk(disk("/data", 3, 400)), "nvme /data: 0 B a store is too small",
        "(3 GiB free, 40 GiB of it kept free)", path=None),
    case("full of our own chunks: reused", with_disk(disk("/data", 3, 400, own=300 * GIB)),
        path="/data", nvme=263),
    case("2 replicas keep their own tiers' size",
        replace(with_disk(disk("/data", 63, 400, own=320 * GIB)), engine=engine(dp=2),
            memory=memory(120)),
        path="/data", nvme=160),
    case("own tier of nearly the same size keeps it",
        with_disk(disk("/data", 63, 400, own=320 * GIB)), path="/data", nvme=320),
    case("EBS", with_disk(disk("/data", 400, 500, "ebs")), "too slow to pay", path=None),
    case("EBS measured fast on a slow model",
        replace(on(G5, "llama-3.1-70b", engine(tp=4)), memory=memory(400), disks=(disk("/data",
            400, 500, "ebs", read_speed=1000000000.0),)),
        ram=137.2, path="/data"),
    case("NFS unmeasured", with_disk(disk("/nfs", 4000, 4000, None, filesystem="nfs4")),
        "network file system", path=None),
    case("no O_DIRECT", with_disk(disk("/data", 400, 400, o_direct=False)), "no O_DIRECT",
        path=None),
    case("read-only", with_disk(disk("/data", 400, 400, writable=False)), "not writable",
        path=None),
    case("no disk at all", with_disk(), "no candidate path", path=None),
    case("two disks: both, with a row each",
        with_disk(disk("/a", 900, 900, read_speed=3000000000.0), disk("/b", 400, 400,
            read_speed=6000000000.0)),
        "nvme_disk /a test: 450 GiB; nvme, 3 GB/s (test)", "2 disks, 9 GB/s together",
        path="/a,/b", nvme=450 + 200),
    case("two disks: a third of one's speed, with chunks from before, is enough",
        with_disk(disk("/a", 700, 900, own=200 * GIB, read_speed=1000000000.0), disk("/b", 400,
            400, read_speed=6000000000.0)),
        path="/a,/b", nvme=450 + 200),
    case("two disks: one that would slow the other",
        with_disk(disk("/a", 900, 900, "ssd", read_speed=1000000000.0), disk("/b", 400, 400,
            read_speed=6000000000.0)),
        "nvme /a: 1 GB/s beside 6 GB/s of /b: too slow (450 GiB)", path="/b"),
    case("two disks: EBS beside NVMe",
        with_disk(disk("/a", 900, 900, "ebs", read_speed=3000000000.0), disk("/b", 400, 400,
            read_speed=6000000000.0)),
        "nvme /a: one path is used: /b is faster or larger", path="/b"),
    case("two disks: EBS that has chunks from before",
        with_disk(disk("/a", 700, 900, "ebs", own=200 * GIB, read_speed=3000000000.0),
            disk("/b", 400, 400, read_speed=6000000000.0)),
        "nvme /b: one path is used: /a has chunks from before (200 GiB)", path="/a", nvme=900 / 2),
    case("two disks: one is the system's, and two partitions of another",
        with_disk(
            replace(disk("/tmp", 900, 900, read_speed=3000000000.0), system=True),
            replace(disk("/b", 400, 400, read_speed=6000000000.0), block="nvme1n1"),
            replace(disk("/c", 300, 400, read_speed=6000000000.0), block="nvme1n1")),
        "nvme /tmp: the system's own files lie there", "used already (nvme1n1)", path="/b"),
    case("Redis of 64 GiB", replace(SMALL, tiers={"redis": redis(64, 4, speed=seen(3000000000.0))}),
        values={"redis_bytes": 54 * GIB, "redis_url": "redis://cache:6379"}),
    case("Redis shared by 4 replicas of 1.5B",
        on(P4DE, "qwen2.5-1.5b", engine(dp=4), tiers={"redis": redis(40, 0)}), ram=1130 / 2 / 4,
        nvme=7000 / 2 / 4, values={"redis_bytes": 9 * GIB}),
    case("Redis without maxmemory", replace(SMALL, tiers={"redis": redis(0)}),
        "redis: it has no maxmemory"),
    case("Redis that hides maxmemory", replace(SMALL, tiers={"redis": redis(None)}),
        "maxmemory is unknown (INFO refused)"),
    case("Redis down", replace(SMALL, tiers={"redis": Redis("redis://x", known(False, "refused"))}),
        "redis: cannot be used (refused)"),
    case("Redis on this host takes RAM",
        replace(SMALL, tiers={"redis": redis(16, 4, local=True, speed=seen(3000000000.0))}),
        "12 GiB that the Redis here may take", ram=60 - 12 - 2 * W8B),
    case("a bucket, measured",
        replace(SMALL, tiers={"object": bucket(2048, 12000000000.0, latency=seen(0.004))}),
        "object_latency_ms 4.0", "object_break_even_tokens ", "12 GB/s (test)",
        values={"object_url": "s3://bucket/prefix", "object_bytes": 2048 * GIB}),
    case("a bucket of which nothing is measured, and its usual size",
        on(P4DE, "llama-3.1-70b", engine(tp=4), tiers={"object": bucket()}),
        "object_latency_ms 100.0", "680 MB/s (assumed for a bucket in this region: not measured)",
        ram=1130 / 2, nvme=None,
        values={"object_url": "s3://bucket/prefix", "object_bytes": 256 * GIB}),
    case("a bucket that is away now",
        on(P4DE, "llama-3.1-70b", engine(tp=4), tiers={"object": replace(CLOSED_BUCKET,
            away=True)}),
        "away now (no connection)", ram=1130 / 2, nvme=None,
        values={"object_url": "s3://b", "object_bytes": 256 * GIB}),
    case("a bucket that is slower than this GPU computes",
        replace(SMALL, tiers={"object": bucket(2048, 50000000.0, latency=seen(0.1))}),
        "object: too slow to pay: 2.62e+03 us a token to load", "no hit of up to",
        values={"object_url": None, "object_bytes": None}),
    case("a share of a bucket in which no long context has room",
        replace(SMALL, tiers={"object": bucket(1, 12000000000.0)}),
        "object: 1 GiB a store is too small", "give more object_bytes",
        values={"object_bytes": None}),
    case("a bucket that cannot be reached", replace(SMALL, tiers={"object": CLOSED_BUCKET}),
        "object: cannot be used (no connection)"),
    case("random eviction warns", replace(SMALL, tiers={"redis": AT_RANDOM}), "evicts at random"),
    case("the engine serves 8k: that is the long context",
        replace(SMALL, engine=engine(max_model_len=8192), memory=memory(32)), "holds 17,088 tokens",
        "RAM tier is smaller than", ram=32 - 2 * W8B),
    case("the same serving 32k does not hold one", with_memory(32), "32,768 tokens take 4 GiB",
        ram=None),
    case("p5 serving 8k: NVMe never pays", on(P5, "llama-3.1-8b", engine(max_model_len=8192)),
        "no hit of up to 8,192 tokens wins", ram=2020 / 2, path=None),
    case("a block of 96 tokens", replace(SMALL, engine=engine(block_tokens=96)),
        "288 tokens, block of 96"),
    case("weights unknown",
        replace(SMALL, model=replace(SMALL.model, weight_bytes=unknown("no files"))),
        "half of it: weight bytes are unknown (no files)"),
    case("model unknown", replace(SMALL, model=Model()), "128 KiB is usual"),
    case("use unknown, total known", replace(SMALL, memory=Memory(total=seen(80 * GIB))),
        "assumed: half of", ram=40 - 2 * W8B),
    case("unknown everything", Facts(), "available RAM is unknown", "give --ram", ram=None),
]  # fmt: skip


def all_text(plan):
    rows = [
        f"{row.key} {row.value} {row.source}: {row.reason}"
        for row in (*plan.settings, *plan.derived)
    ]
    return "\n".join(
        [*rows, *plan.warnings, *(f"{tier}: {reason}" for tier, reason in plan.left_out)]
    )


@pytest.mark.parametrize(
    ("model", "tensor", "times"),
    [("deepseek-v3", 8, 1), ("llama-3.1-8b", 16, 2), ("llama-3.1-8b", 4, 1)],
)
def test_what_all_ranks_have_is_stored_once_and_what_some_have_by_each(model, tensor, times):
    facts = on(P5, model, engine(tp=tensor))
    shown = {row.key: row.value for row in make_plan(facts).derived}
    assert shown["kv_bytes_per_token"] == times * (facts.model.kv_bytes_per_token.value or 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_plan(case):
    plan = make_plan(case.facts)
    values, text = plan.values(), all_text(plan)
    assert ("ram_bytes" in values) == (case.ram is not None), text
    if case.ram is not None:
        assert int(values["ram_bytes"]) / GIB == pytest.approx(case.ram, rel=0.002)
    assert values.get("nvme_path") == case.path, text
    if case.nvme is not None:
        assert int(values["nvme_bytes"]) / GIB == pytest.approx(case.nvme, rel=0.002)
    assert {key: values.get(key) for key in case.values} == case.values
    for part in case.says:
        assert part in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_an_engine_starts_with_the_prefill_time_that_the_plan_is_made_with(case):
    plan = make_plan(case.facts)
    learned = Prefill(plan.prefill)
    for tokens, before in ((1, 0), (2048, 0), (512, 100_000)):
        assert learned.seconds(tokens, before) == plan.prefill.seconds(tokens, before)
    (row,) = [row for row in plan.derived if row.key == "prefill_tokens_per_second"]
    assert row.value == round(1 / plan.prefill.per_token)
    written = json.loads(as_json(plan))["prefill"]
    assert PrefillTime(**written) == plan.prefill


def test_a_bucket_that_answers_late_pays_for_longer_hits_only():
    """A run of 128 chunks is found with eight requests, and read by a ninth."""
    near, far = (
        next(
            row.value
            for row in make_plan(
                replace(SMALL, tiers={"object": bucket(2048, 12e9, latency=seen(latency))})
            ).derived
            if row.key == "object_break_even_tokens"
        )
        for latency in (0.001, 0.1)
    )
    assert isinstance(near, int) and isinstance(far, int)
    assert near * 50 < far


def test_every_setting_says_where_it_comes_from_and_why():
    for case in CASES:
        for row in make_plan(case.facts).settings:
            assert row.source and row.reason, (case.name, row.key)


@pytest.mark.parametrize(
    ("reserved", "makes", "shown"),
    [
        (4000 * GIB, True, ("reserved", "an engine's own pool lies in them")),
        (GIB, True, ("made", "the kernel makes them of ordinary memory")),
        (GIB, False, ("none", "or sysctl vm.nr_hugepages=")),
    ],
)
def test_the_plan_says_what_huge_pages_there_are(reserved, makes, shown):
    facts = replace(
        P5, memory=memory(2020, reserved=reserved, makes_huge=makes), model=model("llama-3.1-8b")
    )
    plan = make_plan(facts)
    (row,) = [row for row in plan.derived if row.key == "huge_pages"]
    assert row.value == shown[0] and shown[1] in row.reason
    ram = next(row.value for row in plan.settings if row.key == "ram_bytes")
    assert isinstance(ram, int)
    if not makes:
        assert row.reason.endswith(f"={-(-ram // (2 << 20))} before a start")


@pytest.mark.parametrize(
    ("facts", "size", "why"),
    [
        (replace(G6E, engine=ONE), 2 * GIB, "2 GiB as a bounce for NVMe"),
        (replace(G5, engine=engine(tp=4), disks=QUICK), 4 * GIB, "4 GiB as a bounce for NVMe"),
        (replace(LAPTOP, disks=()), None, "no NVMe is below it: give --hicache-host-memory-mode"),
    ],
)
def test_the_plan_says_what_a_server_below_sglangs_own_ram_gets_and_why(facts, size, why):
    plan = make_plan(facts)
    (row,) = [row for row in plan.derived if row.key == "sglang_ram_bytes"]
    assert why in row.reason and "buffer_only" in row.reason
    assert row.value == size or (size is None and row.value == plan.values()["ram_bytes"])


@pytest.mark.parametrize(
    ("device", "cpus", "threads"),
    [
        ("nvme", 16, 4),
        ("nvme", 1, 2),
        ("virtual", 2, 4),
        ("ebs", 16, 2),
        ("rotational", 16, 1),
        (None, 16, 4),
    ],
)
def test_threads(device, cpus, threads):
    disk = Disk("/kv", device=known(device, "here")) if device else Disk("/kv")
    assert disk_threads(disk, cpus) == threads
