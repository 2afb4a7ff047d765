"""How the comparison times connectors, and what it makes of that: calls, look-ups, CPU time from
pairs."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.compare import calls, serving
from kvtier.bench.compare.arm_result import arm_results
from kvtier.bench.compare.calls import Spent, Step, read, timed
from kvtier.bench.compare.measures import (
    Effort,
    Pair,
    Run,
    calls_of_filling,
    calls_of_load,
    cpu_gib,
    efforts,
)
from kvtier.bench.compare.peers.contenders import CONTENDERS, names
from kvtier.bench.compare.rows import rows, write
from kvtier.bench.compare.table import print_tables
from kvtier.bench.long_doc_qa.arms import Sizes
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.requests.client import Outcome

GIB = 1 << 30
SIZES = Sizes(Workload([1], 3, 2048, 128, 8), 1, 128, 256, 28 << 10)


class Base(ABC):
    """vLLM's, as far as it matters here."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, computed: int
    ) -> tuple[int | None, bool]: ...

    def get_transfer_results(self, finished: set[str]) -> Any:
        return self.get_finished(finished)

    def get_finished(self, finished: set[str]) -> Any:
        return finished

    def save_kv_layer(self, name: str) -> None:
        self.log.append(name)

    def clear_connector_metadata(self) -> None:
        self.log.clear()

    def take_events(self) -> tuple[()]:
        return ()


class Real(Base):
    """Each call takes one tick of the clock more than what it calls."""

    clock: Callable[[], float]

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self.clock()
        self.log.append(f"look-up {computed}")
        return request.answers.pop(0), False

    def wait_for_save(self, *, fails: bool = False) -> str:
        self.clock()
        if fails:
            raise OSError("the disk is full")
        self.save_kv_layer("0")
        return "saved"

    def save_kv_layer(self, name: str) -> None:
        self.clock()


