"""How the comparison times connectors: calls, look-ups, steps."""

import ast
import importlib.util
import json
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bench.compare import calls, serving
from kvtier.bench.compare.calls import Spent, read, timed
from kvtier.bench.compare.peers.contenders import CONTENDERS, names
from kvtier.bench.long_doc_qa.arms import Sizes
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.processes.engine import Geometry

SIZES = Sizes(Workload([1], 3, 2048, 128, 8, 1), Geometry(128, 256, 28 << 10))


class Base:
    """vLLM's, as far as it matters here."""

    def get_transfer_results(self, finished):
        return finished

    def clear_connector_metadata(self): ...

    def take_events(self):
        return ()


class Real(Base):
    """Each call takes one tick of the clock more than what it calls."""

    clock: Callable[[], float]

    def get_num_new_matched_tokens(self, request, computed):
        self.clock()
        return request.answers.pop(0), False

    def wait_for_save(self, *, fails=False):
        self.clock()
        if fails:
            raise OSError("the disk is full")
        self.save_kv_layer("0")
        return "saved"

    def save_kv_layer(self, name):
        self.clock()


@pytest.fixture
def connector(tmp_path, monkeypatch):
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(calls, "time", types.SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(Real, "clock", staticmethod(clock), raising=False)
    made = timed(Real, Base, Spent(tmp_path / "calls"))
    assert made.__name__ == "Real" and issubclass(made, Real)
    return made()


def steps(tmp_path):
    return read(tmp_path / "calls") or []


def test_each_half_writes_its_steps_and_what_an_entry_calls_of_another_is_counted_once(
    connector, tmp_path
):
    """Two of Real's ticks and the one that ends the span. A failed call took its time too."""
    assert read(tmp_path / "calls") is None
    connector.get_transfer_results({"a"})  # what it has from vLLM is not timed
    assert connector.wait_for_save() == "saved"
    connector.clear_connector_metadata()
    with pytest.raises(OSError, match="the disk is full"):
        connector.wait_for_save(fails=True)
    connector.save_kv_layer("1")
    assert connector.take_events() == ()
    worker, scheduler = steps(tmp_path)
    assert ({*worker.calls}, worker.calls["wait_for_save"]) == (
        {"wait_for_save", "clear_connector_metadata"},
        3.0,
    )
    assert (scheduler.calls["wait_for_save"], scheduler.calls["save_kv_layer"]) == (2.0, 2.0)
    assert worker.at < scheduler.at


def request(name, *answers):
    return types.SimpleNamespace(request_id=name, answers=list(answers))


def test_a_look_up_lasts_from_the_first_question_to_the_definite_answer(connector, tmp_path):
    """A question is four ticks from its beginning to its end; another request's come between."""
    asked, quick = request("slow", None, None, 256), request("quick", 0)
    connector.get_num_new_matched_tokens(asked, 0)
    connector.take_events()
    connector.get_num_new_matched_tokens(quick, 0)
    connector.get_num_new_matched_tokens(asked, 0)
    assert connector.get_num_new_matched_tokens(asked, 0) == (256, False)
    connector.take_events()
    first, second = steps(tmp_path)
    quick_s, slow_s = second.look_ups
    assert first.look_ups == [] and quick_s == 4.0 and slow_s > 3 * quick_s


def test_vllm_calls_nothing_in_a_step_that_is_not_timed():
    """Each hook of vLLM's connector is an entry, or is known to be none of a step's. Read, as its
    import is slow."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    base = Path(vllm.origin).parent / "distributed/kv_transfer/kv_connector/v1/base.py"
    (made,) = (
        one
        for one in ast.parse(base.read_text()).body
        if isinstance(one, ast.ClassDef) and one.name == "KVConnectorBase_V1"
    )
    hooks = {
        one.name
        for one in made.body
        if isinstance(one, ast.FunctionDef)
        if not one.name.startswith("_") and not any(map(decorated, one.decorator_list))
    }
    outside = "bind_gpu_block_pool bind_kv_cache_manager get_finished_count get_handshake_metadata "
    outside += (
        "get_mem_pool_context has_connector_metadata register_kv_caches reset_cache shutdown "
    )
    outside += "reset_capture_state set_host_xfer_buffer_ops set_xfer_handshake_metadata "
    outside += "set_xfer_handshake_metadata_pp_aware"
    assert hooks - set(outside.split()) <= set(calls.ENTRIES)
    assert {"start_load_kv", "build_connector_meta"} <= hooks


def decorated(one):
    """Nothing for what is abstract only."""
    return one.id if isinstance(one, ast.Name) and one.id != "abstractmethod" else ""


@pytest.mark.parametrize("name", [one.name for one in CONTENDERS.values() if one.connector])
def test_every_arms_connector_is_timed(name):
    one, values = CONTENDERS[name], names(SIZES, Path("/place"), Path("/run"), 1)
    server = serving.server(one, Path("/model"), SIZES, values, "second")
    given = json.loads(server._command[server._command.index("--kv-transfer-config") + 1])
    assert one.connector and given["kv_connector"] == one.connector["kv_connector"]
    assert given["kv_connector_module_path"] == calls.MODULE == calls.__name__
    assert server._env[calls.CONNECTOR] == one.connector.get("kv_connector_module_path", "")
    assert server._env[calls.CALLS] == "/place/second-calls.jsonl"
