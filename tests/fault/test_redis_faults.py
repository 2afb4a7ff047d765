"""What a Redis that is gone, hangs, is full, loses or changes bytes does to RedisTier: it may
forget, it never lies."""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier.core.errors import TierError
from kvtier.tiers.breaker import OPENING_FAULTS
from kvtier.tiers.redis.layout import Form
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier
from tests.child_process import DEADLINE_S
from tests.clock import Clock
from tests.redis_server import (
    FORM,
    PART_BYTES,
    PARTS,
    RedisServer,
    hanging,
    make_certificate,
    redis_cluster,
)
from tests.tier_chunks import CHUNK_BYTES, KEYS, NAMESPACE, chunk, holds

pytestmark = pytest.mark.redis

LONG_WAIT_S = 100.0
"""More than any back-off."""
NAMES = FORM.names(KEYS[0], CHUNK_BYTES)


@pytest.fixture(scope="module")
def started():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(started):
    with started.admin() as admin:
        admin.flushall()
    return started


@pytest.fixture
def mortal():
    """A server of the test's own, to be paused, filled and killed."""
    with RedisServer() as server:
        yield server


def write(tier, index):
    return tier.write(KEYS[index], chunk(KEYS[index]))


# ---- gone, hung, back again ----------------------------------------------------------------------


def test_a_server_that_is_not_there_is_no_error_and_is_used_once_it_is(mortal):
    mortal.kill()
    clock = Clock()
    tier = mortal.tier(clock=clock)
    assert tier.recovered() == []
    assert not write(tier, 0)
    assert not holds(tier, KEYS[0])
    assert tier.find(KEYS) == 0
    assert tier.open_breakers == 1
    mortal.start()
    clock.now += LONG_WAIT_S
    assert write(tier, 0)
    assert holds(tier, KEYS[0])
    assert tier.open_breakers == 0


def test_a_server_that_hangs_is_left_alone_and_tried_again_after_a_while(mortal):
    clock = Clock()
    tier = mortal.tier(clock=clock)
    assert write(tier, 0)
    with hanging(mortal, tier):
        assert not holds(tier, KEYS[0])
        assert tier.find(KEYS) == 0
        assert not write(tier, 1)
        assert tier.open_breakers == 1
        failed = [tier.counts[f"failed_{what}"] for what in ("reads", "finds", "writes")]
        assert failed == [1, 1, 1]
    # The server answers again, and the tier does not ask: that is how we know that nobody waits for
    # it.
    assert (holds(tier, KEYS[0]), tier.find(KEYS), write(tier, 1)) == (None, 0, False)
    assert tier.counts["refused"] == 3
    with hanging(mortal, tier):
        clock.now += 0.5
        assert not holds(tier, KEYS[0]), "one call tries, and finds it still hung"
        clock.now += 0.9
        assert not holds(tier, KEYS[0])
        counts = tier.counts
        assert (counts["failed_reads"], counts["refused"]) == (2, 4), "the wait has doubled"
    clock.now += 0.2
    assert holds(tier, KEYS[0])
    assert tier.open_breakers == 0
    assert tier.counts["breaker_trips"] == 1


def test_a_server_that_was_killed_and_came_back_empty_is_used_again(mortal):
    clock = Clock()
    tier = mortal.tier(clock=clock)
    assert write(tier, 0)
    mortal.kill()
    assert [holds(tier, KEYS[0]) for _ in range(4)] == [None] * 4
    mortal.start()
    clock.now += LONG_WAIT_S
    assert holds(tier, KEYS[0]) is False
    assert write(tier, 0)
    assert holds(tier, KEYS[0])


@pytest.mark.slow
def test_a_search_that_meets_a_dead_node_leaves_no_other_alone():
    with redis_cluster() as servers:
        tier = servers[0].tier(f"redis+cluster://127.0.0.1:{servers[0].port}")
        healthy = tier._servers.node_of(b"")
        for server in servers:
            if not healthy.endswith(f":{server.port}"):
                server.kill()
        for _ in range(OPENING_FAULTS):
            assert not tier.held_of(None)[1]
        assert healthy not in tier.nodes_away


@pytest.mark.slow
def test_a_slot_that_moved_to_another_node_is_found_there():
    with redis_cluster() as servers:
        tier = servers[0].tier(f"redis+cluster://127.0.0.1:{servers[0].port}")
        assert tier.find(KEYS) == 0, "the map of the cluster is known now"
        with ExitStack() as stack:
            admins = [stack.enter_context(server.admin()) for server in servers]
            slot = admins[0].execute_command("CLUSTER KEYSLOT", FORM.header_name(KEYS[0]))
            owners = [slot in owned_slots(admin) for admin in admins]
            other = admins[owners.index(False)].execute_command("CLUSTER MYID")
            for admin in admins:
                admin.execute_command("CLUSTER SETSLOT", slot, "NODE", other)
        assert write(tier, 0), "the old node says where the slot is"
        assert holds(tier, KEYS[0])
        assert tier.open_breakers == 0


