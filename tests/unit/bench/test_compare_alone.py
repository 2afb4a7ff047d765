"""The tiers alone: the arithmetic of its rows, and kvtier's arms for real, with tiny sizes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kvtier.bench.compare.alone import kvtier_arms as alone_kvtier
from kvtier.bench.compare.alone.__main__ import HOW, UNITS, Found, measured, rows
from kvtier.bench.compare.alone.arm import (
    DURABLE,
    HIT,
    LOAD,
    LOAD_CPU,
    MATCH_HIT,
    MISS,
    SAVE,
    SAVE_CPU,
    WRITE,
    Prompt,
    Setting,
    Sizes,
    Turns,
    WrongError,
    cpu_clock,
    engine_kv,
)
from kvtier.bench.compare.alone.arms import ARMS, Arm
from kvtier.bench.compare.limits import DISK_READ, MEMCPY

TINY = Sizes(layers=3, heads=1, head_size=16, chunks=4, looked_up=8, look_ups=3, step_tokens=512)
BOUNDS = [
    {MEMCPY: 10.0, DISK_READ: 4.0},
    {MEMCPY: 20.0, DISK_READ: 2.0},
    {MEMCPY: 10.0, DISK_READ: 2.0},
]
FOUND = Found(
    BOUNDS,
    [
        {"kvtier-nvme": {LOAD: 2.0, SAVE: 5.0}},
        {"kvtier-nvme": {LOAD: 1.8, SAVE: 15.0}},
        {"kvtier-ram": {HIT: 0.2}},
    ],
    {"lmcache-ram": "it is not here"},
)
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")


def arms(*named: str) -> list[Arm]:
    return [ARMS[name] for name in named]


def test_a_ratio_is_the_median_of_the_same_rounds() -> None:
    by_name = {
        row.name: row for row in rows(arms("kvtier-nvme", "kvtier-ram", "lmcache-ram"), FOUND)
    }
    load = by_name["kvtier-nvme: load"]
    assert load.value == pytest.approx(1.9)
    assert (load.min, load.max, load.unit) == (1.8, 2.0, "GB/s")
    assert load.ratio == pytest.approx((0.5 + 0.9) / 2)
    assert load.limit == 3.0, "the median of the rounds it ran in"
    assert by_name["kvtier-nvme: save"].ratio == pytest.approx((0.5 + 0.75) / 2)
    assert by_name["limit: memcpy"].value == 10.0


def test_what_did_not_run_is_a_row_without_a_value() -> None:
    by_name = {
        row.name: row for row in rows(arms("lmcache-ram", "vllm-offloading", "kvtier-ram"), FOUND)
    }
    assert (
        by_name["lmcache-ram: load"].value is None
        and by_name["vllm-offloading: load"].value is None
    )
    assert by_name["kvtier-ram: look-up, hit"].value == 0.2
    assert ARMS["vllm-offloading"].obstacle and ARMS["lmcache-redis-native"].obstacle


def test_what_an_arm_sets_itself_is_its_limit() -> None:
    found = Found([{}], [{"kvtier-server": {MATCH_HIT: 0.1, HIT: 0.3}}])
    by_name = {row.name: row for row in rows(arms("kvtier-server"), found)}
    assert (
        by_name["kvtier-server: match alone, hit"].limit,
        by_name["kvtier-server: look-up, hit"].limit,
    ) == (
        0.3,
        None,
    )


def test_every_metric_says_how_it_is_measured() -> None:
    assert UNITS.keys() == HOW.keys()


def test_a_setting_reaches_its_process_whole() -> None:
    setting = Setting("nvme", "/place", 12, TINY)
    assert Setting.of(setting.told()) == setting


def test_a_process_beside_counts() -> None:
    own, both = cpu_clock(None), cpu_clock(1)
    before = own()
    assert both() >= before >= 0.0


# ---- for real ------------------------------------------------------------------------------------


def turned(setting: Setting) -> dict[str, float]:
    kv = engine_kv(setting.sizes)
    with alone_kvtier.opened(setting, kv) as (cache, folder):
        turns = Turns(cache, kv, setting, folder)
        turns.warm_up()
        return turns.measured()


def test_ram() -> None:
    found = turned(Setting("ram", sizes=TINY))
    assert {SAVE, LOAD, SAVE_CPU, LOAD_CPU, HIT, MISS, MATCH_HIT} <= found.keys()
    assert not {WRITE, DURABLE} & found.keys() and min(found.values()) > 0


def test_what_is_below_ram_is_written_and_read_there(tmp_path: Path) -> None:
    found = turned(Setting("nvme", str(tmp_path / "nvme"), sizes=TINY))
    assert {SAVE, WRITE, DURABLE, LOAD} <= found.keys() and HIT not in found


@needs_redis
@pytest.mark.redis
@pytest.mark.parametrize("name", ["kvtier-redis", "kvtier-redis-tcp"])
def test_redis(tmp_path: Path, name: str) -> None:
    with ARMS[name].open(tmp_path, TINY) as (at, beside):
        found = turned(Setting("redis", at, beside, TINY))
    assert {SAVE, WRITE, LOAD} <= found.keys() and DURABLE not in found


def test_the_server(tmp_path: Path) -> None:
    with ARMS["kvtier-server"].open(tmp_path, TINY) as (at, beside):
        found = turned(Setting("server", at, beside, TINY))
    assert {SAVE, LOAD, HIT, MATCH_HIT} <= found.keys()


def test_an_arm_is_a_process_and_one_that_fails_says_why(tmp_path: Path) -> None:
    ours, at = ARMS["kvtier-ram"], nullcontext(("/proc/nowhere", None))
    nowhere = Arm("nowhere", "", ours.like, ours.module, "nvme", lambda *_: at)
    found = measured([ours, nowhere, ARMS["vllm-offloading"]], TINY, 2, tmp_path / "here", dict)
    assert len(found.of("kvtier-ram")) == 2
    assert (
        found.reasons.keys() == {"nowhere", "vllm-offloading"}
        and "/proc/nowhere" in found.reasons["nowhere"]
    )
    assert not (tmp_path / "here").exists()


class Flipping(alone_kvtier.Kvtier):
    """One bit of what it loads is another."""

    kv: torch.Tensor

    def load(self, prompt: Prompt) -> None:
        super().load(prompt)
        self.kv.view(torch.uint8).flatten()[77] ^= 1


def test_other_bytes_than_were_saved_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone_kvtier, "Kvtier", Flipping)
    kv = engine_kv(TINY)
    Flipping.kv = kv
    with (
        alone_kvtier.opened(Setting("ram", sizes=TINY), kv) as (cache, _),
        pytest.raises(WrongError, match="bytes differ"),
    ):
        Turns(cache, kv, Setting("ram", sizes=TINY)).warm_up()


def test_a_load_from_elsewhere_is_an_error() -> None:
    kv = engine_kv(TINY)
    with alone_kvtier.opened(Setting("ram", sizes=TINY), kv) as (cache, _):
        cache._tier = "nvme"
        turns = Turns(cache, kv, Setting("ram", sizes=TINY))
        prompt = turns._new_prompt()
        cache.save(prompt, 0, len(prompt.tokens))
        with pytest.raises(WrongError, match=r"from \['ram'\]"):
            cache.load(prompt)


class Forgetful(alone_kvtier.Kvtier):
    """Its look-up finds one chunk less."""

    def look_up(self, tokens: Sequence[int]) -> tuple[float, float | None]:
        return super().look_up(tokens[:-256])


def test_a_look_up_that_finds_too_little_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone_kvtier, "Kvtier", Forgetful)
    with pytest.raises(WrongError, match="1,792 tokens, expected 2,048"):
        turned(Setting("ram", sizes=TINY))
