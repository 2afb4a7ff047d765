"""Stuck backends under a whole store, and hosts out of descriptors: no call waits for them, all
comes back by itself.

What single parts do about it is tested beside them: full and failing disks in
``tests/fault/test_nvme_disks.py``, a Redis that hangs, dies, is full or talks nonsense in
``tests/fault/test_redis_faults.py``, a store that fails in the middle in
``tests/fault/test_object_faults.py``, clients that stall in
``tests/fault/test_hostile_clients.py``, a server that hangs in
``tests/integration/test_server.py``. What it costs a real engine is measured by
``python -m tests.trust.stuck``.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest

from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.extensions.objects import bucket
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.store.store import Store
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.redis.layout import Form
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier
from tests.child_process import DEADLINE_S, wait_for
from tests.clock import Clock
from tests.mounts import mounted
from tests.nvme_place import room
from tests.redis_server import RedisServer, impatient
from tests.s3_server import FORM, URL, S3Server, operated
from tests.server_process import (
    SLOT,
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    save,
    short_folder,
)
from tests.tier_chunks import NAMESPACE
from tests.trust.crash import TIGHT, descriptors, settings
from tests.trust.tier_faults import SERVER_FAULTS, Passage, hanging_disk, nothing_more_to_open
from tests.trust.victims import Engine

TIMEOUT_S = 0.3
"""Of a call to a stuck Redis, and half of one to a bucket."""
ROUNDS, SOON_S = 60, 20.0
"""All verbs of :func:`use` together would take far more than this if each waited for one call."""
SLOTS = 12
HOT, COLD = run(1, 2), run(2, 3)


def use(store):
    """Every verb, many times. AssertionError when they do not come to an end. ``HOT`` stays in RAM
    and is served."""
    lane = Lane("engine", 1, urgent_bound=1, bound=1)
    served: list[int] = []

    def verbs():
        for turn in range(ROUNDS):
            store.lookup(COLD)
            store.load(COLD).close()
            store.decline(COLD, "slower")
            save(store, run(100 + turn % 3, 1))
            store.invalidate(run(100 + turn % 3, 1))
            with store.load(HOT) as lease:
                served.append(lease.poll().ready)

    lane.submit(verbs)
    assert lane.close(SOON_S), "a verb waits for what is stuck"
    assert served == [len(HOT)] * ROUNDS, "what is in RAM is served at once"


def push_out(store):
    """Leave ``COLD`` to the lower tier, and ``HOT`` in RAM."""
    for keys in (COLD, *(run(prompt, 2) for prompt in range(200, 200 + SLOTS // 2)), HOT):
        save(store, keys)
        wait_for(lambda keys=keys: store.lookup_by_tier(keys)[1] == len(keys), "it is written")
    assert store.lookup_by_tier(COLD) == [0, len(COLD)]


def asked(store):
    """Give a shared tier something to do: look for what nobody knows of."""
    store.load(run(999, 1)).close()
    return True


@pytest.mark.redis
@pytest.mark.parametrize("fault", SERVER_FAULTS.values(), ids=SERVER_FAULTS)
def test_no_call_waits_for_a_stuck_redis_and_it_is_used_again(fault):
    clock = Clock()
    with RedisServer() as redis:
        passage = Passage(redis.port)
        servers = RedisServers(
            f"redis://127.0.0.1:{passage.port}", connections=2, timeout_s=DEADLINE_S
        )
        tier = RedisTier(servers, Form("kvtier", NAMESPACE), 1 << 20, SLOT, clock=clock)
        goes_on_and_comes_back(tier, clock, impatient(servers, TIMEOUT_S), fault(redis, passage))
        passage.close()


@contextmanager
def hasty(tier):
    """Its calls have little time for as long as the context lasts."""
    before = tier._store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "_ANSWER_S", 2 * TIMEOUT_S)
        tier._store = short = bucket.Bucket(URL, SLOT)
    try:
        yield
    finally:
        tier._store = before
        short.close()


@pytest.mark.whole  # it needs moto
@pytest.mark.parametrize("name", ["paused", "1 byte/s", "dead"])
def test_no_call_waits_for_a_stuck_bucket_and_it_is_used_again(name):
    """Where it flaps, the second try of a request succeeds, and no breaker has to open."""
    clock = Clock()
    with S3Server() as server:
        passage = Passage(server.port)
        there = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{passage.port}"}
        with operated(server.environment | there):
            tier = ObjectTier(bucket.Bucket(URL, SLOT), FORM, 1 << 20, SLOT, clock)
            goes_on_and_comes_back(tier, clock, hasty(tier), SERVER_FAULTS[name](server, passage))
        passage.close()


def goes_on_and_comes_back(tier, clock, *faults):
    store = Store(Pool(SLOTS, SLOT), [(tier, Lane(tier.name, 2, urgent_bound=16, bound=16))])
    push_out(store)
    with ExitStack() as stuck:
        for fault in faults:
            stuck.enter_context(fault)
        use(store)
        wait_for(lambda: asked(store) and tier.counts["breaker_trips"] > 0, "the breaker opens")

    def back():
        clock.now += 1.0
        save(store, COLD[:1])
        return bool(load(store, COLD)) and not tier.open_breakers

    wait_for(back, "it is used again")
    at_rest(store)
    assert store.close()


def test_no_call_waits_for_a_stuck_disk_and_it_is_used_again(tmp_path):
    with hanging_disk() as disk:
        tier = DiskSet([DiskPlace(tmp_path / "nvme", room(32), 2)], SLOT)
        store = Store(Pool(SLOTS, SLOT), [(tier, Lane("nvme", 2, urgent_bound=4, bound=4))])
        push_out(store)
        with disk.hangs():
            use(store)
            with store.load(COLD) as lease:
                assert lease.poll().ready == 0
        wait_for(lambda: len(load(store, COLD)) == len(COLD), "the disk is used again")
        at_rest(store)
        assert store.close()


@pytest.fixture
def freezable(tmp_path):
    """A file system on a loop device, whose writes ``fsfreeze`` can stop."""
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a file system needs root and mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
        yield disk


def test_engines_go_on_while_their_servers_disk_is_frozen(freezable):
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        server = stack.enter_context(
            ServerProcess(folder, nvme_path=freezable / "nvme", nvme_bytes=TIGHT)
        )
        engine = Engine(server.socket, 1)
        engine.hear_until(b"h")
        with frozen(freezable), attached(server.access()) as client:
            for _ in range(20):
                engine.hear_until(b"c")
            for keys in (run(prompt, 2) for prompt in range(500, 530)):
                wait_for(lambda keys=keys: goes_on(client, keys), "RAM goes on")
        engine.hear_until(b"h")
        engine.kill()
        with attached(server.access()) as client:
            fresh = (run(prompt, 2) for prompt in count(600))
            wait_for(  # a save tries the disk again
                lambda: goes_on(client, next(fresh)) and client.stats()["nvme_held"] > 0,
                "the disk is there again",
            )
            at_rest(client)
        assert server.stop() == 0


def goes_on(client, keys):
    """Whether RAM serves what was just saved. The engine beside it may have taken the slots."""
    save(client, keys)
    with client.load(keys) as lease:
        return lease.ready == len(keys)


@contextmanager
def frozen(disk):
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


# ---- out of descriptors --------------------------------------------------------------------------


def test_a_server_out_of_descriptors_serves_those_it_has_and_then_the_others():
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        server = stack.enter_context(
            ServerProcess(folder, nvme_path=folder / "nvme", nvme_bytes=TIGHT)
        )
        with attached(server.access()) as client:
            save(client, run(1, 3))
            with nothing_more_to_open(server.pid):
                late = Engine(server.socket, 1)
                wait_for(lambda: "cannot accept" in server.said(), "it says what is wrong")
                for prompt in range(30):
                    save(client, run(prompt, 3))
                    assert len(load(client, run(prompt, 3))) == 3
            late.hear_until(b"h")
            late.kill()
            at_rest(client)


def test_an_engine_out_of_descriptors_comes_back_to_its_server_and_keeps_none():
    with short_folder() as folder, ServerProcess(folder) as server:
        engine = Engine(server.socket, 1)
        engine.hear_until(b"h")
        before = len(descriptors(engine.pid))
        server.kill()
        engine.hear_until(b"m")
        with nothing_more_to_open(engine.pid):
            server.start()
            engine.hear(1000)
        engine.hear_until(b"h")
        assert len(descriptors(engine.pid)) <= before, "each attempt keeps something"
        engine.kill()


@pytest.mark.redis
def test_a_store_out_of_descriptors_goes_on_without_redis_and_gets_it_back():
    with short_folder() as folder, RedisServer() as redis:
        engine = Engine(settings(folder, redis), 1)
        engine.hear_until(b"h")
        redis.kill()
        engine.hear(500)  # it has noticed, and let go of its connections
        with nothing_more_to_open(engine.pid):
            redis.start()
            engine.hear(2000)
            engine.hear_until(b"h")
        with redis.admin() as admin:
            while admin.dbsize() < 2:  # a sign, and a chunk
                engine.hear(100)
        engine.hear_until(b"h")
        engine.kill()