def owned_slots(admin):
    nodes = admin.execute_command("CLUSTER NODES").values()
    (mine,) = [node for node in nodes if "myself" in node["flags"]]
    return {slot for first, last in mine["slots"] for slot in range(int(first), int(last) + 1)}


# ---- deletes that could not be made --------------------------------------------------------------


def test_a_delete_while_it_hangs_is_made_good_later(mortal):
    clock = Clock()
    tier = mortal.tier(clock=clock)
    assert all(write(tier, index) for index in range(4))
    with hanging(mortal, tier):
        for key in KEYS[:3]:
            tier.delete(key)
    tier.delete(KEYS[3])  # not even tried: the breaker is open
    clock.now += LONG_WAIT_S
    assert write(tier, 4), "the first call that succeeds pays what is owed"
    with mortal.admin() as admin:
        assert admin.dbsize() == PARTS + 2, "its own, and the sign"


def test_a_write_cancels_the_delete_that_is_owed(mortal):
    clock = Clock()
    tier = mortal.tier(clock=clock)
    with hanging(mortal, tier):
        for _ in range(3):
            tier.delete(KEYS[0])
    clock.now += LONG_WAIT_S
    assert write(tier, 0)
    assert write(tier, 1)
    assert holds(tier, KEYS[0])


def test_a_write_waits_for_no_delete_and_is_not_hit_by_one(mortal):
    """While an owed delete of a key is under way, a new chunk under that key would fall with the
    old one."""
    tier = mortal.tier()
    assert write(tier, 0)
    with hanging(mortal, tier):
        tier.delete(KEYS[0])
    with mortal.admin() as admin:
        admin.client_pause(60_000, all=False)  # holds what changes keys, and lets reads through
        payer = threading.Thread(target=tier.find, args=(KEYS,))
        payer.start()
        while not tier._owed.going:
            payer.join(0.001)
        assert not write(tier, 0)
        assert tier.counts["refused"] == 1
        admin.client_unpause()
        payer.join()
    assert write(tier, 0)
    assert holds(tier, KEYS[0])


def test_a_write_that_broke_off_leaves_nothing_for_good(mortal):
    clock = Clock()
    tier = mortal.tier(clock=clock)
    with hanging(mortal, tier):
        assert not write(tier, 0)
    assert write(tier, 1)
    with mortal.admin() as admin:
        assert admin.dbsize() == PARTS + 2, "its own, and the sign"
    assert not holds(tier, KEYS[0])


# ---- full, or refusing ---------------------------------------------------------------------------


def fill(admin, room):
    """Set a limit that leaves ``room`` bytes."""
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + room)


def test_a_full_server_refuses_writes_whole_and_still_serves_reads(mortal):
    clock = Clock()
    tier = mortal.tier(clock=clock)
    assert write(tier, 0)
    with mortal.admin() as admin:
        fill(admin, 0)
        keys = admin.dbsize()
        assert not write(tier, 1)
        assert admin.dbsize() == keys, "no part of it stays"
        assert holds(tier, KEYS[0])
        assert tier.open_breakers == 0
        fill(admin, 100 << 20)
        assert not write(tier, 1)
        assert tier.counts["refused"] == 1, (
            "nobody sends megabytes to a full server again and again"
        )
        clock.now += LONG_WAIT_S
        assert write(tier, 1)
        assert write(tier, 2), "and it is full no longer"
    assert holds(tier, KEYS[1])


def test_a_server_that_fills_up_in_the_middle_of_a_chunk_keeps_no_part_and_is_sent_no_more(mortal):
    chunk_bytes = 16 << 20
    with mortal.admin() as admin:
        fill(admin, 4 << 20)
        tier = RedisTier(
            RedisServers(mortal.url, timeout_s=DEADLINE_S),
            Form("kvtier", NAMESPACE),
            1 << 30,
            chunk_bytes,
        )
        admin.config_resetstat()
        assert not tier.write(KEYS[0], chunk(KEYS[0], chunk_bytes))
        tier.close()
        told = admin.info("commandstats")["cmdstat_set"]
        assert admin.keys() == []
    assert told["calls"] > 0, "some parts got through"
    assert 0 < told["rejected_calls"] <= 2, "only what was under way when the first refusal came"


# ---- bytes that are not what was written ---------------------------------------------------------


HURTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "part evicted": (lambda admin: admin.delete(NAMES[2]), "evicted"),
    "header evicted": (lambda admin: admin.delete(NAMES[0]), "misses"),
    "bit of a part": (lambda admin: admin.setrange(NAMES[2], 7, "\0"), "corrupt"),
}
"""Every value of a chunk cut, lost, exchanged, and bit by bit: ``tests/trust/corruption.py``."""


