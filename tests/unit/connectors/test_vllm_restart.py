"""The first prompt after a restart is served as the second one is: vLLM's own Scheduler over real
tiers, with the policy that users have. The model is pretended: a token takes it a millisecond."""

import logging
import multiprocessing
import os
import signal
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.nvme.chunk_folder import ChunkFolder
from kvtier.tiers.nvme.folder import LEARNT_NAME, read_learnt
from tests.child_process import wait_for
from tests.redis_server import RedisServer
from tests.s3_server import URL, S3Server, operated
from tests.server_process import serving
from tests.spinning import spinning
from tests.unit.real_scheduler import BLOCK, Core

pytestmark = pytest.mark.vllm

CHUNKS, SLOT = 40, 4096
PROMPT = [*range(100, 100 + CHUNKS * BLOCK + 1)]
"""A chunk is a block. One token has to be computed."""
TOKEN_S = 1e-3
HOLDS, THIRD, EIGHTH = 48, 13, 5
"""Slots of a RAM beside a prompt of 40 chunks."""
FORK = multiprocessing.get_context("fork")


def engine(model, settings, **more):
    own = {"chunk_tokens": BLOCK, "log_level": "ERROR", **settings}
    return Core(model, own, **{"token_s": TOKEN_S} | more)


def ask(core, name="one", tokens=PROMPT):
    """Tokens of the request that were loaded."""
    assert core.scheduler.reset_prefix_cache()
    core.add(core.request(name, [*tokens]))
    sources: dict[str, int] = {}

    def ended():
        core.step()
        request = core.scheduler.requests.get(name)
        if request is not None:
            sources.update(core.connector._scheduler.sources(request))
        return request is None

    before = core.computed
    wait_for(ended, "an answer")
    assert core.computed - before == len(tokens) - sum(sources.values()), sources
    return sum(sources.values())


def test_a_prompt_of_whole_chunks_is_loaded_but_for_its_last_block(scheduled_model):
    core = engine(scheduled_model, {"ram_bytes": HOLDS * SLOT})
    assert [ask(core, name, PROMPT[:-1]) for name in ("one", "two")] == [0, (CHUNKS - 1) * BLOCK]
    core.connector.shutdown()


def life(model, settings, prompts=1):
    """An engine that computes, has written everything to its lowest tier, and is killed."""

    def lived():
        core = engine(model, settings)
        store = core.connector._scheduler.store
        for number in range(prompts):
            ask(core, f"{number}", [token + number for token in PROMPT])
        stored = CHUNKS * prompts

        def written():
            stats = store.stats()
            return any(count >= stored for name, count in stats.items() if name.endswith("_stored"))

        wait_for(written, "written")
        if prompts > 1 and "nvme_path" in settings:
            folder = Path(settings["nvme_path"])
            wait_for(lambda: core.step() and bool(read_learnt(folder).engines), "remembered")
        os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=lived)
    child.start()
    child.join(120.0)
    assert child.exitcode == -signal.SIGKILL


@pytest.fixture
def place(request, tmp_path):
    """Where an engine keeps its chunks, by the name of the tier."""
    name = request.param
    with ExitStack() as stack:
        if name == "nvme":
            own = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 240 * SLOT}
            yield lambda slots: own | {"ram_bytes": slots * SLOT}
        elif name == "redis":
            server = stack.enter_context(RedisServer())
            shared = {"redis_url": server.url, "redis_bytes": "64MiB"}
            yield lambda slots: shared | {"ram_bytes": slots * SLOT}
        else:
            bucket = stack.enter_context(S3Server())
            stack.enter_context(operated(bucket.environment))
            shared = {"object_url": URL, "object_bytes": "64MiB"}
            yield lambda slots: shared | {"ram_bytes": slots * SLOT}


MORE = pytest.mark.extended


FIRST = [("nvme", EIGHTH, 1, False), ("nvme", THIRD, 3, True), ("redis", EIGHTH, 1, False)]
CASES = [
    (name, slots, prompts, busy)
    for name in ("nvme", "redis", "bucket")
    for slots in (HOLDS, THIRD, EIGHTH)
    for prompts in (1, 3)
    for busy in (False, True)
    if prompts == 1 or name == "nvme"
]


@pytest.mark.parametrize(
    ("place", "slots", "prompts", "busy"),
    [pytest.param(*each, marks=() if each in FIRST else MORE) for each in CASES],
    indirect=["place"],
)
def test_the_first_prompt_after_a_restart_is_whole(scheduled_model, place, slots, prompts, busy):
    """After one prompt nothing was measured. After three the engine's speed is remembered."""
    life(scheduled_model, place(prompts * HOLDS), prompts)
    with spinning() if busy else nullcontext():
        core = engine(scheduled_model, place(slots))
        assert ask(core) == CHUNKS * BLOCK
        assert ask(core, "second") == CHUNKS * BLOCK
    core.connector.shutdown()


