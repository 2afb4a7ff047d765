"""RedisTier: every promise of a tier, on every kind of connection, and its own: sharing, order,
room, names, TTL."""

import logging
import subprocess
import sys

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError, StateError, TierError
from kvtier.core.tenant import UNOWNED, owner_of, tenant
from kvtier.testing import check_tier
from kvtier.tiers.redis.layout import Form
from tests.child_process import DEADLINE_S
from tests.redis_server import FORM, PART_BYTES, PARTS, RedisServer, redis_cluster
from tests.tier_chunks import CHUNK_BYTES, KEYS, NAMESPACE, chunk, holds

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def started():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(started):
    with started.admin() as admin:
        admin.flushall()
        admin.config_set("maxmemory", 0)
        admin.config_set("maxmemory-policy", "noeviction")
    return started


def age(admin, name, seconds):
    """Make Redis believe that the key was last used so long ago."""
    admin.restore(name, 0, admin.dump(name), replace=True, idletime=seconds)


# ---- the promises of every tier ------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk_bytes", [CHUNK_BYTES, PART_BYTES, 1], ids=["parts", "one part", "one byte"]
)
def test_it_keeps_the_promises_of_a_tier(server, chunk_bytes):
    check_tier(lambda: emptied(server, server.url), chunk_bytes=chunk_bytes)


def test_a_chunk_that_is_written_anew_while_it_is_read_is_a_miss_and_stays(server, monkeypatch):
    """With other bytes, as encryption gives each write: the old header comes, then the new
    parts."""
    tier, other = emptied(server, server.url), emptied(server, server.url)
    old, new = bytearray(b"\1" * CHUNK_BYTES), bytearray(b"\2" * CHUNK_BYTES)
    assert tier.write(KEYS[0], memoryview(old))
    checksum = Form.checksum

    def written_anew(form, header, key, length):
        monkeypatch.setattr(Form, "checksum", checksum)
        assert other.write(key, memoryview(new))
        return checksum(form, header, key, length)

    monkeypatch.setattr(Form, "checksum", written_anew)
    into = bytearray(CHUNK_BYTES)
    assert tier.read(KEYS[0], memoryview(into)) is False
    assert tier.counts["corrupt"] == 0
    assert other.read(KEYS[0], memoryview(into)) is True and into == new


def test_it_keeps_them_over_a_unix_socket(server):
    check_tier(lambda: emptied(server, f"unix://{server.path}"), chunk_bytes=CHUNK_BYTES)


def test_it_keeps_them_over_tls_with_a_password():
    with RedisServer(tls=True) as server:
        with server.admin() as admin:
            admin.acl_setuser(
                "kv", enabled=True, passwords=["+p@ss/w"], categories=["+@all"], keys=["kvtier:*"]
            )
        url = f"rediss://kv:p%40ss%2Fw@127.0.0.1:{server.port}?ssl_ca_certs={server.certificate}"
        check_tier(lambda: emptied(server, url), chunk_bytes=CHUNK_BYTES)


@pytest.mark.slow
def test_it_keeps_them_on_a_cluster():
    with redis_cluster() as servers:

        def make():
            for server in servers:
                with server.admin() as admin:
                    admin.flushall()
            return servers[0].tier(f"redis+cluster://127.0.0.1:{servers[1].port}")

        check_tier(make, chunk_bytes=CHUNK_BYTES)
        tier = make()
        assert all(tier.write(key, chunk(key)) for key in KEYS)
        assert min(held_by(server) for server in servers) > 0, (
            "every node holds some of eight chunks"
        )
        assert tier.find(KEYS) == len(KEYS)
        assert sorted(tier.recovered()) == sorted(KEYS)
        with pytest.raises(TierError, match=r"write redis\+cluster://"):
            servers[0].tier()


def held_by(server):
    with server.admin() as admin:
        return int(admin.dbsize())


def emptied(server, url):
    with server.admin() as admin:
        admin.flushall()
    return server.tier(url)


# ---- sharing, names, the header ------------------------------------------------------------------


def test_two_tiers_on_one_redis_share(server):
    one, two = server.tier(), server.tier()
    assert one.write(KEYS[0], chunk(KEYS[0]))
    assert two.find(KEYS) == 1
    assert holds(two, KEYS[0])
    assert two.write(KEYS[0], chunk(KEYS[0])), "a second writer of one chunk does no harm"
    two.delete(KEYS[0])
    assert not holds(one, KEYS[0])


def test_the_header_is_written_last(server):
    tier = server.tier()
    with server.admin() as admin, admin.monitor() as monitor:
        tier.write(KEYS[0], chunk(KEYS[0]))
        seen = [monitor.next_command()["command"].split(" ")[:2] for _ in range(PARTS + 1)]
    assert [name for command, name in seen] == [
        name.decode()
        for name in [*FORM.part_names(KEYS[0], CHUNK_BYTES), FORM.header_name(KEYS[0])]
    ]