@pytest.mark.parametrize("hurt", HURTS)
def test_what_redis_lost_or_changed_is_a_miss_counted_and_dropped(server, hurt):
    harm, count = HURTS[hurt]
    tier = server.tier()
    assert write(tier, 0)
    assert write(tier, 1)
    with server.admin() as admin:
        harm(admin)
        assert not holds(tier, KEYS[0])
        assert tier.counts[count] == 1
        assert tier.find(KEYS[:1]) == 0
        assert count == "misses" or admin.exists(*NAMES) == 0, "its room is free again"
    assert tier.open_breakers == tier.counts["failed_reads"] == 0, "the server itself is well"
    assert holds(tier, KEYS[1])
    assert write(tier, 0)
    assert holds(tier, KEYS[0])


def test_a_key_of_another_type_is_a_fault_not_a_crash(server):
    tier = server.tier()
    with server.admin() as admin:
        admin.rpush(NAMES[0], b"x")
    assert not holds(tier, KEYS[0])
    assert tier.counts["failed_reads"] == 1
    assert write(tier, 0), "SET replaces a key of any type"
    assert holds(tier, KEYS[0])


# ---- logins and TLS ------------------------------------------------------------------------------


def test_a_refused_login_is_said_at_the_start_without_the_password(caplog):
    with RedisServer(requirepass="right-word") as server:
        for url in (f"redis://:wrong-word@127.0.0.1:{server.port}", server.url):
            with pytest.raises(TierError, match="correct user and password in redis_url") as raised:
                server.tier(url)
            assert "word" not in str(raised.value).replace("password", "")
        tier = server.tier(f"redis://:right-word@127.0.0.1:{server.port}")
        assert write(tier, 0)
    assert "-word" not in caplog.text


@pytest.mark.parametrize(
    "missing", ["set", "get", "getrange", "exists", "unlink", "sadd", "srem", "pexpire"]
)
def test_a_right_that_is_missing_is_said_at_the_start(server, missing):
    with server.admin() as admin:
        rights = [f"-{missing}" if missing in right else right for right in RIGHTS]
        admin.acl_setuser(
            "kv", reset=True, enabled=True, passwords=["+word"], commands=rights, keys=["kvtier:*"]
        )
    with pytest.raises(TierError, match=f"to run the '{missing}' command"):
        server.tier(f"redis://kv:word@127.0.0.1:{server.port}")


RIGHTS = [
    *("+set", "+get", "+getrange", "+exists", "+unlink", "+sadd", "+srem", "+pexpire"),
    *("+scan", "+info", "+object|idletime", "+srandmember"),
]


def test_the_rights_it_asks_for_are_enough(server):
    with server.admin() as admin:
        admin.acl_setuser(
            "kv", reset=True, enabled=True, passwords=["+word"], commands=RIGHTS, keys=["kvtier:*"]
        )
        admin.acl_log_reset()
        tier = server.tier(f"redis://kv:word@127.0.0.1:{server.port}")
        assert write(tier, 0)
        assert holds(tier, KEYS[0])
        assert tier.find(KEYS) == 1
        assert tier.recovered() == KEYS[:1]
        tier.delete(KEYS[0])
        assert admin.acl_log() == []


def test_a_user_without_info_works_and_is_told_nothing(server, caplog):
    with server.admin() as admin:
        rights = [right for right in RIGHTS if right != "+info"]
        admin.acl_setuser(
            "kv", reset=True, enabled=True, passwords=["+word"], commands=rights, keys=["kvtier:*"]
        )
    with caplog.at_level(logging.INFO):
        assert write(server.tier(f"redis://kv:word@127.0.0.1:{server.port}"), 0)
    assert "maxmemory" not in caplog.text


def test_tls_with_a_ca_that_did_not_sign_the_server_is_refused():
    with RedisServer(tls=True) as server:
        other, _ = make_certificate(server.folder, "other")
        good = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={server.certificate}"
        assert write(server.tier(good), 0)
        for url in (
            good.replace(str(server.certificate), str(other)),
            good.partition("?")[0],
            good.replace("127.0.0.1", "localhost"),
        ):
            with pytest.raises(TierError, match="give the server's CA"):
                server.tier(url)


def test_a_cluster_url_to_a_server_that_is_none_is_said_at_the_start(server):
    with pytest.raises(TierError, match="no Redis Cluster; write redis://"):
        server.tier(f"redis+cluster://127.0.0.1:{server.port}")


def test_parts_that_hold_redis_for_long_are_not_sent():
    assert (
        max(part.nbytes for part in Form("kvtier", NAMESPACE).split(memoryview(bytes(64 << 20))))
        <= 1 << 20
    )
    assert PART_BYTES < CHUNK_BYTES
