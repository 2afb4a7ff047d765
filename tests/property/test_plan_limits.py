"""For any facts, known or not: no size exceeds what is there, and no tier disappears without a
reason."""

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtier.autoconfig.explain import as_json, as_yaml, table
from kvtier.autoconfig.facts import UNLIMITED, Facts, Gpus, Memory, Model, Serving
from kvtier.autoconfig.plan import make_plan
from kvtier.config.keys import KEYS
from kvtier.core.fact import known, unknown
from kvtier.tiers.nvme.disks import RAM_FILESYSTEMS, Disk
from kvtier.tiers.redis.parts import Redis

GIB = 1 << 30


def maybe(values):
    return st.one_of(st.just(unknown("it failed")), values.map(lambda value: known(value, "seen")))


SIZE = st.one_of(st.integers(0, 1 << 20), st.integers(0, 64 * GIB), st.integers(0, 1 << 45))
LIMIT = st.one_of(SIZE, st.just(UNLIMITED))
SPEED = st.floats(0, 1e12)
FEW = st.integers(0, 16)
YES = st.booleans()

MEMORY = st.builds(
    Memory, *map(maybe, (SIZE, SIZE, LIMIT, SIZE, LIMIT, FEW, st.integers(0, 400), SIZE))
)
GPUS = st.builds(
    Gpus, *map(maybe, (FEW, st.sampled_from(["NVIDIA H100", "NVIDIA L4", "odd"]), SIZE, YES))
)
KINDS = st.sampled_from(["xfs", "ext4", "tmpfs", "overlay", "nfs4", "fuse.s3fs"])
DEVICES = st.sampled_from(["nvme", "ssd", "ebs", "virtual", "rotational"])
DISK = st.builds(
    Disk,
    st.sampled_from(["/a", "/b", "/c"]),
    *map(maybe, (SIZE, SIZE, SIZE, KINDS, YES, YES, DEVICES, SPEED)),
)
REDIS = st.builds(
    Redis,
    st.just("redis://h"),
    *map(maybe, (YES, SIZE, SIZE, st.sampled_from(["noeviction", "allkeys-random"]))),
    YES,
    maybe(SPEED),
)
TOKEN_BYTES = st.one_of(st.integers(1, 1000), st.integers(1, 2_000_000))
FLOPS = st.integers(0, 10**8)
MODEL = st.builds(
    Model,
    *map(
        maybe,
        (st.just("m"), TOKEN_BYTES, TOKEN_BYTES, FEW, SIZE, SIZE, FLOPS, st.integers(0, 10**7)),
    ),
)
ENGINE = st.builds(
    Serving, *map(maybe, (FEW, FEW, FEW, YES, FEW, FEW, st.integers(0, 10**7), SIZE, YES))
)
FACTS = st.builds(
    Facts,
    MEMORY,
    GPUS,
    st.lists(DISK, max_size=3).map(tuple),
    MODEL,
    ENGINE,
    maybe(SPEED),
    tiers=st.just({}) | REDIS.map(lambda found: {"redis": found}),
)


def redis_of(facts):
    found = facts.tiers.get("redis")
    assert found is None or isinstance(found, Redis)
    return found


def stores(facts):
    return max(1, facts.engine.data_parallel.value or 1) * max(1, facts.engine.engines.value or 1)


def available(facts):
    memory = facts.memory
    bounds = [f.value for f in (memory.available, memory.cgroup_headroom) if f.value is not None]
    return min(bounds) if bounds else (memory.total.value or 0)


def stays_within_ram(facts, size):
    held = (facts.memory.pools.value or 0) if stores(facts) > 1 else 0
    assert size <= available(facts), "more than is free now"
    room = available(facts) + held
    assert size * stores(facts) <= room // 2, "nobody knows how much is needed"
    if facts.model.weight_bytes.value is not None:
        loaded = facts.gpus.count.value == 0 and facts.engine.started.value
        copies = 1 if loaded else 2
        assert size * stores(facts) <= room - copies * facts.model.weight_bytes.value * stores(
            facts
        )
    redis = redis_of(facts)
    if redis and redis.local and redis.maxmemory.value:
        growth = max(0, redis.maxmemory.value - (redis.used.value or 0))
        assert size * stores(facts) + growth <= room
    charged = facts.gpus.pin_charged.value is not False and facts.gpus.count.value != 0
    if charged and facts.memory.memlock.value is not None:
        assert size <= facts.memory.memlock.value


