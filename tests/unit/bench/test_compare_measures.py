"""What the comparison measures besides the time to the first token: its arithmetic, its readers of
/proc, its table."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread

import pytest

from kvtier.bench import readme
from kvtier.bench.compare import limits, memory, table
from kvtier.bench.compare.arm_result import arm_results
from kvtier.bench.compare.measures import Again, Memory, Run, load_speed
from kvtier.bench.compare.peers.contenders import CONTENDERS
from kvtier.bench.compare.rows import rows, write
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.requests.client import Outcome

MIB = 1 << 20
ALL = [
    CONTENDERS[name]
    for name in ("none", "vllm-prefix-cache", "lmcache-disk", "kvtier-ram", "kvtier-nvme")
]


def outcome(
    document: int, ttft: float, end: float, *, question: int = 0, cached: int = 0, token: int = 7
) -> Outcome:
    return Outcome(document, question, False, 0.0, ttft, end, True, 100, 1, cached, tokens=[token])


def run(
    arm: str,
    ttft: float,
    used: Memory,
    *,
    cached: int = 80,
    mixed_end: float = 2.0,
    restart: Again | None = None,
    second: Again | None = None,
) -> Run:
    mixed = [outcome(0, ttft, ttft, question=1, cached=cached), outcome(2, 1.0, mixed_end)]
    pairs = [
        outcome(0, ttft, ttft, question=3, cached=cached),
        outcome(0, 0.1, 0.1, question=4, cached=cached),
    ]
    return Run(
        arm, [outcome(0, ttft, ttft, cached=cached)], 50.0, used, pairs, mixed, restart, second
    )


BARE = Memory(1000 * MIB, 100 * MIB, 0)
RUNS = [
    run("none", 1.0, BARE, cached=0),
    run("vllm-prefix-cache", 0.1, BARE),
    run(
        "lmcache-disk",
        0.3,
        Memory(1300 * MIB, 100 * MIB, 200 * MIB),
        mixed_end=4.0,
        restart=Again(9.0, [outcome(0, 1.2, 1.2), outcome(1, 1.0, 2.2)]),
        second=Again(9.5, [outcome(0, 0.6, 0.6, cached=40), outcome(1, 0.3, 0.9, cached=80)]),
    ),
    run("kvtier-ram", 0.12, Memory(1150 * MIB, 150 * MIB, 200 * MIB)),
    run(
        "kvtier-nvme",
        0.2,
        Memory(1210 * MIB, 100 * MIB, 200 * MIB),
        restart=Again(
            8.0, [outcome(0, 0.4, 0.4, cached=80), outcome(1, 0.2, 0.6, cached=80, token=8)]
        ),
    ),
]
BY_NAME = {
    row.name: row
    for row in rows(ALL, RUNS, 1000, [{"disk read": 2e-6, "memcpy": 1.0}, {"disk read": 4e-6}])
}


# -- memory ----------------------------------------------------------------------------------------


def test_a_pool_that_nobody_touched_yet_is_no_room_to_hide_in() -> None:
    """Both arms have 10 MiB of their own. One has used all of its 200 MiB, the other a quarter."""
    full = Memory(1210 * MIB, 100 * MIB, 200 * MIB)
    quarter = Memory(1060 * MIB, 250 * MIB, 200 * MIB)
    assert full.beyond(BARE) == 210 * MIB and quarter.beyond(BARE) == 60 * MIB
    assert full.beyond_budget(BARE) == quarter.beyond_budget(BARE) == 10 * MIB


def test_untouched_memory_beyond_the_budget_takes_nothing_from_it_twice() -> None:
    assert Memory(1010 * MIB, 900 * MIB, 200 * MIB).beyond_budget(BARE) == 10 * MIB
    assert Memory(990 * MIB, 0, 0).beyond_budget(BARE) == -10 * MIB


def test_memory_rows_are_beyond_the_bare_engine_and_the_budget() -> None:
    assert BY_NAME["lmcache-disk: memory beyond the engine's"].value == 300
    assert BY_NAME["lmcache-disk: memory beyond budget"].value == 100
    assert BY_NAME["kvtier-ram: memory beyond budget"].value == 0
    assert (
        "none: memory beyond budget" not in BY_NAME
        and "vllm-prefix-cache: memory beyond budget" not in BY_NAME
    )


SMAPS = """\
7f0000000000-7f0004000000 rw-s 00000000 00:01 77                         /memfd:pool (deleted)
Size:              65536 kB
Rss:               16384 kB
7f1000000000-7f1004000000 rw-p 00000000 00:00 0
Rss:               32768 kB
7f2000000000-7f2004000000 r--p 00000000 00:00 0
Rss:                   0 kB
7f3000000000-7f3004000000 rw-p 00000000 fe:00 9                          /model.safetensors
Rss:                   0 kB
7f4000000000-7f4000800000 rw-p 00000000 00:00 0                          [stack]
Rss:                   4 kB
"""


def test_large_writable_mappings_without_a_file_may_be_pools() -> None:
    found = list(memory.mappings(SMAPS))
    assert [one.name for one in found] == ["00:01:77", "", ""]
    assert memory.untouched(found) == (48 + 32) * MIB


def test_a_shared_pool_is_one_and_touched_by_whoever_touched_it() -> None:
    two = [memory.Mapping("a", 64 * MIB, 16 * MIB), memory.Mapping("a", 64 * MIB, 40 * MIB)]
    assert memory.untouched(two) == 24 * MIB
    assert memory.untouched([memory.Mapping("", 64 * MIB, 16 * MIB)] * 2) == 96 * MIB


def test_the_kernels_files_are_understood() -> None:
    before, spared = memory.in_use([os.getpid()])
    with closing(mmap.mmap(-1, 64 * MIB)) as pool:
        pool[: 32 * MIB] = b"x" * (32 * MIB)
        after, left = memory.in_use([os.getpid()])
    assert 31 * MIB < after - before < 40 * MIB
    assert left - spared >= 31 * MIB
    assert memory.in_use([0]) == (0, 0)


def test_a_family_is_a_process_and_its_descendants() -> None:
    told = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(told, stdout=subprocess.PIPE, start_new_session=True) as shell:
        try:
            assert shell.stdout is not None
            sleep = int(shell.stdout.readline())
            assert memory.family([shell.pid]) == {shell.pid, sleep}
            assert {os.getpid(), shell.pid, sleep} <= memory.family([os.getpid()])
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


# -- throughput, restart, limits -------------------------------------------------------------------


def test_half_reused_is_held_against_the_bare_engine() -> None:
    row = BY_NAME["lmcache-disk: throughput, half reused"]
    assert (row.value, row.limit, row.ratio) == (50.0, 100.0, 0.5)


def test_the_mixed_rounds_documents_are_asked_again_or_were_never_seen() -> None:
    work = Workload(range(100, 2000), 3, 64, 8, 4)
    mixed = Workload(range(100, 2000), 3, 64, 8, 4, hit_miss_ratio=(1, 1)).queries(first=1)
    seen = {ask.document for ask in (*work.pre_warm_up(), *work.warm_up(), *work.queries())}
    assert [ask.document in seen for ask in mixed] == [True, False] * 3
    assert [ask.is_miss for ask in mixed] == [False, True] * 3
    asked = {tuple(ask.prompt) for ask in (*work.warm_up(), *work.queries())}
    assert not asked & {tuple(ask.prompt) for ask in mixed}


def test_a_restart_tells_its_times_and_what_was_left() -> None:
    assert BY_NAME["kvtier-nvme: restart until ready"].value == 8.0
    first = BY_NAME["kvtier-nvme: after a restart, ttft first"]
    assert (first.value, first.limit, first.ratio) == pytest.approx((0.4, 0.2, 2.0))
    assert BY_NAME["kvtier-nvme: after a restart, ttft mean"].value == pytest.approx(0.3)
    assert BY_NAME["kvtier-nvme: after a restart, cached"].value == pytest.approx(80.0)
    assert BY_NAME["lmcache-disk: after a restart, cached"].value == 0.0
    assert "kvtier-ram: restart until ready" not in BY_NAME


def test_a_second_engine_tells_what_it_found() -> None:
    first, mean = (
        BY_NAME[f"lmcache-disk: second engine, ttft {what}"] for what in ("first", "mean")
    )
    assert (first.value, first.limit, first.ratio) == pytest.approx((0.6, 0.3, 2.0))
    assert mean.value == pytest.approx(0.45) and mean.ratio == pytest.approx(1.5)
    assert BY_NAME["lmcache-disk: second engine, cached"].value == pytest.approx(60.0)
    assert "kvtier-nvme: second engine, ttft mean" not in BY_NAME
    failed = Run("lmcache-disk", RUNS[2].outcomes, second=Again(error="no port"))
    found = {row.name: row.value for row in rows(ALL, [*RUNS[:2], failed])}
    assert found["lmcache-disk: second engine, ttft mean"] is None
    assert "lmcache-disk: second engine, cached" not in found


def test_answers_of_every_round_are_compared() -> None:
    assert (
        arm_results(ALL, RUNS)["kvtier-nvme"].differing == 1
    )  # lmcache-disk, cold, computed the same question anew
    mixed = [outcome(0, 0.2, 0.2, question=1, cached=80, token=9)]
    after = Again(8.0, [outcome(0, 0.4, 0.4, cached=80, token=9)])
    found = arm_results(
        ALL, [*RUNS, Run("kvtier-ram", [outcome(0, 0.2, 0.2)], mixed=mixed, restart=after)]
    )
    assert found["kvtier-ram"].differing == 2
    beside = Again(8.0, [outcome(0, 0.4, 0.4, cached=80, token=9), outcome(1, 0.4, 0.4, cached=80)])
    found = arm_results(ALL, [*RUNS, Run("kvtier-ram", [outcome(0, 0.2, 0.2)], second=beside)])
    assert found["kvtier-ram"].differing == 1


def test_loads_are_held_against_the_machine() -> None:
    """80 tokens of 1,000 bytes in 0.1 s more than a warm hit. The disk reads 3 KB/s in the
    middle."""
    row = BY_NAME["kvtier-nvme: load"]
    assert (row.value, row.limit) == pytest.approx((8e-4, 3e-6))
    assert BY_NAME["limit: disk read"].min == 2e-6 and BY_NAME["limit: memcpy"].value == 1.0
    assert load_speed(RUNS[1].outcomes, -0.01, 1000) is None
    assert "none: load" not in BY_NAME


def test_a_memcpy_has_a_speed() -> None:
    assert limits.memcpy(7 * MIB) > 0


@pytest.mark.parametrize("tool", ["fio", ""], ids=["fio", "own loop"])
def test_the_disks_limits_leave_nothing_behind(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tool and not shutil.which(tool):
        pytest.skip("fio is not installed")
    monkeypatch.setattr(limits, "_FIO_S", 0.1)
    monkeypatch.setattr(limits, "_FILE_BYTES", 8 * MIB)
    monkeypatch.setattr(shutil, "which", lambda name: tool)
    found = limits.disk(tmp_path, MIB)
    assert found.keys() == {"disk read", "disk write"} and min(found.values()) > 0
    assert not list(tmp_path.iterdir())


def test_a_limit_that_cannot_be_measured_says_which_tool_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="false could not measure its limit"),
        limits._explained("false"),
    ):
        subprocess.run(["false"], check=True)
    assert limits.medians([]) == {} and limits.rows([{}]) == []


# -- files -----------------------------------------------------------------------------------------


def test_a_run_survives_its_file() -> None:
    for one in RUNS:
        assert Run.told(json.loads(json.dumps(asdict(one)))) == Run.told(asdict(one))
    assert Run.told(asdict(RUNS[-1])).restart == RUNS[-1].restart
    assert Run.told(asdict(RUNS[2])).second == RUNS[2].second
    assert Run.told(asdict(replace(RUNS[2], mode="V2"))).mode == "V2"


def test_a_run_of_before_these_measures_is_read() -> None:
    told = {
        "arm": "none",
        "outcomes": [asdict(outcome(0, 1.0, 1.0))],
        "fill": 5.0,
        "cpu_s": 3.5,
        "pairs": [],
    }
    old = Run.told(told)
    assert (old.fill, old.memory, old.mixed, old.restart, old.second) == (5.0, None, [], None, None)
    assert old.twos == [] and old.pair_efforts == []
    assert not [row for row in rows(ALL, [old]) if "half" in row.name or "memory" in row.name]


def test_the_results_say_what_a_restart_left(tmp_path: Path) -> None:
    failed = Run("kvtier-nvme", RUNS[-1].outcomes, restart=Again(error="no port"))
    write(tmp_path / "compare.json", ALL, [*RUNS[:-1], failed], {}, workload={})
    told = json.loads((tmp_path / "compare.json").read_text())["arms"]
    assert told["lmcache-disk"]["after_a_restart"] == "cached 0%"
    assert told["kvtier-nvme"]["after_a_restart"] == "failed: no port"
    assert told["kvtier-ram"]["after_a_restart"].startswith(
        "not tried: what it caches is memory of the engine"
    )
    assert told["kvtier-ram"]["second_engine"] == told["kvtier-ram"]["after_a_restart"]
    assert told["kvtier-nvme"]["second_engine"].startswith(
        "not tried: an engine with kvtier in it owns its folder"
    )
    assert told["lmcache-disk"]["second_engine"] == "cached 60%"


def test_the_tables_tell_what_was_measured_and_how_the_engines_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    native = CONTENDERS["lmcache-redis-native"]
    reasons = {native.name: "it hangs"}
    write(tmp_path / "compare.json", [*ALL, native], RUNS, reasons, [{"memcpy": 12.0}], workload={})
    answers, besides, out, _ = readme.compare().split("\n\n")
    rows = [
        {cells[0]: dict(zip(head, cells, strict=True)) for cells in lines}
        for head, _, *lines in (
            [line.split(" | ") for line in part.splitlines()] for part in (answers, besides)
        )
    ]
    assert rows[0]["| `lmcache-disk`"]["nothing reused, tokens/s"] == "50"
    assert rows[1]["| `lmcache-disk`"]["after a restart, TTFT"] == "cold"
    assert rows[1]["| `kvtier-nvme`"]["after a restart, TTFT"] == "0.3 s"
    assert rows[1]["| `kvtier-nvme`"]["memory beyond budget"] == "10 MiB"
    assert rows[1]["| `kvtier-ram`"]["after a restart, TTFT"] == "-"
    assert (
        "| `lmcache-redis-native`" not in rows[0]
        and out == "`lmcache-redis-native` cannot run: it hangs."
    )
    assert "Limits in the same run: memcpy 12 GB/s." in readme.compare().splitlines()
    assert "Model Runner" not in readme.compare(), "no engine said how it ran"
    runs = [*RUNS[:-1], replace(RUNS[-1], mode="Model Runner V2, async scheduling")]
    write(tmp_path / "compare.json", ALL, runs, {}, workload={})
    assert ", Model Runner V2, async scheduling." in readme.compare()
    table.print_tables(ALL, runs, {})
    assert "The engines ran by Model Runner V2, async scheduling." in capsys.readouterr().out
    write(
        tmp_path / "compare.json",
        ALL,
        [Run(one.arm, one.outcomes) for one in RUNS],
        {},
        workload={},
    )
    assert "Limits" not in readme.compare()


def test_a_redis_servers_word_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as access:
        access.bind(str(tmp_path / "s"))
        access.listen()

        def serve() -> None:
            link, _ = access.accept()
            with link:
                assert link.recv(64) == b"INFO memory\r\n"
                for piece in (
                    b"$40\r\n# Memory\r\nused_mem",
                    b"ory:12",
                    b"34\r\nused_memory_human:1K\r\n",
                ):
                    link.sendall(piece)

        server = Thread(target=serve)
        server.start()
        assert memory.redis_data(tmp_path / "s") == 1234
        server.join()
