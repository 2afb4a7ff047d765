"""A Redis that is away at the start, and one that is full of other fingerprints' chunks."""

import logging
import socket
import ssl
import threading
from contextlib import closing, contextmanager, suppress

import pytest

from kvtier.assemble import assemble
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.errors import TierError
from kvtier.core.steps import whole
from kvtier.started import Started
from kvtier.store.store import Store
from kvtier.tiers.redis import parts, upkeep
from kvtier.tiers.redis.layout import Form, names_told
from kvtier.tiers.redis.parts import RedisSection
from kvtier.tiers.redis.servers import RedisServers, slot_of
from kvtier.tiers.redis.startup import hopeless
from kvtier.tiers.redis.tier import RedisTier
from tests.child_process import DEADLINE_S, wait_for
from tests.clock import Clock
from tests.redis_server import FORM, RedisServer, redis_cluster
from tests.scripted_redis import scripted
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

LAYOUT = ChunkLayout(bytes(32), 1, 1, (4096,))
CHUNK = 1 << 20
FLEET = Form("kvtier", b"yesterda")
BASE = b"kvtier:2:" + b"yesterda".hex().encode()
TODAY = Form("kvtier", b"of today")
MANY = LAYOUT.keys(range(12))
BUFFERS = 2
"""Chunks whose room Redis may want for what it receives, for each of two connections."""


@pytest.fixture
def server():
    with RedisServer(maxmemory="64mb", maxmemory_policy="noeviction") as server:
        yield server


@pytest.fixture
def quiet(monkeypatch):
    """Rounds come when a test makes them."""
    monkeypatch.setattr(upkeep.Upkeep, "_rounds", lambda _: None)


def fleet(url, form, timeout_s=DEADLINE_S):
    servers = RedisServers(url, timeout_s=timeout_s)
    return RedisTier(servers, form, 64 << 20, CHUNK, clock=Clock())


@pytest.fixture
def old(server, quiet):
    """A fleet with twelve chunks, the first one used longest ago, in a Redis without room for
    more."""
    with closing(fleet(server.url, FLEET)) as tier:
        assert all(tier.write(key, chunk(key, CHUNK)) for key in MANY)
        with server.admin() as admin:
            for index, key in enumerate(MANY):
                for name in FLEET.names(key, CHUNK):
                    value, seconds = admin.dump(name), 5000 - 100 * index
                    admin.restore(name, 0, value, replace=True, idletime=seconds)
        tight(server)
        yield tier


def tight(server):
    with server.admin() as admin:
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + CHUNK // 2)


def held(server, form=FLEET):
    with server.admin() as admin:
        names = {key: form.names(key, CHUNK) for key in MANY}
        counts = {key: admin.exists(*names[key]) for key in MANY}
    assert set(counts.values()) <= {0, 3}, "a chunk is whole or gone"
    return [key for key in MANY if counts[key]]


# ---- room in a full Redis ------------------------------------------------------------------------


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(("free", "level"), [(1, logging.WARNING), (80, logging.INFO)])
def test_the_start_says_whose_chunks_lie_there(server, caplog, free, level):
    with server.admin() as admin:
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + (free << 20))
    with caplog.at_level(logging.INFO), closing(fleet(server.url, TODAY)) as tier:
        tier.recovered()
    (line,) = [one for one in caplog.records if "other fingerprints" in one.getMessage()]
    assert line.levelno == level
    assert "12 chunks are of 1 other fingerprints" in line.getMessage()
    assert f"{BASE.decode()}: 12, last used" in line.getMessage()
    assert ("MiB are free; 12 chunks" in line.getMessage()) is (free == 1)
    assert "redis-cli --scan --pattern" in line.getMessage()


def test_each_write_takes_the_room_of_one_dead_chunk_the_least_recently_used_first(
    server, old, caplog
):
    old.close()
    with closing(fleet(server.url, TODAY)) as tier:
        for count, key in enumerate(MANY[:9], 1):
            assert tier.write(key, chunk(key, CHUNK))
            lost = len(MANY) - len(held(server))
            assert count - 1 <= lost <= count + BUFFERS
            assert held(server) == MANY[lost:]
        assert all(tier.read(key, memoryview(bytearray(CHUNK))) for key in MANY[:9])
        assert not tier.trouble
    assert caplog.text.count("makes room") == 1, "said once"