def test_parts_without_a_header_are_a_miss(server):
    tier = server.tier()
    with server.admin() as admin:
        for name, part in zip(
            FORM.part_names(KEYS[0], CHUNK_BYTES), FORM.split(chunk(KEYS[0])), strict=True
        ):
            admin.set(name, bytes(part))
    assert tier.find(KEYS) == 0
    assert not holds(tier, KEYS[0])
    assert holds_after_write(tier, KEYS[0])


def holds_after_write(tier, key):
    return tier.write(key, chunk(key)) and holds(tier, key) is True


def test_models_and_part_sizes_do_not_meet(server):
    tier = server.tier()
    tier.write(KEYS[0], chunk(KEYS[0]))
    for form in (Form("kvtier", NAMESPACE[1:], PART_BYTES), Form("other", NAMESPACE, PART_BYTES)):
        other = server.tier(form=form)
        assert other.find(KEYS) == 0
        assert other.recovered() == []
        other.delete(KEYS[0])
    assert holds(tier, KEYS[0])
    other = server.tier(form=Form("kvtier", NAMESPACE, PART_BYTES + 1))
    assert not holds(other, KEYS[0]), (
        "a chunk in parts of another size is foreign, not readable by luck"
    )
    assert other.counts["corrupt"] == 1
    assert holds_after_write(other, KEYS[0])


def test_chunks_leave_after_their_ttl_the_header_first(server):
    server.tier(ttl_s=500).write(KEYS[0], chunk(KEYS[0]))
    with server.admin() as admin:
        header, *parts = [admin.pttl(name) for name in FORM.names(KEYS[0], CHUNK_BYTES)]
    assert 0 < header <= 500_000
    assert min(parts) > header
    server.tier().write(KEYS[0], chunk(KEYS[0]))
    with server.admin() as admin:
        assert {admin.pttl(name) for name in FORM.names(KEYS[0], CHUNK_BYTES)} == {-1}


def test_a_chunk_of_a_wrong_size_is_a_bug_of_the_caller(server):
    tier = server.tier()
    for size in (0, CHUNK_BYTES + 1):
        with pytest.raises(StateError, match=f"a chunk of {size} bytes"):
            tier.write(KEYS[0], memoryview(bytes(size)))


def test_after_close_nothing_is_held_and_nothing_connects(server):
    tier = server.tier()
    tier.write(KEYS[0], chunk(KEYS[0]))
    tier.close(KEYS)
    with server.admin() as admin:
        before = admin.info("stats")["total_connections_received"]
        assert not holds(tier, KEYS[0])
        assert not tier.write(KEYS[1], chunk(KEYS[1]))
        assert tier.find(KEYS) == 0
        assert admin.info("stats")["total_connections_received"] == before


# ---- room and order ------------------------------------------------------------------------------


def test_a_header_that_is_damaged_or_anothers_makes_its_chunk_nobodys(server):
    """So no tenant's erasure takes it, because it may be another's. It is never served either."""
    tier, owner = server.tier(), owner_of(bytes(32), "acme")
    for key in KEYS:
        assert tier.write(key, chunk(key), owner)
    assert tier.owners(KEYS) == [owner] * len(KEYS)
    assert tier.held_of(tenant("else")) == ([], True)
    names = [FORM.header_name(key) for key in KEYS]
    with server.admin() as admin:
        admin.setrange(names[0], 80, b"\xff")
        admin.set(names[1], b"")
        admin.delete(names[2])
        admin.hset(names[2], "a", "hash")
        admin.copy(names[4], names[3], replace=True)
    assert tier.owners(KEYS) == [UNOWNED] * 4 + [owner] * (len(KEYS) - 4)
    assert tier.held_of(tenant("else")) == ([], False), "they were left"
    found, whole = tier.held_of(tenant("acme"))
    assert (sorted(found), whole) == (sorted(KEYS[4:]), False)
    assert sorted(tier.held_of(None)[0]) == sorted(KEYS)
    server.kill()
    assert tier.owners(KEYS[:1]) == [UNOWNED]
    assert tier.held_of(None) == ([], False)
    server.start()
    tier.close()


@pytest.mark.parametrize("chunk_bytes", [7 << 20, 1 << 20, 300_000])
def test_a_chunk_takes_the_room_it_is_counted_for(server, chunk_bytes):
    form = Form("kvtier", NAMESPACE)
    tier = server.tier(form=form, size=chunk_bytes)
    key = ChunkLayout(bytes(32), 1, 1, (chunk_bytes,)).keys([0])[0]
    assert tier.write(key, chunk(key, chunk_bytes))
    with server.admin() as admin:
        taken = sum(admin.memory_usage(name) for name in form.names(key, chunk_bytes))
    assert 0.99 * form.room(chunk_bytes) < taken <= form.room(chunk_bytes)
    assert form.room(chunk_bytes) < 1.15 * chunk_bytes + 4096