def attached(store):
    return store.pool is not None


def written(store):
    return store.stats().get("nvme_held", 0) >= CHUNKS


@pytest.mark.parametrize(
    "slots", [EIGHTH, *(pytest.param(one, marks=MORE) for one in (THIRD, HOLDS))]
)
def test_so_it_is_over_a_server_that_was_killed_with_its_engine(scheduled_model, tmp_path, slots):
    disk: dict[str, Any] = {
        "slot_bytes": SLOT,
        "nvme_path": str(tmp_path / "nvme"),
        "nvme_bytes": "2MiB",
    }
    for ram, hit in ((4 * HOLDS, 0), (slots, CHUNKS * BLOCK)):
        with serving(ram_bytes=ram * SLOT, **disk) as server:
            core = engine(
                scheduled_model, {"server": str(server.address), "server_timeout_ms": 5000}
            )
            store = core.connector._scheduler.store
            wait_for(partial(attached, store), "attached")
            assert ask(core) == hit
            wait_for(partial(written, store), "written")
            server.kill()
            core.connector.shutdown()


@pytest.mark.parametrize(("slots", "kept"), [(EIGHTH, EIGHTH), (THIRD, THIRD), (HOLDS, CHUNKS)])
def test_ram_with_fewer_slots_than_a_step_finishes_chunks_is_said_at_the_start(
    scheduled_model, caplog, slots, kept
):
    from kvtier.connectors.vllm.layout import few_slots

    ours = logging.getLogger("kvtier.connectors.vllm")
    ours.addHandler(caplog.handler)
    own = {"ram_bytes": slots * SLOT, "log_level": "WARNING"}
    core = engine(scheduled_model, own, async_scheduling=False)
    ours.removeHandler(caplog.handler)
    assert ask(core) == 0
    assert ask(core, "again") == kept * BLOCK
    said = few_slots(slots, BLOCK, 736)  # the longest prompt is shorter than the longest step
    assert bool(said) == (slots < 736 // BLOCK) == ("are kept and" in caplog.text)
    assert said in caplog.text
    core.connector.shutdown()


def test_the_line_says_what_is_lost_and_what_to_give():
    from kvtier.connectors.vllm.layout import few_slots

    assert few_slots(4, 128, 2048) == (
        "RAM holds 4 chunks of 128 tokens, and a step may compute 2,048 tokens: of a prompt that "
        "is computed in one step the first 4 chunks are kept and 12 are not; give ram.bytes room "
        "for 16 chunks, or vLLM --max-num-batched-tokens 512"
    )
    assert few_slots(16, 128, 2048) == few_slots(0, 128, 2048) == "", "a server says it later"


def slow_disk(monkeypatch, read_s):
    read = ChunkFolder.read

    def slow(self, key, into):
        time.sleep(read_s)
        return read(self, key, into)

    monkeypatch.setattr(ChunkFolder, "read", slow)


@pytest.mark.parametrize("slots", [HOLDS, EIGHTH])
@pytest.mark.parametrize("place", ["nvme"], indirect=True)
def test_a_wrong_guess_costs_one_prompt_and_the_next_start_remembers(
    scheduled_model, place, slots, monkeypatch
):
    """A throttled disk under a fast engine: all of a prompt is computed in a tenth of the time that
    loading it takes."""
    fast, docs = {"token_s": 1e-4}, [[token + doc for token in PROMPT] for doc in range(4)]
    life(scheduled_model, place(4 * HOLDS), 4)
    (Path(place(slots)["nvme_path"]) / LEARNT_NAME).unlink()
    slow_disk(monkeypatch, 0.08)
    core = engine(scheduled_model, place(slots), **fast)
    loaded = [ask(core, f"{number}", doc) for number, doc in enumerate(docs)]
    assert loaded == [CHUNKS * BLOCK, 0, 0, 0]
    folder = Path(place(slots)["nvme_path"])
    wait_for(lambda: core.step() and bool(read_learnt(folder).engines), "remembered")
    core.connector.shutdown()
    core = engine(scheduled_model, place(slots), **fast)
    pace = core.connector._scheduler.store.lower[0].pace
    wait_for(lambda: pace.read_s is not None, "measured")
    assert ask(core, "first", docs[0]) == 0
    core.connector.shutdown()