def test_a_fleet_that_runs_loses_nothing(server, old):
    with closing(fleet(server.url, TODAY)) as tier:
        assert not tier.write(MANY[0], chunk(MANY[0], CHUNK))
        assert held(server) == MANY
        assert tier.trouble == "redis takes no writes now (the log says why)"
        with server.admin() as admin:
            admin.config_set("maxmemory", 64 << 20)
        tier._clock.now += 60
        assert tier.write(MANY[0], chunk(MANY[0], CHUNK)) and not tier.trouble


def test_the_sign_goes_with_the_last_one_and_soon_after_a_crash(server, old):
    with closing(fleet(server.url, FLEET)), server.admin() as admin:
        assert admin.scard(FLEET.sign) == 2
        old.close()
        assert admin.scard(FLEET.sign) == 1, "the other one still runs"
        assert 240 < admin.ttl(FLEET.sign) <= 300
    with server.admin() as admin:
        assert not admin.exists(FLEET.sign)


def test_both_ends_know_of_a_fleet_that_has_this_model_in_another_chunk_size(server, old):
    with server.admin() as admin:
        admin.config_set("maxmemory", 64 << 20)
        admin.sadd(FLEET.sign, b"\x00:1:old:2", b"of an older version")
    same, other = fleet(server.url, FLEET), RedisServers(server.url)
    with closing(same), closing(RedisTier(other, FLEET, 64 << 20, CHUNK // 2)) as half:
        assert (same.is_apart, half.is_apart, old.is_apart) == (False, True, False)
        old._upkeep.round()
        assert [old.is_apart] == [True]
    old._upkeep.round()
    assert not old.is_apart, "it has left"


def test_a_full_redis_keeps_the_signs_alive(server, old):
    with server.admin() as admin:
        admin.config_set("maxmemory", 1 << 20)
        admin.expire(FLEET.sign, 10)
        old._upkeep.round()
        assert admin.ttl(FLEET.sign) > 240
    assert held(server) == MANY


def test_who_starts_in_a_full_redis_signs_at_the_cost_of_one_chunk_at_most(server, old):
    """Its chunks had no sign until now. Those of others are in use."""
    old.close()
    with server.admin() as admin, closing(fleet(server.url, TODAY)):
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] - 4096)
        with closing(fleet(server.url, FLEET)):
            assert admin.exists(FLEET.sign)
            assert held(server) == MANY[1:]


def test_a_sample_that_shows_one_name_of_a_chunk_takes_all_of_it(server, old, monkeypatch):
    monkeypatch.setattr(upkeep, "_SAMPLE_NAMES", 1)
    monkeypatch.setattr(upkeep, "_MOST_SAMPLES", 100)
    old.close()
    with closing(fleet(server.url, TODAY)) as tier:
        assert all(tier.write(key, chunk(key, CHUNK)) for key in MANY[:6])
        assert 12 - 6 - BUFFERS <= len(held(server)) <= 7


def test_a_write_makes_room_for_those_beside_it(server, old):
    """Or they take what it has made."""
    old.close()
    with closing(fleet(server.url, TODAY)) as tier:
        tier._under_way.extend(MANY[1:5])
        assert tier.write(MANY[0], chunk(MANY[0], CHUNK))
        assert 4 <= len(MANY) - len(held(server)) <= 5 + BUFFERS


def test_a_fleet_whose_sign_was_lost_takes_nothing_of_its_own(server, old):
    other = LAYOUT.keys(range(20))[-1]
    with server.admin() as admin:
        admin.delete(FLEET.sign)
    assert not old.write(other, chunk(other, CHUNK))
    assert held(server) == MANY


def test_while_there_is_room_nothing_is_deleted(server, old):
    old.close()
    with server.admin() as admin:
        admin.config_set("maxmemory", 64 << 20)
    with closing(fleet(server.url, TODAY)) as tier:
        assert all(tier.write(key, chunk(key, CHUNK)) for key in MANY)
    assert held(server) == MANY