def room_of(disk):
    own = disk.own.value or 0
    whole = disk.free.value + own
    return min(whole - 2 * GIB, max(own, whole // 2))


def stays_within_disk(facts, path, size):
    """``path`` names one folder, or several on disks that are one tier."""
    usable = [
        disk
        for disk in facts.disks
        if disk.filesystem.value not in RAM_FILESYSTEMS
        and disk.writable.value is not False
        and disk.o_direct.value is not False
        and disk.free.value is not None
    ]
    rooms = [max(room_of(disk) for disk in usable if disk.path == one) for one in path.split(",")]
    assert size * stores(facts) <= sum(rooms)


def check(facts, plan):
    values = plan.values()
    for tier in ("ram", "nvme", "redis"):
        size = values.get(f"{tier}_bytes")
        reasons = [reason for out, reason in plan.left_out if out.split()[0] == tier]
        assert size is None or int(size) > 0
        assert size is not None or (reasons and min(map(len, reasons)) > 5), tier
        assert size is None or not reasons or tier == "nvme", "set, and left out"
    if "ram_bytes" in values:
        stays_within_ram(facts, int(values["ram_bytes"]))
    else:
        assert values == {}
    if "nvme_bytes" in values:
        stays_within_disk(facts, str(values["nvme_path"]), int(values["nvme_bytes"]))
    if "redis_bytes" in values:
        redis = redis_of(facts)
        assert redis and redis.maxmemory.value
        used = redis.used.value or 0
        assert int(values["redis_bytes"]) * stores(facts) <= redis.maxmemory.value - used


@given(FACTS)
def test_no_plan_exceeds_a_limit_or_drops_a_tier_silently(facts):
    plan = make_plan(facts)
    check(facts, plan)
    assert make_plan(facts) == plan


def sure(values):
    return values.map(lambda value: known(value, "seen"))


# Machines on which the tiers are worth having, so that the sizes themselves are put to the test.
BIG = st.integers(16 * GIB, 1 << 43)
ONE_TO_FOUR = sure(st.integers(1, 4))
USABLE = st.builds(
    Facts,
    memory=st.builds(
        Memory,
        total=sure(BIG),
        available=maybe(BIG),
        cgroup_headroom=sure(BIG),
        memlock=maybe(st.integers(1, 1 << 42)),
    ),
    gpus=st.builds(
        Gpus, sure(st.integers(0, 8)), sure(st.just("NVIDIA L4")), maybe(BIG), maybe(YES)
    ),
    disks=st.lists(
        st.builds(
            Disk,
            st.sampled_from(["/a", "/b"]),
            sure(BIG),
            maybe(BIG),
            maybe(st.integers(0, 1 << 40)),
            sure(st.sampled_from(["xfs", "ext4", "tmpfs"])),
            o_direct=maybe(st.just(True)),
            device=maybe(DEVICES),
        ),
        max_size=2,
        unique_by=lambda disk: disk.path,
    ).map(tuple),
    tiers=st.builds(
        Redis,
        st.just("redis://h"),
        sure(st.just(True)),
        sure(BIG),
        maybe(SIZE),
        maybe(st.just("noeviction")),
        YES,
    ).map(lambda found: {"redis": found}),
    model=st.builds(
        Model,
        kv_bytes_per_token=sure(st.integers(1, 100_000)),
        weight_bytes=sure(st.integers(0, 4 * GIB)),
        active_parameters=sure(st.integers(10**11, 10**13)),
        kv_heads=maybe(st.integers(1, 8)),
    ),
    engine=st.builds(
        Serving,
        ONE_TO_FOUR,
        ONE_TO_FOUR,
        ONE_TO_FOUR,
        engines=ONE_TO_FOUR,
        max_model_len=sure(st.integers(64, 40_000)),
    ),
)


@given(USABLE)
def test_the_same_where_the_tiers_are_worth_having(facts):
    check(facts, make_plan(facts))


@given(USABLE | FACTS)
def test_every_plan_can_be_shown_and_its_yaml_gives_the_same_values(facts):
    plan = make_plan(facts)
    written = yaml.safe_load(as_yaml(plan)) or {}
    flat = {f"{section}.{key}": given[key] for section, given in written.items() for key in given}
    assert flat == {KEYS[key].path: value for key, value in plan.values().items()}
    assert json.loads(as_json(plan))["values"] == plan.values()
    assert all(tier in table(plan) for tier, _ in plan.left_out)