def test_what_is_recovered_is_coldest_first_and_no_parent_before_its_child(server):
    """Two prompts. Of the first the leaf was used last, of the second the root."""
    first, second = KEYS[:3], ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys([9, 9])
    tier = server.tier()
    for key in (*first, *second):
        tier.write(key, chunk(key))
    idle = dict(zip([*first, *second], [400, 300, 100, 200, 500], strict=True))
    with server.admin() as admin:
        for key, seconds in idle.items():
            age(admin, FORM.header_name(key), seconds)
    assert server.tier().recovered() == [second[1], second[0], first[2], first[1], first[0]]
    assert server.tier(capacity=3).recovered() == [first[2], first[1], first[0]], (
        "our share: the most recently used"
    )


def test_a_stranger_s_keys_are_not_recovered(server):
    tier = server.tier()
    tier.write(KEYS[0], chunk(KEYS[0]))
    base = FORM.probe.removesuffix(b"probe")
    with server.admin() as admin:
        for name in (
            b"{",
            b"{zz}",
            b"{00}",
            b"{" + KEYS[1].hex().encode() + b"}x",
            b"{\xff}",
            b"x{00}:4096:0",
        ):
            admin.set(base + name, b"")
    assert tier.recovered() == [KEYS[0]]


def test_what_a_dead_writer_left_is_taken_away_after_a_minute(server):
    tier = server.tier()
    old, young, whole = KEYS[:3]
    for key in (old, young, whole):
        tier.write(key, chunk(key))
    with server.admin() as admin:
        for key in (old, young):
            admin.delete(FORM.header_name(key))
        for key in (old, whole):
            age(admin, FORM.part_names(key, CHUNK_BYTES)[0], 61)
        assert tier.recovered() == [whole]
        left = [admin.exists(*FORM.part_names(key, CHUNK_BYTES)) for key in (old, young, whole)]
    assert left == [0, PARTS, PARTS]


# ---- what the start says -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "maxmemory", "level", "words"),
    [
        ("noeviction", "1gb", logging.INFO, "kvtier alone decides what leaves"),
        ("noeviction", "10mb", logging.WARNING, "the limit is less than our budget"),
        ("allkeys-lru", "1gb", logging.WARNING, "cost 2 to 13 points"),
        ("allkeys-lru", "0", logging.INFO, "good as long as there is no limit"),
        ("allkeys-random", "1gb", logging.WARNING, "hit ratio falls far"),
        ("volatile-lru", "1gb", logging.INFO, "kvtier alone decides what leaves"),
    ],
)
def test_the_start_says_in_one_line_what_the_memory_settings_mean(
    server, caplog, policy, maxmemory, level, words
):
    with server.admin() as admin:
        admin.config_set("maxmemory-policy", policy)
        admin.config_set("maxmemory", maxmemory)
    with caplog.at_level(logging.INFO):
        server.tier(capacity=2000)
    (line,) = [record for record in caplog.records if "maxmemory" in record.getMessage()]
    assert line.levelno == level
    assert policy in line.getMessage()
    assert words in line.getMessage()


def test_without_a_budget_it_takes_nine_tenths_of_maxmemory(server):
    with pytest.raises(TierError, match="sets no maxmemory; give redis_bytes"):
        server.tier(capacity=None)
    with server.admin() as admin:
        admin.config_set("maxmemory", "10mb")
    tier = server.tier(capacity=None)
    assert tier.capacity == int(0.9 * (10 << 20)) // FORM.room(CHUNK_BYTES)


def test_a_budget_of_less_than_a_chunk_is_an_error(server):
    with pytest.raises(TierError, match=f"give at least {FORM.room(CHUNK_BYTES):,}"):
        server.tier(capacity=0)


@pytest.mark.parametrize(
    ("prefix", "namespace"),
    [("", b"x"), ("a*b", b"x"), ("a{b", b"x"), ("a", b""), ("a", bytes(33))],
)
def test_a_prefix_or_namespace_that_is_none_is_an_error(prefix, namespace):
    with pytest.raises(ConfigError, match="Redis"):
        Form(prefix, namespace)


def test_it_needs_no_package_of_redis(server):
    program = f"""
import sys
sys.modules["redis"] = sys.modules["hiredis"] = None
from kvtier.assemble import assemble
from kvtier.tiers.redis.parts import probe
from kvtier.tiers.redis.parts import RedisSection
from kvtier.core.chunk import ChunkLayout
from kvtier.config.keys import Config
from kvtier.started import Started
config = Config().with_keys(ram_bytes=1 << 20, redis_url="{server.url}", redis_bytes=1 << 24)
store = assemble(Started(config), ChunkLayout(bytes(32), 1, 1, (4096,)))
assert [tier.name for tier in store.tiers] == ["redis"]
store.close()
assert probe(RedisSection(url="{server.url}")).reachable.value
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)
