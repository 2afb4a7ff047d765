"""Which questions the comparison asks of an arm, of which engine, and when: with an engine that
only takes notes."""

import argparse
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from kvtier.bench.compare import rounds
from kvtier.bench.compare.peers.contenders import CONTENDERS
from kvtier.bench.processes.servers import ServerError
from kvtier.bench.requests import client as bench_client
from kvtier.bench.requests.client import Outcome
from kvtier.bench.requests.prompts import Ask

ARGUMENTS = argparse.Namespace(num_documents=3, document_length=64, question_length=8, output_len=4)
CALLS = '{{"at": {}, "calls": {{"start_load_kv": 0.25}}, "look_ups": [0.5]}}\n'


class Notes:
    """A server and its client in one. ``events`` is shared by an arm's two servers."""

    def __init__(self, name, events, file):
        self.name, self.events, self.file = name, events, file
        self.base_url, self.pid = name, os.getpid()
        self.asked: list[Ask] = []
        self.broken = False

    def start(self):
        self.events.append(f"{self.name} starts")
        if self.broken:
            raise ServerError("no port is free")

    def stop(self):
        self.events.append(f"{self.name} stops")

    def run(self, asks, inflight, on_done):
        assert inflight == 1
        outcomes = []
        for ask in asks:
            self.asked.append(ask)
            with self.file.open("a") as file:
                file.write(CALLS.format(time.perf_counter()))
            on_done()
            told = (ask.document, ask.question, ask.is_miss, 0.0, 0.1, 1.0, True, 72, 1, 64)
            outcomes.append(Outcome(*told))
        self.events.append(f"{self.name} answers {len(asks)}")
        return outcomes


@pytest.fixture
def arm(tmp_path, monkeypatch):
    """``arm(name)`` makes what serves. Its servers are the clients too."""
    served: dict[str, Notes] = {}
    monkeypatch.setattr(rounds, "_SETTLE_S", 0.0)
    monkeypatch.setattr(rounds, "_REST_S", 0.0)
    monkeypatch.setattr(bench_client, "connect", lambda url, *_: (served[url], range(100, 2000)))

    def make(name):
        events: list[str] = []
        first, second = (Notes(one, events, tmp_path / one) for one in ("first", "second"))
        served.update(first=first, second=second)
        made: Any = (CONTENDERS[name], first, second, None, tmp_path / "first")
        return rounds.Serving(*made)

    return make


def run(serving, *, last=True):
    return rounds.measured(ARGUMENTS, serving, last)


def test_a_second_engine_asks_while_the_first_runs_and_before_it_is_restarted(arm):
    serving = arm("kvtier-server")
    found = run(serving)
    events = ["second starts", "second answers 3", "second stops"]
    assert serving.server.events[-6:] == [*events, "first stops", "first starts", "first answers 3"]
    assert found.second is not None and found.restart is not None
    assert [one.document for one in found.second.outcomes] == [0, 1, 2]
    asked = [tuple(ask.prompt) for ask in (*serving.server.asked, *serving.second.asked)]
    assert len(set(asked)) == len(asked), "questions of different rounds are different ones"


def test_a_second_engine_that_does_not_start_is_the_arms_failure_and_is_stopped(arm):
    serving = arm("lmcache-redis")
    serving.second.broken = True
    found = run(serving)
    assert found.second is not None and found.second.error == "no port is free"
    assert "second stops" in serving.server.events and found.restart is not None
    assert [one.ttft for one in found.restart.outcomes] == [0.1] * 3


def test_every_ask_of_the_pairs_has_its_cpu_time_and_its_calls(arm, tmp_path):
    found = run(arm("kvtier-ram"), last=False)
    assert [one.document for one in found.pairs[::2]] == [0, 1, 2] * 12
    assert [one.document for one in found.pairs[1::2]] == [0, 1, 2] * 12
    assert (len(found.pair_efforts), len(found.fill_efforts), found.fill_tokens) == (72, 3, 216)
    for one in (*found.pair_efforts, *found.fill_efforts):
        assert one.calls == {"start_load_kv": 0.25} and one.look_up_s == 0.5
        assert one.cpu_s is not None and one.cpu_s >= 0
    silent = arm("kvtier-ram")
    (tmp_path / "first").unlink()
    silent.server.file = tmp_path / "elsewhere"
    (effort, *_) = run(silent, last=False).pair_efforts
    assert effort.calls is None and effort.look_up_s is None and effort.cpu_s is not None


def test_cpu_time_is_that_of_a_process_and_its_descendants():
    told = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(told, stdout=subprocess.PIPE, start_new_session=True) as shell:
        try:
            assert shell.stdout is not None
            child = int(shell.stdout.readline())
            assert {os.getpid(), shell.pid, child} <= rounds.family([os.getpid()])
            before, began = rounds.cpu_seconds([os.getpid(), child]), time.process_time()
            while time.process_time() < began + 0.02:
                pass
            after = rounds.cpu_seconds([os.getpid(), child])
            assert before is not None and after is not None and after - before >= 0.02
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert rounds.cpu_seconds([os.getpid(), shell.pid]) is None
