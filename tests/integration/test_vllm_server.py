"""Real vLLM engines over one server: the second hits what the first saved, and nobody's crash is
anybody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from kvtier.client.client import Client
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import RefusedSize
from tests.child_process import wait_for
from tests.engine_python import engine_python
from tests.integration.conftest import EVERY_MODE, in_modes
from tests.integration.engine_modes import TOLD, V1, Mode
from tests.integration.transfer import EVERY_HIT
from tests.server_process import (
    ForkedServer,
    ServerProcess,
    at_rest,
    attached,
    serving,
    short_folder,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("patient")]

ROOT = Path(__file__).parents[2]
START_S = 300.0
HIT = 512
CHUNK = 64
RAM = "64MiB"


class LedEngine:
    """tests.integration.served_engine in a mode, one round at a time."""

    def __init__(
        self, server: ServerProcess, folder: Path, model: Path, mode: Mode, ranks: int = 1
    ) -> None:
        self._out = folder / "answers.json"
        self._log = folder / "engine.log"
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVTIER_", "LMCACHE_"))
        }
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {
            "WITH_KVTIER": "1",
            "KVTIER_SERVER": str(server.address),
            "KVTIER_CHUNK_TOKENS": "64",
            TOLD: str(folder / "told"),
            **mode.environment(),
        }
        # The tests ask what is served, not how fast: two ranks and a server on two cores keep each
        # other waiting.
        environment[EVERY_HIT] = "1"
        environment["KVTIER_SERVER_TIMEOUT_MS"] = "5000"
        if ranks > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        else:  # its front end, core and worker are one process: that is up in a third of the time
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        command = [
            engine_python(),
            "-m",
            "tests.integration.served_engine",
            str(self._out),
            str(model),
            str(ranks),
        ]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("a") as log:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                **pipes,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        self._hear("ready")
        mode.check(folder / "told")

    def round(self) -> list[dict[str, Any]]:
        """Ask all documents once. Returns the answers."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._hear("round")
        answers: list[dict[str, Any]] = json.loads(self._out.read_text())[-1]
        return answers

    def begin_round(self) -> None:
        """Ask, and do not wait for the answers."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    def wait_attached_again(self) -> None:
        """Return once its client has reconnected, which it logs. The first connection it does
        not."""
        wait_for(lambda: "attached to the server" in self.said(), "attached again")

    def kill(self) -> None:
        """SIGKILL to the engine's main process and all that belong to it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == f"{word}\n", self.said()[-6000:]


@contextmanager
def engine(
    server: ServerProcess, folder: Path, model: Path, mode: Mode, ranks: int = 1
) -> Iterator[LedEngine]:
    folder.mkdir()
    led = LedEngine(server, folder, model, mode, ranks)
    try:
        yield led
    finally:
        led.kill()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


def hits(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


@contextmanager
def beside(server: ServerProcess) -> Iterator[Client]:
    """A client of the engines' size class."""
    with pytest.raises(RefusedSize) as refusal:
        Client(server.access(ChunkLayout(bytes(32), 1, 1, (2 << 30,))))  # which no server keeps
    layout = ChunkLayout(bytes(32), 1, 1, (refusal.value.kept[0],))
    with attached(server.access(layout)) as client:
        yield client


@EVERY_MODE
def test_a_second_engine_hits_what_the_first_saved(model: Path, mode: Mode, tmp_path: Path) -> None:
    with serving(ram_bytes=RAM) as server:
        with engine(server, tmp_path / "one", model, mode) as one:
            first, second = one.round(), one.round()
        assert (hits(first), hits(second)) == ([0] * 3, [HIT] * 3)
        with engine(server, tmp_path / "two", model, mode) as two:
            third = two.round()
        assert hits(third) == [HIT] * 3
        assert (
            [a["tokens"] for a in third]
            == [a["tokens"] for a in second]
            == [a["tokens"] for a in first]
        )
        assert [a["logprobs"] for a in third] == [a["logprobs"] for a in second]


@in_modes(extended=(V1,))
def test_two_ranks_map_the_server_s_pool_and_survive_its_crash(
    model: Path, mode: Mode, tmp_path: Path
) -> None:
    with (
        serving(ram_bytes=RAM) as server,
        engine(server, tmp_path / "one", model, mode, ranks=2) as one,
    ):
        first, second = one.round(), one.round()
        assert (hits(first), hits(second)) == ([0] * 3, [HIT] * 3)
        server.kill()
        without = one.round()
        server.start()
        one.wait_attached_again()
        again, after = one.round(), one.round()
        said = server.said() + one.said()
    assert (hits(without), hits(again)) == ([0] * 3, [0] * 3), "its memory was RAM only"
    assert hits(after) == [HIT] * 3, said
    for answers in (second, without, again, after):
        assert [a["tokens"] for a in answers] == [a["tokens"] for a in first]


@in_modes(extended=(V1,))
def test_an_engine_goes_on_through_a_crash_of_the_server_and_hits_again(
    model: Path, mode: Mode, tmp_path: Path
) -> None:
    with short_folder() as folder:
        server = ForkedServer(folder, ram_bytes=RAM, nvme_path=folder / "nvme", nvme_bytes=RAM)
        with server, engine(server, tmp_path / "one", model, mode) as one:
            first, second = one.round(), one.round()
            with beside(server) as client:
                wait_for(
                    lambda: client.stats().get("nvme_stored", 0) >= 3 * HIT // CHUNK, "written"
                )
            server.kill()
            without = one.round()
            server.start()
            one.wait_attached_again()
            after = one.round()
            said = server.said() + one.said()
        for answers in (second, without, after):
            assert [a["tokens"] for a in answers] == [a["tokens"] for a in first]
        assert (hits(second), hits(without)) == ([HIT] * 3, [0] * 3)
        assert hits(after) == [HIT] * 3, said


@in_modes(extended=(V1,))
def test_an_engine_killed_at_work_leaves_nothing_behind(
    model: Path, mode: Mode, tmp_path: Path
) -> None:
    with serving(ram_bytes=RAM) as server:
        with engine(server, tmp_path / "one", model, mode) as one:
            first = one.round()
            one.begin_round()
        with engine(server, tmp_path / "two", model, mode) as two:
            again = two.round()
            assert hits(again) == [HIT] * 3
            assert [a["tokens"] for a in again] == [a["tokens"] for a in first]
        assert "dropped" not in server.said()
        with beside(server) as client:
            at_rest(client)
