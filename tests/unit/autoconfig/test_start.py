"""What an engine's start settles before anything is planned."""

import os
from types import SimpleNamespace

import pytest

from kvtier.assemble import assemble
from kvtier.autoconfig import memory as memory_probe
from kvtier.autoconfig import start
from kvtier.autoconfig.explain import PLANNED, as_yaml, configuration_text, summary, table
from kvtier.autoconfig.facts import GIB, Facts, Gpus, Memory
from kvtier.autoconfig.model import probe_engine
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.start import compute_for_engine, plan_for_engine, prefill_for_engine
from kvtier.config.keys import Config
from kvtier.config.load import filled, load
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.fact import known
from kvtier.core.pool import Pool
from kvtier.core.terminal import size_text
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.started import Started
from tests.model_configs import MODELS
from tests.s3_server import S3Server, operated

NO_DISK = Config().with_keys(nvme_path="/none")
ROOMY = Memory(available=known(2000 * GIB, "test"), cgroup_headroom=known(1 << 62, "test"))


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch):
    monkeypatch.setattr(start, "measure", lambda facts: facts)


def engine(model, tensor, block, longest):
    hf_config = SimpleNamespace(to_dict=lambda: MODELS[model])
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size_local=1
        ),
        cache_config=SimpleNamespace(block_size=block, cache_dtype="auto", num_gpu_blocks=1000),
        model_config=SimpleNamespace(
            model="a/b", max_model_len=longest, dtype="torch.bfloat16", hf_config=hf_config
        ),
    )


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_plan_leaves_the_size_of_a_chunk_alone(model):
    """Engines without the switch, which share with those that have it, would have another."""
    serving, described = probe_engine(engine(model, 8, 16, 32_768))
    gpus = Gpus(
        known(8, "test"), known("H100", "test"), known(80 * GIB, "test"), known(False, "test")
    )
    plan = make_plan(Facts(memory=ROOMY, gpus=gpus, model=described, engine=serving))
    assert "chunk_tokens" not in plan.values()
    assert "chunk_tokens" not in as_yaml(plan)


def test_what_a_hit_saves_is_the_engines_own_models_and_the_log_says_so(caplog):
    """8.03 billion parameters, and 2 * 32 layers * 32 heads * 128 operations of attention for each
    pair of tokens."""
    caplog.set_level("INFO", "kvtier")
    compute = compute_for_engine(engine("llama-3.1-8b", 1, 16, 32_768), 64)
    assert (compute.chunk_tokens, round(compute.s0, -2)) == (64, 30_600)
    layout = ChunkLayout(fingerprint({"model": "test"}), 64, 16, (4096,))
    config = Config().with_keys(ram_bytes=1 << 20, policy="auto")
    assemble(Started(config), layout, compute=compute).close()
    assert "chunks of 64 tokens" in caplog.text
    assert "token 30632 (the model's config.json)" in caplog.text


def test_of_a_model_that_says_nothing_of_its_shape_a_typical_one_is_assumed():
    config = engine("llama-3.1-8b", 1, 16, 32_768)
    config.model_config.hf_config = SimpleNamespace(to_dict=dict)
    assert compute_for_engine(config, 64) == SavedCompute(64)


