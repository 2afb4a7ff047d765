"""KVStore: Store, Client and Hosts are one, with the same two leases, whoever has the chunks."""

import asyncio
import inspect
import os
from typing import cast

import pytest

from kvtier.api import KVStore, LoadLease, SaveLease
from kvtier.client.attachment import SharedPool
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.client.hosts import Hosts
from kvtier.config.load import load as load_config
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, StateError
from kvtier.core.lookup import NO_LOOKUP, Progress
from kvtier.core.pool import Pool, make_region
from kvtier.core.steps import whole
from kvtier.eviction.hints import Hint
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.loop_server import served
from tests.server_process import attached, save

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "test"}), 1, 1, (SLOT,))
KEYS = LAYOUT.keys([1, 2, 3])
CALLS = sorted(name for name in vars(KVStore).keys() - {"pool", "counts"} if name[0] != "_")


def without_a_server(folder):
    own = hello(LAYOUT.fingerprint, SLOT, stream=False)
    return Client(ServerAccess(Address.parse(f"unix://{folder}/no-such-socket"), own))


@pytest.fixture(params=["store", "client", "hosts", "hosts without servers"])
def store(request, tmp_path):
    made: KVStore
    if request.param == "store":
        made = Store(Pool(4, SLOT))
    elif request.param == "client":
        made = without_a_server(tmp_path)
    elif request.param == "hosts":
        stores = [Store(Pool(4, SLOT)) for _ in range(2)]
        made = Hosts(cast(list[Client], stores), [bytes(32), bytes([1]) * 32])
    else:
        made = Hosts([without_a_server(tmp_path) for _ in range(2)], [bytes(32), bytes([1]) * 32])
    yield made
    made.close()


@pytest.mark.parametrize("kind", [Store, Client, Hosts])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_does_is_told_in_one_place(kind, name):
    assert inspect.getdoc(getattr(KVStore, name))
    own = getattr(kind, name).__doc__
    assert own is None or own.startswith(f"See KVStore.{name}.")


def test_all_make_the_same_leases(store):
    with store.save(KEYS) as save, store.load(KEYS) as load:
        assert (type(save), type(load)) == (SaveLease, LoadLease)
        assert len(save.keys) == len(save.slots)
        assert (load.poll(), load.slots, load.sources) == (Progress(0, 0), [], [])


def test_a_load_names_what_it_claims_and_no_more(store):
    with store.save(KEYS) as save:
        save.commit()
    with store.load(KEYS, 1, most=1) as lease:
        assert (list(lease.keys), lease.poll().ready) == (KEYS[1:2], min(1, len(save.keys)))


def test_a_save_is_committed_once(store):
    lease = store.save(KEYS)
    lease.commit()
    lease.close()
    with pytest.raises(StateError):
        lease.commit()
    assert store.lookup(KEYS).ready == len(lease.slots), "a close after the commit takes nothing"


def test_a_load_shows_nothing_after_its_end(store):
    with store.save(KEYS) as save:
        save.commit()
    lease = store.load(KEYS)
    assert lease.poll().ready == lease.ready == len(lease.slots) == len(save.slots)
    assert lease.sources == ["ram"] * lease.ready
    lease.close()
    lease.close()
    assert (lease.open, lease.poll(), lease.slots, lease.sources) == (False, Progress(0, 0), [], [])


def test_without_a_server_everything_is_a_miss_and_nothing_raises(tmp_path):
    client = without_a_server(tmp_path)
    assert (client.pool, client.status(), client.lookup(KEYS)) == (None, None, NO_LOOKUP)
    with client.save(KEYS) as save, client.load(KEYS) as load:
        assert (save.keys, save.pool, load.poll(), load.pool) == ([], None, Progress(0, 0), None)
        save.commit()
    assert client.known(KEYS) == [False] * 3
    client.decline(KEYS, "slower")
    client.hint(KEYS, Hint(over=True))
    client.invalidate(KEYS)
    client.invalidate_all()
    client.wait(0.0)
    client.close()


def test_a_pool_of_ones_own_has_no_witness():
    pool = Pool(1, SLOT)
    assert pool.witness_path is None
    pool.close()


@pytest.mark.parametrize("call", ["save", "load", "poll"])
def test_a_client_hears_of_each_slot_it_gets_that_its_memory_was_renewed(call):
    tier, lane = DictTier(8), ManualLane(urgent_bound=9, bound=9)
    store = Store(Pool(8, SLOT), [(tier, lane)])
    if call != "save":
        save(store, KEYS)
        lane.run()
    if call == "poll":  # it has slots only when a tier has been read
        whole(store.sharing.limit({"ram": 0}))
        whole(store.sharing.limit({"ram": 8}))
    store.sharing.renewals = dict.fromkeys(range(8), 1)

    def work(address):
        own = hello(bytes(32), SLOT, stream=False)
        access = ServerAccess(address, own)
        with (
            attached(access) as client,
            client.save(KEYS) if call == "save" else client.load(KEYS) as got,
        ):
            assert client.pool is not None
            if isinstance(got, LoadLease) and call == "poll":
                assert (got.slots, client.pool.take_renewed()) == ([], [])
                lane.run()
                assert got.poll().ready == len(KEYS)
            assert len(got.slots) == len(KEYS)
            assert client.pool.take_renewed() == sorted(got.slots)

    async def scenario():
        async with served(store) as server:
            await asyncio.to_thread(work, server.listeners[0].address)

    asyncio.run(scenario())


def test_a_namespace_that_is_too_long_is_refused_in_words_and_not_cut():
    assert hello(bytes(32), SLOT, stream=False, namespace="a" * 64).namespace == "a" * 64
    with pytest.raises(ConfigError, match="has 65 letters, expected at most 64: give the tenant"):
        hello(bytes(32), SLOT, stream=False, namespace="a" * 65)
    assert load_config(env={}, flags={"namespace": "a" * 64}).engine.namespace == "a" * 64
    with pytest.raises(ConfigError, match="expected 1 to 64 letters"):
        load_config(env={}, flags={"namespace": "a" * 65})


def test_each_change_of_a_slots_memory_is_told_once():
    reader, witness = os.pipe()
    pool = SharedPool(4, 4096, make_region(4 * 4096), witness)
    pool.hear([(1, 1), (3, 1)])
    assert pool.take_renewed() == [1, 3]
    pool.hear([(1, 1), (3, 2)])
    assert pool.take_renewed() == [3]
    assert pool.take_renewed() == []
    pool.close()
    os.close(reader)