@pytest.mark.parametrize("without", ["+exists", "+object|idletime", "+unlink"])
def test_who_may_not_look_deletes_nothing(server, old, without):
    """Its rights on names of others end somewhere."""
    old.close()
    own = "~kvtier:2:" + b"of today".hex() + ":*"
    with server.admin() as admin:
        admin.acl_setuser(
            "poor", enabled=True, passwords=["+secret"], keys=["*"],
            categories=["+@all"], commands=["-" + without[1:]], selectors=[(without, own)],
        )  # fmt: skip
    with closing(fleet(f"redis://poor:secret@127.0.0.1:{server.port}", TODAY)) as tier:
        assert not tier.write(MANY[0], chunk(MANY[0], CHUNK))
    assert held(server) == MANY


def test_where_redis_evicts_what_has_a_ttl_no_sign_is_relied_on(server, old):
    with server.admin() as admin:
        admin.config_set("maxmemory-policy", "volatile-lru")
    with closing(fleet(server.url, TODAY)) as tier:
        assert not tier.write(MANY[0], chunk(MANY[0], CHUNK))
    assert held(server) == MANY


def test_other_programs_names_are_left_alone(server, old):
    old.close()
    strangers = [b"kvtier:x:{1}", b"kvtier:2:zz:{1}", b"kvtier:2:{1}", b"kvtierx:2:ab:{1}", b"a"]
    with server.admin() as admin:
        admin.config_set("maxmemory", 64 << 20)
        for name in strangers:
            admin.set(name, "text")
        tight(server)
        with closing(fleet(server.url, TODAY)) as tier:
            assert [tier.write(key, chunk(key, CHUNK)) for key in MANY][:9] == [True] * 9
            assert not tier.write(ChunkKey(bytes(32)), chunk(MANY[0], CHUNK)), "no dead are left"
        assert admin.exists(*strangers) == len(strangers)


