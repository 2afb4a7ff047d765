"""KVTierTier beside vLLM's own ``fs`` tier: the same calls on one view of memory have the same
answers and the same bytes."""

import os
import threading
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.connectors import vllm_tier as entry
from kvtier.core.errors import ConfigError
from kvtier.extensions.cache_server import Attached
from tests.child_process import DEADLINE_S, wait_for
from tests.server_process import serving
from tests.unit.extensions.vllm_tier.conftest import tcp_address
from tests.unit.extensions.vllm_tier.tiering import (
    LAYOUT,
    OURS,
    PATIENT,
    chunk_keys,
    counted,
    engine_config,
    make_spec,
    tiering,
)

ROW = LAYOUT.chunk_bytes
EMA = "vllm.v1.kv_offload.tiering.backpressure.EMABackpressureDetector"


class Both:
    """Both tiers on one memory."""

    def __init__(self, model, ours, theirs):
        from vllm.config import KVEventsConfig
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.rows: Any = np.frombuffer(mmap(-1, 32 * ROW), np.uint8).reshape(
            32, ROW
        )  # of whole pages
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        vllm_config = engine_config(model, [], kv_events_config=events)
        spec, view = make_spec(vllm_config), self.rows.data
        self.ours, self.theirs = (
            SecondaryTierFactory.create_secondary_tier(given, view, spec)
            for given in (ours, theirs)
        )
        self._job = 0

    def each(self, call):
        return [call(self.ours), call(self.theirs)]

    def move(self, tier, keys, first_row, *, load):
        """The result of a job that stores rows, or loads into them."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._job += 1
        places = np.arange(first_row, first_row + len(keys), dtype=np.int32)
        job = TransferJob(self._job, tuple(keys), places, load, SimpleNamespace(req_id="r"))
        (tier.submit_load if load else tier.submit_store)(job)
        found: list[Any] = []

        def ended():
            found.extend(tier.get_finished_jobs())
            return bool(found)

        wait_for(ended, "the job's result")
        (result,) = found
        assert result.job_id == self._job
        return result

    def held(self, tier, keys, request="r"):
        context, answers = SimpleNamespace(req_id=request), list[str]()

        def decided():
            answers[:] = [tier.lookup(key, context).name for key in keys]
            tier.on_schedule_end(None)
            return "RETRY" not in answers

        wait_for(decided, "verdicts")
        return answers


@pytest.fixture
def both(request, model, server, tmp_path):
    """By a socket, or by TCP."""
    by_tcp = getattr(request, "param", False)
    address = tcp_address(server) if by_tcp else str(server.address)
    own = {"enable_kv_events": True, "server": address}
    theirs = {"type": "fs", "root_dir": str(tmp_path), "enable_kv_events": True}
    place = {"locality": "REMOTE" if by_tcp else "LOCAL"}
    found = Both(model, OURS | own | PATIENT, theirs | place)
    yield found
    found.each(lambda tier: tier.shutdown())


@pytest.mark.parametrize("both", [False, True], ids=["socket", "tcp"], indirect=True)
def test_what_is_stored_is_found_and_loaded_and_the_rest_is_a_miss(both):
    keys = chunk_keys(1 if both.ours.locality.name == "LOCAL" else 9, 8)
    both.rows[:8] = np.random.default_rng(0).integers(0, 256, (8, ROW), np.uint8)
    assert both.each(lambda tier: both.held(tier, keys)) == [["MISS"] * 8] * 2
    both.each(lambda tier: tier.on_request_finished(SimpleNamespace(req_id="r")))
    for tier in (both.ours, both.theirs):
        result = both.move(tier, keys[:5], 0, load=False)
        assert result.success and result.transfer_bytes == 5 * ROW
        assert both.held(tier, keys) == ["HIT"] * 5 + ["MISS"] * 3
        both.rows[16:] = 0
        assert both.move(tier, keys[:5], 16, load=True).success
        assert (both.rows[16:21] == both.rows[:5]).all()
    ours, theirs = both.each(lambda tier: [*tier.take_events()])
    assert ours == theirs and ours[0].medium.name == "STORAGE" and not ours[0].removed
    assert both.each(lambda tier: [*tier.take_events()]) == [[], []]


def test_a_chunk_that_is_gone_fails_by_its_key_and_is_a_miss_until_its_request_ends(both):
    keys = chunk_keys(2, 6)
    for tier in (both.ours, both.theirs):
        assert both.move(tier, keys, 0, load=False).success
        assert both.held(tier, keys) == ["HIT"] * 6
    assert isinstance(both.ours._server, Attached)
    both.ours._server.invalidate(both.ours._named([keys[3]]))
    path = both.theirs.file_mapper.get_file_name(keys[3])
    os.unlink(path)
    ours, theirs = both.each(lambda tier: both.move(tier, keys, 16, load=True))
    assert not ours.success and not theirs.success
    assert set(theirs.successful_keys) == set(keys[:3])
    assert set(ours.successful_keys) == {*keys[:3], *keys[4:]}, "what lies behind it is kept"
    left = both.each(lambda tier: both.held(tier, keys))
    assert [one[3] for one in left] == ["MISS"] * 2
    assert left[0] == ["HIT"] * 3 + ["MISS"] + ["HIT"] * 2
    assert [event.removed for event in both.ours.take_events()] == [False, True]
    assert counted(both.ours) == {"hit": 6, "stored": 6, "loaded": 5, "not_loaded": 1}
    assert both.ours.get_stats() is None


class Struck:
    """The tier's server, to which something happens inside a call: where it is asked, or has had a
    chunk."""

    def __init__(self, server, strike):
        self._server, self._strike, self.close = server, strike, server.close

    def known(self, keys):
        self._strike()
        return self._server.known(keys)

    def save(self, keys, fill, until):
        return self._server.save(keys, self._then(fill), until)

    def load(self, keys, take, until):
        return self._server.load(keys, self._then(take), until)

    def _then(self, copy):
        def copied(place, slot):
            done = bool(copy(place, slot))
            self._strike()
            return done

        return copied


@pytest.mark.parametrize("call", ["known", "save", "load"])
@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_a_server_that_ends_inside_a_call_is_a_miss_in_time_and_ends_every_job(
    model, tmp_path, fault, call
):
    keys, new = chunk_keys(3, 6), chunk_keys(4, 6)
    times = {"server_timeout_ms": 50, "load_timeout_ms": 300}
    with serving(ram_bytes="8MiB") as server:
        ours = OURS | {"server": str(server.address)} | times
        both = Both(model, ours, {"type": "fs", "root_dir": str(tmp_path)})
        tier = both.ours
        both.rows[:6] = 7
        wait_for(lambda: both.move(tier, keys, 0, load=False).success, "it is stored")
        struck = threading.Event()

        def strike():
            if not struck.is_set():
                struck.set()
                getattr(server, fault)()

        tier._server = Struck(tier._server, strike)
        if call == "known":
            assert both.held(tier, keys) == ["MISS"] * 6
        elif call == "load":
            loaded = both.move(tier, keys, 16, load=True).successful_keys
            assert all((both.rows[16 + keys.index(key)] == 7).all() for key in loaded)
        else:
            both.move(tier, new, 0, load=False)
        assert struck.is_set()
        assert both.held(tier, new, "later") == ["MISS"] * 6
        assert not both.move(tier, keys, 16, load=True).success
        assert not both.move(tier, chunk_keys(5, 6), 0, load=False).success
        both.each(lambda one: (one.drain_jobs(), one.shutdown()))
        if fault == "pause":
            server.resume()


def test_an_answer_that_comes_too_late_or_raises_is_a_counted_miss(model, server, tmp_path):
    keys, asked, goes_on = chunk_keys(10, 2), threading.Event(), threading.Event()
    ours = OURS | {"server": str(server.address), "server_timeout_ms": 20}
    both = Both(model, ours, {"type": "fs", "root_dir": str(tmp_path)})

    def fail():
        asked.set()
        assert goes_on.wait(DEADLINE_S)
        raise RuntimeError("injected")

    wait_for(lambda: both.move(both.ours, keys, 0, load=False).success, "it is stored")
    counted(both.ours)
    both.ours._server = Struck(both.ours._server, fail)
    assert both.held(both.ours, keys) == ["MISS"] * 2
    assert asked.is_set() and counted(both.ours) == {"late": 2, "miss": 2}
    goes_on.set()
    assert not both.move(both.ours, keys, 16, load=True).success
    wait_for(lambda: both.ours._asking.is_idle, "the lookup has failed too")
    assert counted(both.ours) == {"not_loaded": 2, "failed_calls": 2}
    both.each(lambda tier: tier.shutdown())


def test_more_jobs_than_lanes_have_room_for_end_too_and_a_drain_has_every_result(
    model, server, tmp_path
):
    from vllm.v1.kv_offload.tiering.base import TransferJob

    ours = OURS | {"server": str(server.address), "server_timeout_ms": 50}
    both = Both(model, ours, {"type": "fs", "root_dir": str(tmp_path)})
    wait_for(lambda: both.move(both.ours, chunk_keys(7, 1), 0, load=False).success, "attached")
    context, ended = SimpleNamespace(req_id="r"), list[Any]()
    with server.paused():
        for number in range(300):
            key, row = tuple(chunk_keys(8 + number % 2, 1)), np.zeros(1, np.int32)
            both.ours.submit_store(TransferJob(number, key, row, False, context))
        ended += both.ours.get_finished_jobs()
        assert len(ended) >= 300 - 256 - 4, "a full lane refuses at once"
        both.ours.drain_jobs()
        ended += both.ours.get_finished_jobs()
    assert sorted(one.job_id for one in ended) == [*range(300)]
    assert not any(one.success for one in ended)
    assert counted(both.ours)["not_stored"] == 300
    both.each(lambda tier: tier.shutdown())


def test_vllms_back_pressure_drops_what_a_slow_server_cannot_take(model, server):
    slow = {"backpressure_cls": EMA, "warmup_completions": 1, "high_water_s": 0, "low_water_s": 0}
    slow |= {"policy_cls": "vllm.v1.kv_offload.tiering.backpressure.DropStorePolicy"}
    ours = OURS | {"server": str(server.address), "backpressure": slow} | PATIENT
    with tiering(engine_config(model, [ours])) as steps:
        context, runs = steps.context(), [chunk_keys(prompt, 2) for prompt in range(20, 24)]
        for keys in runs:
            steps.store(context, keys)
            steps.settle()
        assert counted(steps.tier) == {"stored": 4}
        assert steps.tier.bp_detector.policy.pop_stores_dropped() == (2, 4)
        steps.manager.on_request_finished(context)


def test_a_reset_of_vllms_caches_leaves_nothing_for_what_may_have_other_weights(both):
    keys = chunk_keys(5, 2)
    assert both.move(both.ours, keys, 0, load=False).success
    both.ours.drain_jobs()
    assert both.held(both.ours, keys) == ["MISS"] * 2
    assert both.move(both.ours, keys, 0, load=False).success
    both.ours.on_request_finished(SimpleNamespace(req_id="r"))
    assert both.held(both.ours, keys) == ["HIT"] * 2


def test_an_unknown_key_is_refused_by_its_name(model, server, tmp_path):
    for given, words in (({"ram": 1}, "ram in secondary_tiers"), ({"server": "x"}, "server")):
        with pytest.raises(ConfigError, match=words):
            Both(model, OURS | {"server": str(server.address)} | given, {})


def test_a_vllm_that_was_not_tested_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(entry, "running", lambda: "0.34.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0: KVTierTier is tested with 0\.32 and"):
        _ = entry.KVTierTier


def test_nothing_is_held_of_a_server_that_is_not_there(model, tmp_path):
    ours = OURS | {"server": f"unix://{tmp_path}/none.sock", "load_timeout_ms": 300}
    both = Both(model, ours, {"type": "fs", "root_dir": str(tmp_path)})
    keys = chunk_keys(6, 2)
    assert both.held(both.ours, keys) == ["MISS"] * 2
    assert not both.move(both.ours, keys, 0, load=False).success
    both.each(lambda tier: tier.shutdown())
