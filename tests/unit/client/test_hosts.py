"""Hosts: one KVStore over one for each host of an engine. Here each is a Store of this process."""

from collections.abc import Sequence
from typing import cast
from unittest.mock import create_autospec

import pytest

from kvtier.client.client import Client
from kvtier.client.hosts import Hosts, HostsPool, shortest, slot_of, together
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.lookup import NO_LOOKUP, Asking, Ended, LookupResult, Progress, Served
from kvtier.core.pool import Pool
from kvtier.eviction.hints import Hint
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.unit.client.test_kvstore import without_a_server

SLOT = 4096
LAYOUTS = [ChunkLayout(fingerprint({"host": host}), 1, 1, (SLOT,)) for host in range(2)]
KEYS = LAYOUTS[0].keys([1, 2, 3, 4])


def hosts_of(*stores):
    return Hosts(cast(Sequence[Client], stores), [one.fingerprint for one in LAYOUTS])


@pytest.fixture
def stores():
    made = [Store(Pool(8, SLOT)) for _ in range(2)]
    yield made
    for one in made:
        one.check(idle=True)
        one.close()


@pytest.fixture
def hosts(stores):
    return hosts_of(*stores)


def keys_of(hosts, host):
    return list(own_keys(hosts, KEYS)[host])


def own_keys(hosts, keys):
    return [own for _, own in hosts._named(keys)]


def put(cache, keys):
    with cache.save(keys) as lease:
        lease.commit()


def own_slot(pool, number, host):
    return slot_of([each.slots for each in pool.pools], number, host)


def test_a_hit_is_what_all_hosts_have(hosts, stores):
    put(hosts, KEYS)
    stores[1].invalidate(keys_of(hosts, 1)[2:])
    assert hosts.lookup(KEYS).steps == [(2, 0.0)]
    assert hosts.known([*KEYS[2:], *KEYS[:2]]) == [False] * len(KEYS[2:]) + [True] * 2
    with hosts.load(KEYS) as lease:
        assert lease.poll() == Progress(2, 0) and lease.sources == ["ram", "ram"]
    with hosts.load(KEYS, 2) as lease:
        assert lease.poll() == Progress(0, 0)


def test_a_save_fills_what_a_host_lacks_and_touches_nothing_of_the_others(hosts, stores):
    put(hosts, KEYS)
    stores[1].invalidate(keys_of(hosts, 1)[1:3])
    with hosts.save(KEYS) as lease:
        assert lease.keys == KEYS[1:3]
        assert isinstance(lease.pool, HostsPool)
        slots = [[own_slot(lease.pool, slot, host) for slot in lease.slots] for host in range(2)]
        assert slots[0] == [None, None] and None not in slots[1]
        lease.commit()
    assert hosts.lookup(KEYS).ready == len(KEYS)


def test_a_save_that_is_given_up_is_given_up_everywhere(hosts, stores):
    hosts.save(KEYS).close()
    for host, store in enumerate(stores):
        assert store.lookup(keys_of(hosts, host)).known == 0


def test_a_load_of_what_one_host_lacks_pins_nothing_on_the_others(tmp_path):
    here, away = Store(Pool(8, SLOT)), without_a_server(tmp_path)
    put(here, KEYS)
    hosts = Hosts([cast(Client, here), away], [one.fingerprint for one in LAYOUTS])
    lease = hosts.load(KEYS)
    assert lease.poll() == Progress(0, 0)
    here.check(idle=True)
    save = hosts.save(LAYOUTS[0].keys([7, 8]))
    assert (save.keys, save.slots) == ([], [])
    here.check(idle=True)
    save.close()
    lease.close()
    hosts.close()


def test_a_load_waits_as_long_as_a_tier_of_one_host_is_asked():
    lanes = [ManualLane(urgent_bound=9, bound=9) for _ in range(2)]
    stores = [Store(Pool(8, SLOT), [(DictTier(9, shared=True), lane)]) for lane in lanes]
    hosts = hosts_of(*stores)
    for place, keys in enumerate((KEYS, keys_of(hosts, 1))):
        for key in keys:
            stores[place].tiers[0].write(key, memoryview(bytes(SLOT)))
    with hosts.load(KEYS) as lease:
        for lane in lanes:
            assert lease.poll() == Progress(0, 0) or lease.asking
            assert lease.asking
            lane.run()
        assert lease.poll() == Progress(len(KEYS), 0)
        assert not lease.asking
    hosts.close()