def test_engines_of_one_host_get_equal_shares(monkeypatch):
    monkeypatch.setattr(start, "probe_memory", lambda: ROOMY)
    config = engine("llama-3.1-8b", 1, 16, 8192)
    plans = [plan_for_engine(config, NO_DISK.with_keys(host_engines=engines)) for engines in (1, 4)]
    free = [
        next(int(row.value) for row in plan.derived if row.key == "ram_available_bytes")
        for plan in plans
    ]
    found = [int(plan.values()["ram_bytes"]) >> 20 for plan in plans]
    assert found == [free[0] // 2 >> 20, free[1] // 2 // 4 >> 20]


def test_an_engine_that_comes_later_gets_what_the_first_one_got(monkeypatch):
    """The first one's pool is no longer available, but counts for what is shared out."""
    config, free = engine("llama-3.1-8b", 1, 16, 8192), [1000 * GIB]
    held = [0]

    def memory():
        seen = known(free[0], "test")
        return Memory(
            available=seen, cgroup_headroom=known(1 << 62, "test"), pools=known(held[0], "test")
        )

    monkeypatch.setattr(start, "probe_memory", memory)
    shares = []
    for _ in range(2):
        shares.append(
            int(plan_for_engine(config, NO_DISK.with_keys(host_engines=2)).values()["ram_bytes"])
        )
        free[0] -= shares[-1]
        held[0] += shares[-1]
    assert shares[0] == shares[1] > 200 * GIB


def test_the_estimate_of_the_prefill_needs_no_room(monkeypatch):
    """An engine beside a server asks for it alone, and may have no RAM left for a tier."""
    monkeypatch.setattr(start, "probe_memory", lambda: ROOMY)
    monkeypatch.setattr(start, "probe_gpus", lambda: Gpus(known(0, "test")))
    config = engine("llama-3.1-8b", 1, 16, 8192)
    full = plan_for_engine(config, NO_DISK).prefill
    monkeypatch.setattr(start, "probe_memory", lambda: Memory(available=known(0, "test")))
    assert prefill_for_engine(config) == full and full.per_token > 0


def test_pools_are_found_and_each_is_counted_once(tmp_path):
    """In a made-up /proc that shows this process twice."""
    for number in "12":
        (tmp_path / "proc" / number).mkdir(parents=True)
        (tmp_path / "proc" / number / "fd").symlink_to(f"/proc/{os.getpid()}/fd")
    before = memory_probe.probe_memory(tmp_path).pools.value
    pool = Pool(4, 1 << 20)
    pool.buffer[:] = b"\1" * (4 << 20)
    after = memory_probe.probe_memory(tmp_path).pools.value
    pool.close()
    assert before is not None and after is not None
    assert after - before == 4 << 20


def rows_of(text):
    """Lines of the part "What is set", by their key."""
    part = text.partition("What is set")[2].partition("Left out")[0]
    return {
        line.split()[0]: line for line in part.splitlines() if line and ":" not in line.split()[0]
    }


def test_the_table_shows_what_is_used_and_whose_word_it_was(monkeypatch):
    monkeypatch.setattr(start, "probe_memory", lambda: ROOMY)
    plan = plan_for_engine(engine("llama-3.1-8b", 1, 16, 8192), NO_DISK)
    planned = size_text(int(plan.values()["ram_bytes"]))
    given = load(
        env={
            "KVTIER_RAM_BYTES": "4GiB",
            "KVTIER_REDIS_URL": "redis://me:S3cret@host:1/0",
            "KVTIER_AUTO": "1",
        }
    )
    used = filled(given, plan.values(), PLANNED)
    yours = rows_of(table(plan, used))
    assert "4 GiB" in yours["ram_bytes"] and "environment KVTIER_RAM_BYTES" in yours["ram_bytes"]
    assert yours["ram_bytes"].endswith(f"yours; the plan would be {planned}")
    assert (
        yours["redis_url"].endswith("yours; the plan has none")
        and "S3cret" not in yours["redis_url"]
    )
    assert planned in rows_of(table(plan))["ram_bytes"], "without a configuration: the plan's own"
    same = filled(
        load(env={"KVTIER_RAM_BYTES": str(plan.values()["ram_bytes"])}), plan.values(), PLANNED
    )
    assert f"yours; the plan would be {planned}" in rows_of(table(plan, same))["ram_bytes"], (
        "his word, if the same"
    )


def test_an_engines_log_has_the_plan_in_one_line(monkeypatch):
    """With what the operator decided, and without the tiers that nobody asked for."""
    monkeypatch.setattr(start, "probe_memory", lambda: ROOMY)
    plan = plan_for_engine(engine("llama-3.1-8b", 1, 16, 8192), NO_DISK)
    planned = size_text(int(plan.values()["ram_bytes"]))
    auto = load(env={"KVTIER_AUTO": "1"})
    line = summary(plan, filled(auto, plan.values(), PLANNED))
    assert line.startswith(f"ram_bytes {planned}, nvme_path ") and "\n" not in line
    assert "left out" not in line
    yours = load(env={"KVTIER_AUTO": "1", "KVTIER_RAM_BYTES": "4GiB"})
    line = summary(plan, filled(yours, plan.values(), PLANNED))
    assert line.startswith(f"ram_bytes 4 GiB (yours; the plan would be {planned})")


def test_an_engines_start_tells_what_it_finds_of_its_bucket(monkeypatch):
    """It is tried: here nobody listens. The operator's word stays, with the reason beside it."""
    monkeypatch.setattr(start, "probe_memory", lambda: ROOMY)
    url = "s3://bucket/prefix"
    with operated(S3Server().environment):
        config = engine("llama-3.1-8b", 1, 16, 8192)
        plan = plan_for_engine(
            config, Config().with_keys(nvme_path=NO_DISK.nvme.path, object_url=url)
        )
    (row,) = [row for row in plan.settings if row.key == "object_url"]
    away = f"away now (object store {url} cannot be reached: no connection"
    assert row.reason.startswith(away)
    used = filled(load(env={"KVTIER_OBJECT_URL": url}), plan.values(), PLANNED)
    assert used.value("object_url") == url
    assert rows_of(table(plan, used))["object_url"].endswith(f"yours; the plan would be {url}")


def test_lmis_sizes_that_were_too_much_show_as_the_plans(monkeypatch):
    small = Memory(available=known(64 * GIB, "test"), cgroup_headroom=known(64 * GIB, "test"))
    monkeypatch.setattr(start, "probe_memory", lambda: small)
    plan = plan_for_engine(engine("llama-3.1-8b", 1, 16, 8192), NO_DISK)
    lmi = Config().with_keys(
        {"ram_bytes": "environment LMCACHE_MAX_LOCAL_CPU_SIZE"}, ram_bytes=150 * GIB
    )
    row = rows_of(table(plan, filled(lmi, plan.values(), PLANNED)))["ram_bytes"]
    assert "yours" not in row and size_text(int(plan.values()["ram_bytes"])) in row


def test_the_configuration_in_a_line_masks_passwords_and_leaves_defaults_out():
    config = load(
        env={"KVTIER_RAM_BYTES": "4GiB", "KVTIER_REDIS_URL": "redis://me:S3cret@host:1/0"}
    )
    assert configuration_text(config) == (
        "ram_bytes=4 GiB (environment KVTIER_RAM_BYTES), redis_url=redis://me:***@host:1/0 "
        "(environment KVTIER_REDIS_URL); all else by default"
    )
    assert configuration_text(Config()) == "nothing set; all else by default"
    assert configuration_text(Config(), 256).startswith("chunk_tokens=256 (default), nothing set;")
    assert "chunk_tokens=288 (default, in whole blocks)" in configuration_text(Config(), 288)
    longer = load(env={"KVTIER_CHUNK_TOKENS": "512"})
    assert configuration_text(longer, 512) == configuration_text(longer), "it stands there once"
    assert "auto=True (flag)" in configuration_text(load(env={}, flags={"auto": True}))
