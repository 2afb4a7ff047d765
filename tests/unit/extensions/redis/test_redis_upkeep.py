"""A Redis that is away at the start, and one that is full of other fingerprints' chunks."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvtier.assemble import assemble
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.errors import TierError
from kvtier.core.steps import whole
from kvtier.extensions.redis import parts, upkeep
from kvtier.extensions.redis.layout import Form
from kvtier.extensions.redis.section import RedisSection
from kvtier.extensions.redis.servers import RedisServers
from kvtier.extensions.redis.startup import hopeless
from kvtier.extensions.redis.tier import RedisTier
from kvtier.extensions.redis.upkeep import UNUSED_S, Census
from kvtier.store.store import Store
from tests.child_process import DEADLINE_S, wait_for
from tests.clock import Clock
from tests.redis_server import FORM, PART_BYTES, RedisServer
from tests.scripted_redis import scripted
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

OLD = Form("kvtier", b"yesterda", PART_BYTES)
LAYOUT = ChunkLayout(bytes(32), 1, 1, (4096,))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(maxmemory="64mb", maxmemory_policy="noeviction") as server:
        yield server


@pytest.fixture
def yesterday(server: RedisServer) -> list[ChunkKey]:
    """Chunks of another fingerprint. Their fleet has ended."""
    tier = RedisTier(RedisServers(server.url, timeout_s=DEADLINE_S), OLD, 1 << 20, CHUNK_BYTES)
    with closing(tier):
        assert all(tier.write(key, chunk(key)) for key in KEYS)
    return list(KEYS)


def aged(server: RedisServer, seconds: int, but: Sequence[bytes] = ()) -> None:
    """Nobody has used yesterday's names for so long, ``but`` these."""
    with server.admin() as admin:
        for name in admin.keys("kvtier:2:" + b"yesterda".hex() + ":*"):
            if name not in but:
                admin.restore(name, 0, admin.dump(name), replace=True, idletime=seconds)


def left(server: RedisServer) -> int:
    """Yesterday's chunks."""
    with server.admin() as admin:
        return sum(bool(admin.exists(OLD.header_name(key))) for key in KEYS)


def full(server: RedisServer, tier: RedisTier) -> None:
    """Redis refuses a write for want of room, and the tier's round follows."""
    with server.admin() as admin:
        admin.config_set("maxmemory", 1 << 20)
        assert not tier.write(KEYS[0], chunk(KEYS[0]))
        admin.config_set("maxmemory", 64 << 20)
    tier._upkeep.round()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds come when a test makes them."""
    monkeypatch.setattr(upkeep.Upkeep, "_rounds", lambda _: None)


# ---- other fingerprints --------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet", "yesterday")
@pytest.mark.parametrize(("share", "level"), [(60, logging.WARNING), (1, logging.INFO)])
def test_the_start_says_whose_chunks_lie_there(
    server: RedisServer, caplog: pytest.LogCaptureFixture, share: int, level: int
) -> None:
    with server.admin() as admin:
        used = admin.info("memory")["used_memory"]
        admin.config_set("maxmemory", used + 30 * FORM.room(CHUNK_BYTES))
    with caplog.at_level(logging.INFO):
        tier = server.tier(capacity=share)
        tier.recovered()
    (line,) = [one for one in caplog.records if "other fingerprints" in one.getMessage()]
    assert line.levelno == level
    base = "kvtier:2:" + b"yesterda".hex()
    assert "8 chunks are of 1 other fingerprints" in line.getMessage()
    assert f"{base}: 8, last used 0 s ago" in line.getMessage()
    assert ("KiB are free; 8 chunks" in line.getMessage()) is (share == 60)
    assert "redis-cli --scan --pattern" in line.getMessage()


@pytest.mark.usefixtures("quiet", "yesterday")
def test_a_full_redis_gives_back_what_nobody_has_used_for_a_day(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    tier = server.tier()
    aged(server, UNUSED_S + 5)
    full(server, tier)
    assert left(server) == 0
    assert "which nobody had used for a day, are deleted" in caplog.text
    with server.admin() as admin:
        assert admin.keys("kvtier:2:" + b"yesterda".hex() + "*") == [], "the parts too"
    assert not tier.trouble


@pytest.mark.usefixtures("quiet", "yesterday")
@pytest.mark.parametrize(
    "but",
    [
        [OLD.sign],
        [OLD.header_name(KEYS[3])],
        [OLD.part_names(KEYS[5], CHUNK_BYTES)[0]],
    ],
    ids=["an engine is alive", "one chunk was used", "one part was used"],
)
def test_a_fleet_that_used_redis_today_loses_nothing(
    server: RedisServer, caplog: pytest.LogCaptureFixture, but: list[bytes]
) -> None:
    tier = server.tier()
    aged(server, UNUSED_S + 5, but)
    full(server, tier)
    assert left(server) == len(KEYS)
    assert tier.trouble == (
        "redis is full, and other fingerprints have chunks there (the log names them)"
    )
    assert str(server.port) not in tier.trouble
    assert "kvtier:2:" + b"yesterda".hex() in caplog.text


@pytest.mark.usefixtures("quiet", "yesterday")
def test_a_fleet_that_slept_for_less_than_a_day_loses_nothing(server: RedisServer) -> None:
    tier = server.tier()
    aged(server, UNUSED_S - 60)
    full(server, tier)
    assert left(server) == len(KEYS)


@pytest.mark.usefixtures("quiet", "yesterday")
def test_while_there_is_room_nothing_is_given_back(server: RedisServer) -> None:
    tier = server.tier()
    aged(server, 30 * UNUSED_S)
    tier._upkeep.round()
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    tier._upkeep.round()
    assert left(server) == len(KEYS)


@pytest.mark.usefixtures("quiet", "yesterday")
def test_what_was_not_seen_whole_is_not_given_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet's sign may be among the names that were not looked at."""
    tier = server.tier()
    aged(server, UNUSED_S + 5)
    monkeypatch.setattr(upkeep, "_MOST_SCANNED", 3)
    full(server, tier)
    assert left(server) == len(KEYS)