def test_other_formats_and_parts_without_a_header_make_room(server, old):
    old.close()
    with server.admin() as admin:
        admin.config_set("maxmemory", 64 << 20)
        names = [b"kvtier:1:aaaa:{00}", b"kvtier:2:bbbb:{00}:1048512:7"]
        for name in names:
            admin.set(name, bytes(CHUNK // 2))
            admin.restore(name, 0, admin.dump(name), replace=True, idletime=9000)
        tight(server)
        with closing(fleet(server.url, TODAY)) as tier:
            assert tier.write(MANY[0], chunk(MANY[0], CHUNK))
        assert not admin.exists(*names)


def test_a_header_of_garbage_names_no_parts():
    key, stem = MANY[0], FLEET.header_name(MANY[0])
    header = FLEET.header(key, CHUNK, bytes(16), 0)
    assert names_told(stem, header) == FLEET.names(key, CHUNK)
    endless = Form("kvtier", b"y", 1).header(key, CHUNK, bytes(16), 0)
    for bad in (None, b"", header[:20], b"x" + header[1:], endless):
        assert names_told(stem, bad) == []


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_on_a_cluster_the_sign_on_another_node_holds():
    with redis_cluster() as servers:
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        by_slot = {key: slot_of(FLEET.header_name(key)) * 3 // 16384 for key in MANY}
        sign = slot_of(FLEET.sign) * 3 // 16384
        key = next(key for key in MANY if by_slot[key] != sign)
        with closing(fleet(url, FLEET)) as old:
            assert all(old.write(one, chunk(one, CHUNK)) for one in MANY)
            for server in servers:
                with server.admin() as admin:
                    admin.config_set("maxmemory-policy", "noeviction")
                tight(server)
            with closing(fleet(url, TODAY)) as tier:
                assert not tier.write(key, chunk(key, CHUNK))
                assert all(old.read(one, memoryview(bytearray(CHUNK))) for one in MANY)
                old.close()
                tier._clock.now += 60
                assert tier.write(key, chunk(key, CHUNK)), "and nobody signs now"


# ---- away at the start ---------------------------------------------------------------------------


@contextmanager
def _store(server, **more):
    store = assemble(
        Started(Config().with_keys(ram_bytes=1 << 20, redis_url=server.url, **more)), LAYOUT
    )
    assert isinstance(store, Store)
    with closing(store):
        yield store


def _saved(store, keys):
    lease = whole(store.save.steps(keys))
    lease.commit()


def _tier(store):
    (tier,) = store.tiers
    assert isinstance(tier, RedisTier)
    return tier


@pytest.mark.usefixtures("quiet")
def test_without_a_size_the_room_begins_at_0_and_grows_when_redis_answers(server):
    server.kill()
    keys = LAYOUT.keys(range(8))
    with _store(server) as store:
        tier = _tier(store)
        assert tier.capacity == 0 and "no chunk is kept there" in tier.trouble
        assert str(server.port) not in tier.trouble
        _saved(store, keys[:4])
        wait_for(lambda: store.lower[0].lane.queued == (0, 0), "the lane is empty")
        assert store.stats()["redis_held"] == 0
        server.start()
        with server.admin() as admin:
            admin.config_set("maxmemory", 64 << 20)
        tier._upkeep.round()
        assert tier.capacity == int(0.9 * (64 << 20)) // tier.chunk_room and not tier.trouble
        _saved(store, keys[4:])
        wait_for(lambda: store.stats()["redis_held"] == 4, "new chunks are kept there")
        assert store.capacities == [tier.capacity]


@pytest.mark.usefixtures("quiet")
def test_a_size_that_redis_never_says_stays_trouble(server):
    server.kill()
    with _store(server) as store:
        server.settings["maxmemory"] = 0
        server.start()
        _tier(store)._upkeep.round()
        assert _tier(store).capacity == 0
        assert "sets no maxmemory; give redis_bytes" in _tier(store).trouble


@pytest.mark.usefixtures("quiet")
def test_what_others_keep_there_is_not_deleted_before_the_room_is_known(server):
    """Chunks that are found and have no room here are another server's."""
    servers = RedisServers(server.url, timeout_s=DEADLINE_S)
    with server.paused():
        servers.timeout_s = servers._factory.timeout_s = 0.05
        tier = RedisTier(servers, FORM, None, CHUNK_BYTES)
    servers._factory.timeout_s = DEADLINE_S
    with closing(tier):
        other = server.tier()
        for key in KEYS:
            other.write(key, chunk(key))
        assert tier.capacity == 0
        assert tier.recovered() == [] and tier.find(KEYS) == 0
        tier._upkeep.round()
        assert tier.capacity and tier.find(KEYS) == len(KEYS)
    assert all(holds(other, key) for key in KEYS)


def test_away_is_away_whatever_keys_are_given(server):
    server.kill()
    for bytes_ in (None, 1 << 20):
        assert "cannot be reached" in parts.away(RedisSection(url=server.url, bytes_=bytes_))


def test_a_redis_with_too_many_clients_is_away_and_no_wrong_password():
    refusal = b"-ERR max number of clients reached\r\n"
    with scripted({b"AUTH": refusal}) as port:
        url = f"redis://:secret@127.0.0.1:{port}"
        assert "max number of clients" in parts.away(RedisSection(url=url, bytes_=1 << 20))
    with scripted({b"AUTH": b"-WRONGPASS no\r\n"}) as port:
        url = f"redis://:secret@127.0.0.1:{port}"
        with pytest.raises(TierError, match="login refused"):
            parts.away(RedisSection(url=url, bytes_=1 << 20))


@pytest.mark.parametrize("error", [b"-LOADING in memory\r\n", b"-CLUSTERDOWN no\r\n"])
def test_a_redis_that_is_starting_is_away(error):
    with scripted({b"INFO": error}) as port:
        url = f"redis://127.0.0.1:{port}"
        assert "cannot be reached" in parts.away(RedisSection(url=url))


def test_a_proxy_that_ends_the_handshake_is_away():
    """What stands in front of a Redis takes connections, and ends them while Redis is away."""

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with suppress(OSError):  # the listener is closed
                while True:
                    client, _place = listener.accept()
                    client.recv(1 << 12)
                    client.close()

        threading.Thread(target=serve, daemon=True).start()
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}"
        assert "cannot be reached" in parts.away(RedisSection(url=url, bytes_=1 << 20))
    assert hopeless(ssl.SSLCertVerificationError("self-signed"))
    assert not hopeless(ssl.SSLEOFError("EOF"))