@pytest.fixture
def connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(calls, "time", types.SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(Real, "clock", staticmethod(clock), raising=False)
    made = timed(Real, Base, Spent(tmp_path / "calls"))
    return made([])


def steps(tmp_path: Path) -> list[Step]:
    found = read(tmp_path / "calls")
    assert found is not None
    return found


def request(name: str, *answers: int | None) -> Any:
    return types.SimpleNamespace(request_id=name, answers=list(answers))


# -- the timed connector ---------------------------------------------------------------------------


def test_a_timed_connector_is_the_real_one(connector: Any) -> None:
    assert type(connector).__name__ == "Real" and isinstance(connector, Real)
    assert connector.get_num_new_matched_tokens(request("a", 512), 7) == (512, False)
    assert (
        connector.log == ["look-up 7"]
        and connector.wait_for_save() == "saved"
        and connector.take_events() == ()
    )
    with pytest.raises(OSError, match="the disk is full"):
        connector.wait_for_save(fails=True)


def test_what_an_entry_calls_of_another_is_counted_once(connector: Any, tmp_path: Path) -> None:
    """Two of Real's ticks and the one that ends the span."""
    connector.wait_for_save()
    connector.save_kv_layer("1")
    connector.take_events()
    (step,) = steps(tmp_path)
    assert {name: step.calls[name] for name in ("wait_for_save", "save_kv_layer")} == {
        "wait_for_save": 3.0,
        "save_kv_layer": 2.0,
    }


def test_a_failed_call_took_its_time_and_stands_in_nobodys_way(
    connector: Any, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="disk"):
        connector.wait_for_save(fails=True)
    connector.save_kv_layer("1")
    connector.take_events()
    assert (
        steps(tmp_path)[0].calls["wait_for_save"] == 2.0
        and steps(tmp_path)[0].calls["save_kv_layer"] == 2.0
    )


def test_what_a_connector_has_from_vllm_is_not_timed(connector: Any, tmp_path: Path) -> None:
    connector.get_transfer_results({"a"})
    connector.clear_connector_metadata()
    assert steps(tmp_path)[0].calls.keys() == {"clear_connector_metadata"}


def test_each_half_writes_its_steps(connector: Any, tmp_path: Path) -> None:
    connector.wait_for_save()
    connector.clear_connector_metadata()
    connector.save_kv_layer("0")
    connector.take_events()
    worker, scheduler = steps(tmp_path)
    assert "wait_for_save" in worker.calls and "wait_for_save" not in scheduler.calls
    assert worker.at < scheduler.at


def test_a_look_up_lasts_from_the_first_question_to_the_definite_answer(
    connector: Any, tmp_path: Path
) -> None:
    """A question is four ticks from its beginning to its end; another request's come between."""
    asked, quick = request("slow", None, None, 256), request("quick", 0)
    connector.get_num_new_matched_tokens(asked, 0)
    connector.take_events()
    connector.get_num_new_matched_tokens(quick, 0)
    connector.get_num_new_matched_tokens(asked, 0)
    connector.get_num_new_matched_tokens(asked, 0)
    connector.take_events()
    first, second = steps(tmp_path)
    assert first.look_ups == []
    quick_s, slow_s = second.look_ups
    assert quick_s == 4.0 and slow_s > 3 * quick_s
    connector.get_num_new_matched_tokens(request("slow", 256), 0)
    connector.take_events()
    assert steps(tmp_path)[2].look_ups == [4.0], "a question asked anew is a new one"


@pytest.mark.parametrize(
    "text", [None, "", "no json\n", '{"at": 1}\n'], ids=["missing", "empty", "text", "other"]
)
def test_calls_that_cannot_be_read_are_none(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "calls").write_text(text)
    assert read(tmp_path / "calls") is None


def test_the_real_class_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a module, or in vLLM's registry."""
    registry = types.SimpleNamespace(get_connector_class_by_name={"Registered": Real}.__getitem__)
    for name, module in (
        ("factory", {"KVConnectorFactory": registry}),
        ("v1.base", {"KVConnectorBase_V1": Base}),
    ):
        stands_in = types.SimpleNamespace(**module)
        monkeypatch.setitem(
            sys.modules, f"vllm.distributed.kv_transfer.kv_connector.{name}", stands_in
        )
    monkeypatch.setitem(sys.modules, "an_arms_module", types.SimpleNamespace(Named=Real))
    monkeypatch.setenv(calls.CALLS, str(tmp_path / "calls"))
    for module_path, name in (("an_arms_module", "Named"), ("", "Registered")):
        monkeypatch.setenv(calls.CONNECTOR, module_path)
        try:
            made = getattr(calls, name)
            assert made.__mro__[1] is Real and getattr(calls, name) is made
        finally:
            vars(calls).pop(name, None)
    with pytest.raises(AttributeError, match="has no attribute 'entrie'"):
        calls.entrie  # noqa: B018


def test_vllm_calls_nothing_in_a_step_that_is_not_timed() -> None:
    """Each hook of vLLM's connector is an entry, or is known to be none of a step's. Read, as its
    import is slow."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    base = Path(vllm.origin).parent / "distributed/kv_transfer/kv_connector/v1/base.py"
    classes = {
        one.name: one for one in ast.parse(base.read_text()).body if isinstance(one, ast.ClassDef)
    }
    members = [
        one for one in classes["KVConnectorBase_V1"].body if isinstance(one, ast.FunctionDef)
    ]
    hooks = {
        one.name
        for one in members
        if not one.name.startswith("_") and not any(map(decorated, one.decorator_list))
    }
    outside = {
        "bind_gpu_block_pool",
        "bind_kv_cache_manager",
        "get_finished_count",
        "get_handshake_metadata",
        "get_mem_pool_context",
        "has_connector_metadata",
        "register_kv_caches",
        "reset_cache",
        "reset_capture_state",
        "set_host_xfer_buffer_ops",
        "set_xfer_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "shutdown",
    }
    assert hooks - outside <= set(calls.ENTRIES)
    assert {"start_load_kv", "build_connector_meta"} <= hooks


def decorated(one: ast.expr) -> str:
    """Nothing for what is abstract only."""
    return one.id if isinstance(one, ast.Name) and one.id != "abstractmethod" else ""


def test_every_arms_connector_is_timed() -> None:
    for one in CONTENDERS.values():
        if one.connector is None:
            continue
        values = names(SIZES, Path("/place"), Path("/run"), (1, 2, 3))
        server = serving.server(one, Path("/model"), SIZES, values, "second")
        given = json.loads(server._command[server._command.index("--kv-transfer-config") + 1])
        assert given["kv_connector"] == one.connector["kv_connector"]
        assert given["kv_connector_module_path"] == calls.MODULE == calls.__name__
        assert server._env[calls.CONNECTOR] == one.connector.get("kv_connector_module_path", "")
        assert server._env[calls.CALLS] == "/place/second-calls.jsonl" and server.log == Path(
            "/place/second.log"
        )


# -- what is made of it ----------------------------------------------------------------------------

NOTES = [(10.0, 100.0), (11.0, 100.5), (12.0, 102.0)]
STEPS = [
    Step(9.9, {"early": 9.0}, [9.0]),
    Step(10.5, {"load": 0.25, "meta": 0.5}, [0.125]),
    Step(11.0, {"load": 0.5}, []),
    Step(11.5, {"meta": 1.0}, []),
    Step(13.0, {"save": 2.0}, []),
]


def test_a_step_belongs_to_the_answer_before_whose_note_it_ended() -> None:
    assert efforts(NOTES, STEPS) == [
        Effort(0.5, {"load": 0.75, "meta": 0.5}, 0.125),
        Effort(1.5, {"meta": 1.0, "save": 2.0}),
    ]


def test_without_calls_there_is_still_cpu_time() -> None:
    assert efforts(NOTES, None) == [Effort(0.5), Effort(1.5)]
    assert efforts([(1.0, 5.0), (2.0, None)], STEPS[:0]) == [Effort(None)]
    assert Effort(0.5).in_connector is None and efforts(NOTES, STEPS)[0].in_connector == 1.25


def pair(cpu: float, *, cached: int = GIB // 4, **loads: float) -> Pair:
    loaded = Outcome(0, 0, False, 0.0, 0.5, 1.0, True, 100, 1, cached)
    warm = Outcome(0, 1, False, 0.0, 0.25, 1.0, True, 100, 1, cached)
    return Pair(loaded, warm, Effort(2.0 + cpu, loads, 0.002), Effort(2.0, {"load": 1.0}, 0.001))


def test_cpu_time_is_a_median_over_pairs() -> None:
    """Tokens of one byte: four hits are a GiB. Of 36 pairs the 12th and the 25th bound the
    median."""
    found = cpu_gib([pair(0.001 * one) for one in (*range(1, 36), 1000)], 1)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.074, 0.048, 0.1))
    missed = cpu_gib([pair(0.01), pair(0.03), pair(9.0, cached=0), pair(0.08, cached=GIB)], 2)
    assert missed is not None and missed.value == pytest.approx(0.04), "a miss is no hit's CPU time"
    assert (missed.low, missed.high) == pytest.approx((0.02, 0.06))


def test_cpu_time_that_is_not_known_is_none() -> None:
    assert cpu_gib([], 1) is None and cpu_gib([pair(0.5)], 1) is None
    assert cpu_gib([pair(0.5, cached=0), pair(0.5, cached=0)], 1) is None
    assert (
        cpu_gib([replace(pair(0.5), load=None), replace(pair(0.5), rest=Effort(None))] * 4, 1)
        is None
    )


def test_a_loads_calls_are_medians_of_what_the_warm_ones_lack() -> None:
    twos = [pair(0, load=1.5, look=0.25), pair(0, load=9.0), pair(0, load=2.0, look=0.75)]
    assert calls_of_load(twos) == {"load": 1.0, "look": 0.25}
    assert [two.in_connector for two in twos] == [0.75, 8.0, 1.75]
    assert calls_of_load([]) == {} and calls_of_load([Pair(twos[0].loaded, twos[0].warm)]) == {}


def run(arm: str, scale: float, *, known: bool = True) -> Run:
    """A second in the fill's connector, and a load of half a second, for ``scale`` = 1."""
    twos = [pair(0.02 * scale, load=1.0 + 0.5 * scale), pair(0.06 * scale, load=1.0 + 0.5 * scale)]
    made = [effort for two in twos for effort in (two.load, two.rest) if effort is not None]
    fill = [Effort(1.0, {"save": 0.75 * scale}, 0.001), Effort(1.0, {"save": 0.25 * scale}, 0.003)]
    return Run(
        arm,
        [Outcome(0, 0, False, 0.0, 0.5, 1.0, True, 100, 1, 80)],
        50.0,
        pairs=[one for two in twos for one in (two.loaded, two.warm)],
        pair_efforts=made if known else [Effort(one.cpu_s) for one in made],
        fill_tokens=200,
        fill_efforts=fill if known else [Effort(1.0)] * 2,
    )


def test_the_fills_calls_are_by_prompt_token() -> None:
    assert calls_of_filling([run("kvtier-ram", 1.0), run("kvtier-ram", 3.0)]) == {"save": 0.01}
    assert calls_of_filling([run("kvtier-ram", 1.0, known=False)]) == {}


ARMS = [CONTENDERS[name] for name in ("none", "kvtier-ram", "lmcache-ram")]
RUNS = [Run("none", run("", 1.0).outcomes), run("kvtier-ram", 1.0), run("lmcache-ram", 3.0)]
BY_NAME = {row.name: row for row in rows(ARMS, RUNS, 1, [{"memcpy": 2e-6}])}


def test_rows_hold_the_engines_time_against_kvtiers() -> None:
    load, filled = (
        BY_NAME["lmcache-ram: connector, a load"],
        BY_NAME["lmcache-ram: connector, 1,000 tokens filled"],
    )
    assert (load.value, load.limit, load.ratio, load.min, load.max) == (
        1500.0,
        500.0,
        3.0,
        1500.0,
        1500.0,
    )
    assert (filled.value, filled.limit, filled.ratio) == pytest.approx((15000.0, 5000.0, 3.0))
    assert BY_NAME["kvtier-ram: connector, of the fill"].value == pytest.approx(25.0), (
        "5 ms a token at 50 tokens/s"
    )
    assert (BY_NAME["kvtier-ram: save"].value, BY_NAME["kvtier-ram: save"].ratio) == pytest.approx(
        (2e-7, 0.1)
    )
    look, cold = BY_NAME["kvtier-ram: look-up"], BY_NAME["kvtier-ram: look-up, cold"]
    assert (look.value, cold.value, cold.min, cold.max) == pytest.approx((2.0, 2.0, 1.0, 3.0))


def test_rows_hold_cpu_time_against_kvtiers_with_its_error() -> None:
    cpu = BY_NAME["lmcache-ram: CPU a GiB of hits"]
    assert (cpu.value, cpu.limit, cpu.ratio) == pytest.approx((0.48, 0.16, 3.0))
    assert cpu.min is not None and cpu.max is not None and cpu.min < 0.48 < cpu.max
    assert "none: CPU a GiB of hits" not in BY_NAME and "none: look-up" not in BY_NAME


def test_what_could_not_be_read_is_none_and_not_zero() -> None:
    found = {row.name: row for row in rows(ARMS, [RUNS[0], run("kvtier-ram", 1.0, known=False)], 1)}
    named = (
        "look-up",
        "look-up, cold",
        "connector, a load",
        "connector, 1,000 tokens filled",
        "connector, of the fill",
    )
    assert [found[f"kvtier-ram: {name}"].value for name in (*named, "save")] == [None] * 6
    assert found["kvtier-ram: CPU a GiB of hits"].value is not None


def test_the_results_say_where_the_engines_time_goes(tmp_path: Path) -> None:
    write(tmp_path / "compare.json", ARMS, RUNS, {}, workload={"kv_token_bytes": 1})
    told = json.loads((tmp_path / "compare.json").read_text())
    assert told["arms"]["lmcache-ram"]["connector_ms_a_load"] == {"load": 1500.0}
    assert told["arms"]["lmcache-ram"]["connector_ms_1000_tokens_filled"] == {"save": 15000.0}
    assert {"look-up", "connector", "CPU a GiB of hits"} <= told["measures"].keys()


def test_efforts_survive_a_runs_file() -> None:
    assert Run.told(json.loads(json.dumps(asdict(RUNS[1])))).pair_efforts == RUNS[1].pair_efforts
    assert Run.told(json.loads(json.dumps(asdict(RUNS[1])))).fill_efforts == RUNS[1].fill_efforts


def test_the_tables_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(ARMS, RUNS, {}, 1, [{"memcpy": 12.0}])
    printed = capsys.readouterr().out
    for cell in (
        " 3.0 x",
        "2.00 ms, 2.00 ms",
        "1500.00 ms",
        "5000.00 ms (25.0%)",
        "memcpy 12.0 GB/s",
    ):
        assert cell in printed
    assert arm_results(ARMS, RUNS, 1)["none"].engine_load is None
