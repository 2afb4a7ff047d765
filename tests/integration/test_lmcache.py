"""The real LMCache (in an environment of its own) over a kvtier server, by its own remote storage
plug-in interface."""

import json
import subprocess
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.core.chunk import ChunkLayout
from tests.child_process import wait_for
from tests.command import bare
from tests.server_process import attached, serving

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "lmcache-0.5.6" / "bin" / "python"
CHUNK = 64
LENGTH = 3 * CHUNK + 20
"""Three whole chunks and a shorter one."""
CHUNK_BYTES = 4096 + 2 * 2 * CHUNK * 32 * 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.parents[1] / "ready").exists(), reason="lmcache is not installed: make peers"
    ),
]


def settings_of(**ours):
    """An LMCache file (JSON is YAML) with these of kvtier's keys."""
    extra = {"module_path": "kvtier.connectors.lmcache.plugin", "class_name": "KVTier"} | ours
    return {
        "chunk_size": CHUNK,
        "local_cpu": False,  # nothing is served from LMCache's own memory
        "max_local_cpu_size": 0.05,
        "remote_storage_plugins": ["kvtier"],
        "extra_config": {
            f"remote_storage_plugin.kvtier.{key}": value for key, value in extra.items()
        },
    }


def clean_environment():
    return bare(PYTHONHASHSEED=0, LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER=1)


class Process:
    def __init__(self, log):
        self._log = log
        command = [str(PYTHON), "-m", "tests.integration.lmcache_engine"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with log.open("w") as out:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                command, cwd=ROOT, env=clean_environment(), **pipes, stderr=out, text=True
            )

    def ask(self, *words):
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(self.said()[-6000:])

    def said(self):
        return self._log.read_text()

    def close(self):
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Engine:
    """One LMCache engine in a process. ``settings``: kvtier's, in LMCache's file."""

    def __init__(self, process, folder, **settings):
        self._process = process
        self._name = folder.name
        self._said = len(process.said())
        folder.mkdir()
        (folder / "lmcache.yaml").write_text(
            json.dumps(settings_of(**settings) | {"save_unfull_chunk": True})
        )
        process.ask("start", self._name, folder / "lmcache.yaml")

    def store(self, seed):
        self._process.ask("store", self._name, seed, LENGTH)

    def stored(self, seed):
        self.store(seed)
        assert self._process.ask("hold", self._name, seed, LENGTH) == {"found": LENGTH}, self.said()

    def load(self, seed):
        """Tokens found, tokens retrieved, and whether every byte of them is right."""
        answer = self._process.ask("load", self._name, seed, LENGTH)
        return answer["found"], answer["retrieved"], answer["equal"]

    def counts(self):
        return self._process.ask("counts", self._name)

    def give_up(self, seed):
        return self._process.ask("give_up", self._name, seed, LENGTH)

    def said(self):
        return self._process.said()[self._said :]

    def close(self):
        self._process.ask("close", self._name)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lmcache")
    with ExitStack() as ends:
        both = [Process(folder / name) for name in ("one.log", "two.log")]
        for process in both:
            ends.callback(process.close)
        yield both


@pytest.fixture
def engines(processes, tmp_path):
    """Makes engines, in the processes by turns. Closes them."""
    with ExitStack() as ends:
        turn = cycle(processes)

        def start(**settings):
            name = f"{tmp_path.name}-{len(list(tmp_path.iterdir()))}"
            engine = Engine(next(turn), tmp_path / name, **settings)
            ends.callback(engine.close)
            return engine

        yield start


def near(server):
    return {"server": str(server.address), "server_timeout_ms": 5000}


def test_a_second_engine_hits_what_the_first_stored_and_every_byte_is_right(engines):
    with serving(ram_bytes="8MiB") as server:
        one, two = engines(**near(server)), engines(**near(server))
        assert one.load(1) == (0, 0, True)
        one.stored(1)
        one.stored(2)
        for engine in (two, one):
            assert engine.load(1) == (LENGTH, LENGTH, True)
            assert engine.load(2) == (LENGTH, LENGTH, True)
            assert engine.load(3) == (0, 0, True)
        assert two.counts()["loaded"] == 8, two.said()


def test_a_dead_server_means_misses_and_a_new_one_hits_again(engines):
    with serving(ram_bytes="8MiB") as server:
        one = engines(**near(server))
        one.stored(1)
        server.kill()
        assert one.load(1) == (0, 0, True)
        one.store(2)
        assert one.load(2) == (0, 0, True)
        server.start()
        wait_for(lambda: "attached to the server" in one.said(), "attached again")
        assert one.load(1) == (0, 0, True)
        one.stored(1)
        assert one.load(1) == (LENGTH, LENGTH, True)
        assert "Traceback" not in one.said()


def test_a_wrong_byte_is_a_miss_and_is_forgotten(engines):
    with serving(ram_bytes="8MiB") as server:
        one = engines(**near(server))
        one.stored(1)
        with attached(server.access(ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)))) as client:
            slots = [client.pool.view(number) for number in range(client.pool.slots)]
            held = [slot for slot in slots if bytes(slot[:6]) == b"kvtier"]
            np.frombuffer(held[0], np.uint8)[5000] ^= 1
        found, retrieved, equal = one.load(1)
        assert (found, equal) == (LENGTH, True) and retrieved < LENGTH and not retrieved % CHUNK
        assert one.counts()["corrupt"] == 1
        one.stored(1)
        assert one.load(1) == (LENGTH, LENGTH, True)


def test_what_lmcache_gives_up_waiting_for_is_given_back(engines):
    with serving(ram_bytes="8MiB") as server:
        one = engines(**near(server))
        one.stored(1)
        told = one.give_up(1)
        assert told["before"] == told["after"]
        assert "garbage collected" not in one.said(), "LMCache had to free it"
        assert told["meanwhile"] == told["before"][1] + 1, "the put holds its memory"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "server is missing"),
        ({"server": "unix:///x", "ram_bytes": 1}, "unknown key remote_storage_plugin.kvtier."),
    ],
)
def test_a_wrong_setting_is_said_and_the_engine_goes_on(engines, settings, words):
    one = engines(**settings)
    assert one.counts() == {"made": False}
    assert words in one.said()
    assert one.load(1) == (0, 0, True)