@pytest.mark.parametrize(
    "tell",
    [
        lambda hosts: hosts.decline(KEYS, "slower"),
        lambda hosts: hosts.served(Served(9, {"ram": 4}, KEYS, 1, 13)),
        lambda hosts: hosts.ended(Ended(1, 9, "stop")),
        lambda hosts: hosts.hint(KEYS, Hint(over=True), "session"),
        lambda hosts: hosts.invalidate(KEYS),
        lambda hosts: hosts.invalidate_all(),
        lambda hosts: hosts.wait(1.0),
        lambda hosts: hosts.check(idle=True),
        lambda hosts: hosts.close(3.0),
    ],
    ids=["decline", "served", "ended", "hint", "invalidate", "all", "wait", "check", "close"],
)
def test_each_host_is_told_of_its_own_chunks(tell):
    stores = [create_autospec(Client, instance=True) for _ in range(3)]
    layouts = [ChunkLayout(fingerprint({"host": host}), 1, 1, (SLOT,)) for host in range(3)]
    hosts = Hosts(stores, [one.fingerprint for one in layouts])
    tell(hosts)
    calls = [one.method_calls for one in stores]
    for host, own in enumerate(calls):
        named = repr(calls[0])
        for key in KEYS:
            named = named.replace(repr(key), repr(own_keys(hosts, [key])[host][0]))
        assert len(own) == 1 and repr(own) == named


def test_slots_are_numbered_without_two_that_are_equal():
    pools = [Pool(count, SLOT) for count in (2, 3, 1)]
    pool = HostsPool(pools)
    found = {}
    for one in (0, 1, None):
        for two in (0, 1, 2, None):
            for three in (0, None):
                number = pool.joined((one, two, three))
                found[number] = (one, two, three)
                assert tuple(own_slot(pool, number, host) for host in range(3)) == (one, two, three)
    assert sorted(found) == list(range(pool.slots))
    for each in pools:
        each.close()


def test_hosts_with_a_tier_in_common_never_get_each_others_chunks():
    tier, lanes = DictTier(32), [ManualLane(urgent_bound=9, bound=9) for _ in range(2)]
    stores = [Store(Pool(8, SLOT), [(tier, lane)]) for lane in lanes]
    hosts = hosts_of(*stores)
    with hosts.save(KEYS) as lease:
        for host, store in enumerate(stores):
            for slot in lease.slots:
                assert isinstance(lease.pool, HostsPool)
                own = own_slot(lease.pool, slot, host)
                assert own is not None
                store.pool.view(own)[:] = bytes([host + 1]) * SLOT
        lease.commit()
    for lane in lanes:
        lane.run()
    again = [Store(Pool(8, SLOT), [(tier, lane)]) for lane in lanes]
    with hosts_of(*again).load(KEYS) as lease:
        assert lease.poll().coming == len(KEYS)
        for lane in lanes:
            lane.run()
        assert lease.poll() == Progress(len(KEYS), 0)
        assert lease.sources == [tier.name] * len(KEYS)
        assert isinstance(lease.pool, HostsPool)
        for host, store in enumerate(again):
            own = own_slot(lease.pool, lease.slots[0], host)
            assert own is not None and store.pool.view(own)[:1] == bytes([host + 1])
    for store in (*stores, *again):
        store.close()


def test_what_is_asked_of_all_is_sent_before_any_answer_is_waited_for():
    done = list[str]()

    def ask(name):
        done.append(f"asked {name}")
        yield 0.0
        done.append(f"answered {name}")
        return name

    def known():
        yield from ()
        return "known"

    assert together([ask("a"), known(), ask("b")]) == ["a", "known", "b"]
    assert done == ["asked a", "asked b", "answered a", "answered b"]


@pytest.mark.parametrize(("results", "both"), [
    ([LookupResult([(2, 0.0), (5, 0.1)]), NO_LOOKUP], NO_LOOKUP),
    ([LookupResult([(2, 0.0), (5, 0.1)]), LookupResult([(1, 0.0), (4, 0.3), (9, 0.4)])],
     LookupResult([(1, 0.0), (2, 0.3), (4, 0.3), (5, 0.4)])),
    ([LookupResult([(3, 0.0)]), LookupResult([(0, 0.0), (3, None)], None, "never_seen")],
     LookupResult([(0, 0.0), (3, None)], None, "never_seen")),
    ([LookupResult([(3, 0.0)], Asking(0.1, None, 0.5))] * 2,
     LookupResult([(3, 0.0)], Asking(0.1, None, 0.25))),
    ([LookupResult([(3, 0.0)], Asking(0.1, 0.2, 0.5)), LookupResult([(3, 0.0)])], None),
    ([LookupResult([(3, 0.0)], Asking(0.1, 0.2, 0.5)), LookupResult([(9, 0.0)])],
     LookupResult([(3, 0.0)], Asking(0.1, 0.2, 0.5))),
])  # fmt: skip
def test_an_answer_is_the_shortest_and_as_late_as_the_latest(results, both):
    assert shortest(results) == (both or LookupResult([(3, 0.0)]))
