"""Engines and servers killed with -9 at random points under load: nothing leaks, no wrong byte,
nobody else stops."""

import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.core.lookup import Progress
from tests.child_process import wait_for
from tests.engine_process import LONGEST, PROMPTS
from tests.server_process import (
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    save,
    serving,
    short_folder,
)
from tests.trust.victims import Engine

NVME = 1 << 20
TIGHT = 400 << 10
"""Less than what all engines save together."""
_BUSY = 40


@contextmanager
def churning(server, *seeds):
    engines = [Engine(server.socket, seed) for seed in seeds]
    try:
        for engine in engines:
            engine.hear(_BUSY)
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def every_prompt():
    return [run(prompt, LONGEST) for prompt in range(PROMPTS)]


def every_byte_is_right(client):
    for keys in every_prompt():
        load(client, keys)


@pytest.mark.parametrize("nvme", [False, True], ids=["ram", "nvme"])
def test_engines_killed_at_random_points_leave_nothing_behind(nvme):
    draw = random.Random(1)
    with short_folder() as folder:
        more: dict[str, Any] = {"nvme_path": folder / "nvme", "nvme_bytes": TIGHT} if nvme else {}
        with ServerProcess(folder, **more) as server, attached(server.access()) as client:
            with churning(server, 1) as (witness,):
                for round_ in range(12):
                    victims = [
                        Engine(server.socket, 100 + 2 * round_ + which) for which in range(2)
                    ]
                    for victim in victims:
                        victim.hear(draw.randint(1, 3 * _BUSY))
                    for victim in victims:
                        victim.kill()
                    witness.hear_until(b"h")
                    client.check()
            at_rest(client)
            every_byte_is_right(client)
            assert client.stats()["ram_filling"] == 0


def test_a_worker_that_outlives_its_scheduler_keeps_its_slots_until_it_ends():
    with serving() as server, attached(server.access()) as client:
        words = [sys.executable, "-m", "tests.engine_process", "hold", str(server.socket)]
        engine = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert engine.stdout is not None
        worker = int(engine.stdout.readline())
        try:
            assert client.stats()["ram_filling"] == 4
            engine.kill()
            engine.wait()
            engine.stdout.close()
            for prompt in range(30):
                save(client, run(prompt, 5))
                assert load(client, run(prompt, 5)) == ["ram"] * 5
            assert client.stats()["ram_filling"] == 4, "the worker still writes into these"
        finally:
            os.kill(worker, signal.SIGKILL)
        at_rest(client)
        assert client.lookup(run(1000, 4)).progress == Progress(0, 0), (
            "a half-filled chunk is never served"
        )
        assert client.stats()["ram_filling"] == 0


def test_an_engine_that_loses_its_connection_keeps_its_slots_until_it_lets_go():
    with (
        serving() as server,
        attached(server.access()) as engine,
        attached(server.access()) as other,
    ):
        save(engine, run(1, 4))
        reading, writing = engine.load(run(1, 4)), engine.save(run(2, 4))
        served = [bytes(view) for view in reading.views()]
        cut(engine)
        for prompt in range(100, 130):
            save(other, run(prompt, 5))
            assert load(other, run(prompt, 5)) == ["ram"] * 5
        assert [bytes(view) for view in reading.views()] == served
        assert other.stats()["ram_filling"] == 4
        writing.commit()
        assert other.lookup(run(2, 4)).progress == Progress(0, 0)
        assert other.stats()["ram_filling"] == 4
        reading.close()
        at_rest(other)
        assert other.stats()["ram_filling"] == 0
        save(engine, run(3, 2))
        assert load(other, run(3, 2)) == ["ram"] * 2


def cut(client):
    link = client._attachment
    assert link is not None
    link._socket.shutdown(socket.SHUT_RDWR)
    assert client.lookup(run(1, 1)).progress == Progress(0, 0)
    wait_for(lambda: client.pool is not None, "attached again")
    assert client.pool is not link.pool


def test_engines_go_on_through_crashes_of_the_server_and_hit_again():
    with short_folder() as folder:
        server = ServerProcess(folder, nvme_path=folder / "nvme", nvme_bytes=NVME)
        with server, churning(server, 1, 2) as engines:
            with attached(server.access()) as client:
                wait_for(lambda: client.stats()["nvme_held"] > 0, "some are on the disk")
            for _ in range(6):
                for engine in engines:
                    engine.hear_until(b"h")
                server.kill()
                for engine in engines:
                    engine.hear_until(b"m")
                server.start()
                with attached(server.access()) as client:
                    assert any(client.lookup(keys).coming for keys in every_prompt()), "warm"
                for engine in engines:
                    engine.hear_until(b"h")
        with server, attached(server.access()) as client:
            every_byte_is_right(client)
            at_rest(client)


def test_a_rolling_restart_under_load_loses_nothing_that_was_written():
    with short_folder() as folder:
        server = ServerProcess(folder, nvme_path=folder / "nvme", nvme_bytes=NVME)
        with server:
            with attached(server.access()) as client:
                save(client, run(50, 6))
            with churning(server, 1, 2) as engines:
                for _ in range(4):
                    assert server.stop() == 0
                    server.start()
                    for engine in engines:
                        engine.hear_until(b"h")
            with attached(server.access()) as client:
                assert load(client, run(50, 6))
                at_rest(client)
