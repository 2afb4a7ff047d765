"""The first prompt after a restart is served as the second one is: vLLM's own Scheduler over real
tiers, with the policy that users have. The model is pretended: a token takes it a millisecond."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.nvme.learnt import read_learnt
from tests.child_process import wait_for
from tests.redis_server import RedisServer
from tests.s3_server import URL, S3Server, operated
from tests.server_process import serving
from tests.unit.real_scheduler import BLOCK, Core

pytestmark = pytest.mark.vllm

CHUNKS, SLOT = 40, 4096
PROMPT = [*range(100, 100 + CHUNKS * BLOCK + 1)]
"""A chunk is a block. One token has to be computed."""
TOKEN_S = 1e-3
HOLDS, THIRD, EIGHTH = 48, 13, 5
"""Slots of a RAM beside a prompt of 40 chunks."""
FORK = multiprocessing.get_context("fork")

Place = Callable[[int], Mapping[str, Any]]
"""An engine's settings, given its slots."""


def engine(model: Path, settings: Mapping[str, Any], **more: Any) -> Core:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {"chunk_tokens": BLOCK, "log_level": "ERROR"} | settings
        return Core(model, own, **{"token_s": TOKEN_S} | more)


def ask(core: Core, name: str = "one", tokens: list[int] = PROMPT) -> int:
    """Tokens of the request that were loaded."""
    assert core.scheduler.reset_prefix_cache()
    core.add(core.request(name, [*tokens]))
    sources: dict[str, int] = {}

    def ended() -> bool:
        core.step()
        request = core.scheduler.requests.get(name)
        if request is not None:
            sources.update(core.connector._scheduler.sources(request))
        return request is None

    before = core.computed
    wait_for(ended, "an answer")
    assert core.computed - before == len(tokens) - sum(sources.values()), sources
    return sum(sources.values())


def life(model: Path, settings: Mapping[str, Any], prompts: int = 1) -> None:
    """An engine that computes, has written everything to its lowest tier, and is killed."""

    def lived() -> None:
        core = engine(model, settings)
        store = core.connector._scheduler.store
        for number in range(prompts):
            ask(core, f"{number}", [token + number for token in PROMPT])
        stored = CHUNKS * prompts

        def written() -> bool:
            stats = store.stats()
            return any(
                count >= stored for name, count in stats.items() if name.endswith("_stored")
            )

        wait_for(written, "written")
        if prompts > 1 and "nvme_path" in settings:
            folder = Path(settings["nvme_path"])
            wait_for(lambda: core.step() and bool(read_learnt(folder).engines), "remembered")
        os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=lived)
    child.start()
    child.join(120.0)
    assert child.exitcode == -signal.SIGKILL


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """As many processes that spin as there are cores."""

    def spin() -> None:
        while True:
            pass

    spinning = [FORK.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for each in spinning:
        each.start()
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.join()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Where an engine keeps its chunks, by the name of the tier."""
    name = request.param
    with ExitStack() as stack:
        if name == "nvme":
            own = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 64 * SLOT}
            yield lambda slots: own | {"ram_bytes": slots * SLOT}
        elif name == "redis":
            server = stack.enter_context(RedisServer())
            shared = {"redis_url": server.url, "redis_bytes": "64MiB"}
            yield lambda slots: shared | {"ram_bytes": slots * SLOT}
        elif name == "bucket":
            bucket = stack.enter_context(S3Server())
            stack.enter_context(operated(bucket.environment))
            shared = {"object_url": URL, "object_bytes": "64MiB"}
            yield lambda slots: shared | {"ram_bytes": slots * SLOT}
        else:
            raise AssertionError(name)


MORE = pytest.mark.extended


@pytest.mark.parametrize("busy", [False, True], ids=["", "busy"])
@pytest.mark.parametrize("slots", [HOLDS, THIRD, EIGHTH])
@pytest.mark.parametrize("place", ["nvme", "redis", "bucket"], indirect=True)
def test_the_first_prompt_after_a_restart_is_whole(
    scheduled_model: Path, place: Place, slots: int, busy: bool
) -> None:
    life(scheduled_model, place(HOLDS))
    with busy_neighbours() if busy else ExitStack():
        core = engine(scheduled_model, place(slots))
        assert ask(core) == CHUNKS * BLOCK
        assert ask(core, "second") == CHUNKS * BLOCK
    core.connector.shutdown()


@pytest.mark.parametrize("slots", [HOLDS, THIRD, EIGHTH])
def test_so_it_is_over_a_server_that_was_killed_with_its_engine(
    scheduled_model: Path, tmp_path: Path, slots: int
) -> None:
    disk = {"slot_bytes": SLOT, "nvme_path": str(tmp_path / "nvme"), "nvme_bytes": "2MiB"}
    for ram, hit in ((4 * HOLDS, 0), (slots, CHUNKS * BLOCK)):
        with serving(ram_bytes=ram * SLOT, **disk) as server:
            core = engine(
                scheduled_model, {"server": str(server.address), "server_timeout_ms": 5000}
            )
            store = core.connector._scheduler.store
            wait_for(lambda client=store: client.pool is not None, "attached")
            assert ask(core) == hit
            wait_for(
                lambda client=store: client.stats().get("nvme_held", 0) >= CHUNKS, "written"
            )
            server.kill()
            core.connector.shutdown()


def few_slots(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = (one.getMessage() for one in caplog.records)
    return [*{text for text in found if "are kept and" in text}]


@pytest.mark.parametrize(("slots", "kept"), [(EIGHTH, EIGHTH), (THIRD, THIRD), (HOLDS, CHUNKS)])
def test_ram_with_fewer_slots_than_a_step_finishes_chunks_is_said_at_the_start(
    scheduled_model: Path, caplog: pytest.LogCaptureFixture, slots: int, kept: int
) -> None:
    ours = logging.getLogger("kvtier.connectors.vllm")
    ours.addHandler(caplog.handler)
    own = {"ram_bytes": slots * SLOT, "log_level": "WARNING"}
    core = engine(scheduled_model, own, async_scheduling=False)
    ours.removeHandler(caplog.handler)
    assert ask(core) == 0
    assert ask(core, "again") == kept * BLOCK
    said = few_slots(caplog)
    assert len(said) == (slots < 46)
    if said:
        assert said[0] == (
            f"RAM holds {slots} chunks of 16 tokens, and a step may compute 736 tokens: of a prompt "
            f"that is computed in one step the first {slots} chunks are kept and {46 - slots} are "
            f"not; give ram.bytes room for 46 chunks, or vLLM --max-num-batched-tokens {slots * 16}"
        )
    core.connector.shutdown()