@pytest.mark.usefixtures("quiet", "yesterday")
def test_a_fleet_that_comes_back_meanwhile_keeps_its_chunks(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = server.tier()
    aged(server, UNUSED_S + 5)
    look = Census.look

    def looked(*arguments: Any) -> bool:
        seen = look(*arguments)
        with server.admin() as admin:
            admin.set(OLD.sign, "text")
        return seen

    monkeypatch.setattr(Census, "look", looked)
    full(server, tier)
    assert left(server) == len(KEYS)


@pytest.mark.usefixtures("quiet", "yesterday")
def test_other_programs_names_are_left_alone(server: RedisServer) -> None:
    tier = server.tier()
    strangers = [b"kvtier:x:{1}", b"kvtier:2:zz:{1}", b"kvtier:2:{1}", b"kvtierx:2:ab:{1}", b"a"]
    with server.admin() as admin:
        for name in strangers:
            admin.set(name, "text")
            admin.restore(name, 0, admin.dump(name), replace=True, idletime=10 * UNUSED_S)
        aged(server, UNUSED_S + 5)
        full(server, tier)
        assert left(server) == 0
        assert admin.exists(*strangers) == len(strangers)


@pytest.mark.usefixtures("quiet")
def test_fingerprints_give_back_one_after_the_other_as_far_as_is_needed(
    server: RedisServer,
) -> None:
    tier = server.tier()
    bases = [b"kvtier:2:aaaa:", b"kvtier:2:bbbb:"]
    with server.admin() as admin:
        for base, days in zip(bases, (2, 3), strict=True):
            admin.set(base + b"{0}", "text")
            value = admin.dump(base + b"{0}")
            admin.restore(base + b"{0}", 0, value, replace=True, idletime=days * UNUSED_S)
        full(server, tier)
        assert [admin.exists(base + b"{0}") for base in bases] == [1, 0], "the longest unused first"
        tier._health.of(FORM.header_name(KEYS[0])).full.ok()
        full(server, tier)
        assert [admin.exists(base + b"{0}") for base in bases] == [0, 0]


@pytest.mark.usefixtures("quiet", "yesterday")
def test_a_full_redis_is_looked_through_every_five_minutes_at_most(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = Clock(), list[Census]()
    tier = server.tier(clock=clock)
    look = Census.look

    def looked(census: Census, *how: Any) -> bool:
        looks.append(census)
        return look(census, *how)

    monkeypatch.setattr(Census, "look", looked)
    for seconds in (0, 10, 299, 300):
        clock.now = seconds
        full(server, tier)
    assert len(looks) == 2


def test_a_full_redis_wakes_the_round(server: RedisServer, yesterday: list[ChunkKey]) -> None:
    """With the thread, and not by hand."""
    tier = server.tier()
    aged(server, UNUSED_S + 5)
    with server.admin() as admin:
        admin.config_set("maxmemory", 1 << 20)
        assert not tier.write(KEYS[0], chunk(KEYS[0]))
        admin.config_set("maxmemory", 64 << 20)
    wait_for(lambda: not left(server), "the room is given back")


@pytest.mark.usefixtures("quiet")
def test_an_idle_engine_signs_its_fingerprint(server: RedisServer) -> None:
    tier = server.tier()
    with server.admin() as admin:
        assert UNUSED_S < admin.ttl(FORM.sign) <= 2 * UNUSED_S, "it leaves by itself"
        admin.delete(FORM.sign)
        tier._upkeep.round()
        assert admin.exists(FORM.sign)


@pytest.mark.usefixtures("quiet")
def test_a_user_without_the_right_to_idle_times_gives_nothing_back(
    server: RedisServer, yesterday: list[ChunkKey]
) -> None:
    aged(server, UNUSED_S + 5)
    with server.admin() as admin:
        admin.acl_setuser(
            "poor", enabled=True, passwords=["+secret"], keys=["*"],
            categories=["+@all"], commands=["-object"],
        )  # fmt: skip
    tier = server.tier(f"redis://poor:secret@127.0.0.1:{server.port}")
    full(server, tier)
    assert left(server) == len(yesterday)


@pytest.mark.parametrize("idle", [[UNUSED_S, 5], [5, UNUSED_S], [UNUSED_S, None]])
def test_a_fingerprint_is_as_young_as_the_youngest_of_its_names(idle: list[int | None]) -> None:
    census = Census(FORM, CHUNK_BYTES)
    for key, seconds in zip(KEYS, idle, strict=False):
        census._add(OLD.header_name(key), seconds)
    assert not census.unused


# ---- away at the start ---------------------------------------------------------------------------


@contextmanager
def _store(server: RedisServer, **more: Any) -> Iterator[Store]:
    store = assemble(Config(ram_bytes=1 << 20, redis_url=server.url, **more), LAYOUT)
    assert isinstance(store, Store)
    with closing(store):
        yield store


def _saved(store: Store, keys: Sequence[ChunkKey]) -> None:
    lease = whole(store.save.steps(keys))
    lease.commit()


def _tier(store: Store) -> RedisTier:
    (tier,) = store.tiers
    assert isinstance(tier, RedisTier)
    return tier


@pytest.mark.usefixtures("quiet")
def test_without_a_size_the_room_begins_at_0_and_grows_when_redis_answers(
    server: RedisServer,
) -> None:
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
def test_a_size_that_redis_never_says_stays_trouble(server: RedisServer) -> None:
    server.kill()
    with _store(server) as store:
        server.settings["maxmemory"] = 0
        server.start()
        _tier(store)._upkeep.round()
        assert _tier(store).capacity == 0
        assert "sets no maxmemory; give redis_bytes" in _tier(store).trouble


@pytest.mark.usefixtures("quiet")
def test_what_others_keep_there_is_not_deleted_before_the_room_is_known(
    server: RedisServer,
) -> None:
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


def test_away_is_away_whatever_keys_are_given(server: RedisServer) -> None:
    server.kill()
    for bytes_ in (None, 1 << 20):
        assert "cannot be reached" in parts.away(RedisSection(url=server.url, bytes_=bytes_))


def test_a_redis_with_too_many_clients_is_away_and_no_wrong_password() -> None:
    refusal = b"-ERR max number of clients reached\r\n"
    with scripted({b"AUTH": refusal}) as port:
        url = f"redis://:secret@127.0.0.1:{port}"
        assert "max number of clients" in parts.away(RedisSection(url=url, bytes_=1 << 20))
    with scripted({b"AUTH": b"-WRONGPASS no\r\n"}) as port:
        url = f"redis://:secret@127.0.0.1:{port}"
        with pytest.raises(TierError, match="login refused"):
            parts.away(RedisSection(url=url, bytes_=1 << 20))


@pytest.mark.parametrize("error", [b"-LOADING in memory\r\n", b"-CLUSTERDOWN no\r\n"])
def test_a_redis_that_is_starting_is_away(error: bytes) -> None:
    with scripted({b"INFO": error}) as port:
        url = f"redis://127.0.0.1:{port}"
        assert "cannot be reached" in parts.away(RedisSection(url=url))


def test_a_proxy_that_ends_the_handshake_is_away() -> None:
    """What stands in front of a Redis takes connections, and ends them while Redis is away."""

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                client, _place = listener.accept()
                client.recv(1 << 12)
                client.close()

        threading.Thread(target=serve, daemon=True).start()
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}"
        assert "cannot be reached" in parts.away(RedisSection(url=url, bytes_=1 << 20))
    assert hopeless(ssl.SSLCertVerificationError("self-signed"))
    assert not hopeless(ssl.SSLEOFError("EOF"))
