"""How the comparison times connectors: calls, look-ups, steps."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.compare import calls, serving
from kvtier.bench.compare.calls import Spent, Step, read, timed
from kvtier.bench.compare.peers.contenders import CONTENDERS, names
from kvtier.bench.long_doc_qa.arms import Sizes
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.processes.engine import Geometry

SIZES = Sizes(Workload([1], 3, 2048, 128, 8, 1), Geometry(128, 256, 28 << 10))


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
        values = names(SIZES, Path("/place"), Path("/run"), 1)
        server = serving.server(one, Path("/model"), SIZES, values, "second")
        given = json.loads(server._command[server._command.index("--kv-transfer-config") + 1])
        assert given["kv_connector"] == one.connector["kv_connector"]
        assert given["kv_connector_module_path"] == calls.MODULE == calls.__name__
        assert server._env[calls.CONNECTOR] == one.connector.get("kv_connector_module_path", "")
        assert server._env[calls.CALLS] == "/place/second-calls.jsonl" and server.log == Path(
            "/place/second.log"
        )
