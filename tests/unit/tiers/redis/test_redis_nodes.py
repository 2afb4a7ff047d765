"""Which server is asked: seeds that are down, slots that move, a primary that changes, nodes that
fail for themselves.

The servers answer what the test says, on real sockets: what a real cluster does is in
    tests/integration."""

import socket
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.core.errors import TierError
from kvtier.tiers.redis.connections import ConnectionFactory
from kvtier.tiers.redis.errors import RedisError
from kvtier.tiers.redis.parts import RedisSection, probe
from kvtier.tiers.redis.servers import ClusterNodes, RedisServers, SentinelNodes, slot_of
from kvtier.tiers.redis.startup import node_facts
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.url import parse
from tests.attack.redis_cluster import slow_cluster
from tests.child_process import DEADLINE_S
from tests.clock import Clock
from tests.redis_server import FORM
from tests.scripted_redis import Answer, bulk, cluster_slots, primary, scripted
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk

SHORT_S = 1.0
"""A time-out of which some is waited out, and in which those who are well answer."""
HELD = b":1\r\n"
LOW = [key for key in KEYS if slot_of(FORM.header_name(key)) < 8192]
HIGH = [key for key in KEYS if key not in LOW]


@contextmanager
def silent():
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def two(stack):
    """What each of a cluster's two nodes answers, and their ports."""
    first: dict[bytes, Answer] = {}
    second: dict[bytes, Answer] = {}
    ports = [stack.enter_context(scripted(answers)) for answers in (first, second)]
    first[b"CLUSTER"] = second[b"CLUSTER"] = cluster_slots(*ports)
    return first, second, ports


def opened(stack, kind, *ports, clock=None, patient=True):
    seeds = ",".join(f"127.0.0.1:{port}" for port in ports)
    clock = clock or Clock()
    servers = RedisServers(
        f"redis+{kind}://{seeds}{'/main' if kind == 'sentinel' else ''}",
        timeout_s=DEADLINE_S if patient else SHORT_S,
        clock=clock,
    )
    return stack.enter_context(closing(RedisTier(servers, FORM, 1 << 20, CHUNK_BYTES, clock=clock)))


def test_both_halves_have_chunks():
    assert len(LOW) > 1 and len(HIGH) > 1


# ---- seeds ---------------------------------------------------------------------------------------


def test_seeds_that_are_down_or_hang_are_passed_over_and_asked_last_from_then_on(stack, two):
    _, _, ports = two
    hanging = stack.enter_context(silent())
    tier = opened(stack, "cluster", free_port(), hanging, ports[0], patient=False)
    tier.find(KEYS[:1])  # draws the map, where the start could not
    assert {tier._servers.node_of(FORM.header_name(key)) for key in KEYS} == {
        f"127.0.0.1:{port}" for port in ports
    }


def test_a_seed_that_hangs_delays_the_first_call_only():
    with silent() as hanging, scripted({b"CLUSTER": cluster_slots(7000)}) as well:
        url = parse(f"redis+cluster://127.0.0.1:{hanging},127.0.0.1:{well}")
        nodes = ClusterNodes(url, ConnectionFactory(url, url.login, 0, SHORT_S))
        assert nodes.every() == (("127.0.0.1", 7000),)
        assert nodes._candidates[0] == ("127.0.0.1", well), (
            "who answered is asked first the next time"
        )
        assert nodes._candidates[-1] == ("127.0.0.1", hanging)


def test_no_seed_at_all_is_a_fault(stack):
    tier = opened(stack, "cluster", free_port(), free_port())
    assert tier.find(KEYS) == 0
    assert tier.counts["failed_finds"] > 0


def test_what_was_known_stays_in_use_while_nobody_says_where_the_nodes_are(stack, two):
    first, second, ports = two
    tier = opened(stack, "cluster", *ports)
    first[b"EXISTS"] = second[b"EXISTS"] = HELD
    assert tier.find(KEYS) == len(KEYS)
    first[b"CLUSTER"] = second[b"CLUSTER"] = b"-ERR not now\r\n"
    tier._servers.suspect()
    assert tier.find(KEYS) == len(KEYS)


def test_one_node_of_a_cluster_is_not_taken_for_a_server(stack):
    node = stack.enter_context(scripted({b"INFO": bulk("maxmemory:100\r\ncluster_enabled:1\r\n")}))
    url = f"redis://127.0.0.1:{node}"
    with pytest.raises(TierError, match=r"write redis\+cluster://"):
        RedisTier(RedisServers(url, timeout_s=DEADLINE_S), FORM, 1 << 20, CHUNK_BYTES)
    seen = probe(RedisSection(url=url))
    assert seen.reachable.value is False and "write redis+cluster://" in seen.reachable.source


# ---- many nodes ----------------------------------------------------------------------------------


def test_a_cluster_of_many_slow_nodes_does_not_hold_up_a_start(stack):
    clock = Clock()

    def delay():
        clock.now += 0.8

    url, asked = stack.enter_context(slow_cluster(60, delay))
    servers = RedisServers(url, timeout_s=DEADLINE_S, clock=clock)
    tier = stack.enter_context(closing(RedisTier(servers, FORM, 1 << 20, CHUNK_BYTES, clock=clock)))
    assert asked.info <= 8, "five seconds, and the answer that was waited for"
    assert tier.counts["failed_finds"] == 1
    assert tier.recovered() == []
    assert asked.scan <= 26
    begun = clock.now
    assert tier.held_of(None) == ([], False)
    assert clock.now - begun < 45


def test_without_a_size_a_cluster_that_is_too_slow_has_no_room_and_says_what_to_give(stack):
    clock = Clock()

    def delay():
        clock.now += 3

    url, _ = stack.enter_context(slow_cluster(8, delay))
    servers = RedisServers(url, timeout_s=DEADLINE_S, clock=clock)
    tier = stack.enter_context(closing(RedisTier(servers, FORM, None, CHUNK_BYTES, clock=clock)))
    assert tier.capacity == 0 and "redis_bytes does not say it" in tier.trouble
    again = stack.enter_context(closing(RedisServers(url, timeout_s=DEADLINE_S, clock=clock)))
    with pytest.raises(RedisError, match="2 of 8 nodes were asked in 5 s"):
        node_facts(again)


# ---- slots that move -----------------------------------------------------------------------------


def test_a_slot_that_moved_is_followed_in_the_same_call(stack, two):
    first, second, ports = two
    tier = opened(stack, "cluster", *ports)
    second[b"EXISTS"] = HELD
    first[b"EXISTS"] = b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(FORM.header_name(LOW[0])), ports[1])
    assert tier.find(LOW[:1]) == 1
    assert tier.counts["failed_finds"] == 0
    assert tier._servers.node_of(FORM.header_name(LOW[0])) == f"127.0.0.1:{ports[1]}", (
        "and known from then on"
    )
    assert tier._servers.node_of(FORM.header_name(LOW[1])) == f"127.0.0.1:{ports[0]}", (
        "for this slot only"
    )


def test_nobody_is_followed_to_a_server_that_is_not_on_the_map(stack, two):
    """One node's word is not enough: the login would go wherever it says."""
    first, _, ports = two
    asked: list[socket.socket] = []
    stranger = stack.enter_context(scripted({b"EXISTS": asked.append}))
    tier = opened(stack, "cluster", *ports)
    first[b"EXISTS"] = b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(FORM.header_name(LOW[0])), stranger)
    assert tier.find(LOW[:1]) == 0
    assert not asked


def test_a_new_node_is_found_by_the_map_drawn_anew(stack, two):
    first, second, ports = two
    new = stack.enter_context(scripted({b"EXISTS": HELD}))
    tier = opened(stack, "cluster", *ports)
    first[b"EXISTS"] = b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(FORM.header_name(LOW[0])), new)
    first[b"CLUSTER"] = second[b"CLUSTER"] = cluster_slots(new, ports[1])
    assert tier.find(LOW[:1]) == 1
    assert f"127.0.0.1:{ports[0]}" not in tier._servers.nodes()


@pytest.mark.parametrize("word", ["ASK", "TRYAGAIN"])
def test_names_that_move_just_now_are_away_and_the_node_is_well(stack, two, word):
    first, _, ports = two
    tier = opened(stack, "cluster", *ports)
    first[b"GET"] = first[b"EXISTS"] = b"-%s 1 127.0.0.1:%d\r\n" % (word.encode(), ports[1])
    into = memoryview(bytearray(CHUNK_BYTES))
    assert [tier.read(LOW[0], into) for _ in range(5)] == [None] * 5, "not a miss: it is somewhere"
    assert tier.open_breakers == 0
    assert tier.counts["refused"] == 0


# ---- nodes fail for themselves -------------------------------------------------------------------


def test_a_node_that_is_away_is_left_alone_and_the_others_are_not(stack, two):
    first, second, ports = two
    clock = Clock()
    tier = opened(stack, "cluster", *ports, clock=clock)
    second[b"EXISTS"] = HELD
    first[b"EXISTS"] = b"-LOADING the dataset\r\n"
    assert tier.may_read(LOW[0])
    assert [tier.find(LOW[:1]) for _ in range(5)] == [0] * 5
    assert tier.open_breakers == 1
    assert [*tier.nodes_away] == [f"127.0.0.1:{ports[0]}"], "the one that failed has a name"
    assert (tier.counts["failed_finds"], tier.counts["refused"]) == (3, 2)
    assert tier.find(HIGH[:1]) == 1
    assert [tier.may_read(LOW[0]), tier.may_read(HIGH[0])] == [False, True]
    clock.now += 100.0
    assert [tier.may_read(LOW[0]), tier.may_read(LOW[0])] == [True, False], "one read tries it"
    assert tier.may_read(HIGH[0])


def test_a_node_that_is_full_is_sent_no_writes_and_the_others_are(stack, two):
    first, _, ports = two
    clock = Clock()
    tier = opened(stack, "cluster", *ports, clock=clock)
    first[b"SET"] = b"-OOM command not allowed\r\n"
    assert [tier.write(LOW[0], chunk(LOW[0])) for _ in range(3)] == [False] * 3
    assert (tier.counts["failed_writes"], tier.counts["refused"]) == (1, 2), "it is not asked again"
    assert tier.write(HIGH[0], chunk(HIGH[0]))
    del first[b"SET"]
    clock.now += 100.0
    assert tier.write(LOW[0], chunk(LOW[0]))


def test_nodes_that_left_the_cluster_are_forgotten(stack, two):
    first, second, ports = two
    clock = Clock()
    tier = opened(stack, "cluster", *ports, clock=clock)
    first[b"EXISTS"] = b"-LOADING the dataset\r\n"
    for _ in range(3):
        tier.find(LOW[:1])
    assert tier.open_breakers == 1
    new = stack.enter_context(scripted({b"EXISTS": HELD}))
    second[b"CLUSTER"] = first[b"CLUSTER"] = cluster_slots(new, ports[1])
    tier._servers._nodes.moved(0, None)
    assert tier.find(HIGH[:1]) == 0  # draws the map
    assert tier.find(LOW[:1]) == 1
    assert tier.open_breakers == 0
    assert f"127.0.0.1:{ports[0]}" not in tier._health._nodes


# ---- Sentinel ------------------------------------------------------------------------------------


def test_sentinel_is_asked_again_when_the_primary_fails(stack):
    old = stack.enter_context(scripted({b"EXISTS": b"-LOADING the dataset\r\n"}))
    new = stack.enter_context(scripted({b"EXISTS": HELD}))
    answers: dict[bytes, Answer] = {b"SENTINEL": primary(old)}
    sentinel = stack.enter_context(scripted(answers))
    clock = Clock()
    tier = opened(stack, "sentinel", free_port(), sentinel, clock=clock)
    assert tier.find(KEYS[:1]) == 0
    answers[b"SENTINEL"] = primary(new)
    clock.now += 100.0
    assert tier.find(KEYS[:1]) == 1


def test_a_primary_that_became_a_replica_is_not_written_to_for_ever(stack):
    old = stack.enter_context(
        scripted({b"SET": b"-READONLY You can't write against a read only replica.\r\n"})
    )
    new = stack.enter_context(scripted({}))
    answers: dict[bytes, Answer] = {b"SENTINEL": primary(old)}
    sentinel = stack.enter_context(scripted(answers))
    clock = Clock()
    tier = opened(stack, "sentinel", sentinel, clock=clock)
    assert not tier.write(KEYS[0], chunk(KEYS[0]))
    answers[b"SENTINEL"] = primary(new)
    clock.now += 100.0
    assert tier.write(KEYS[0], chunk(KEYS[0]))


def test_a_primary_that_is_well_is_used_while_no_sentinel_answers(stack):
    well = stack.enter_context(scripted({b"EXISTS": HELD}))
    answers: dict[bytes, Answer] = {b"SENTINEL": primary(well)}
    sentinel = stack.enter_context(scripted(answers))
    url = parse(f"redis+sentinel://127.0.0.1:{sentinel}/main")
    clock = Clock()
    nodes = SentinelNodes(url, ConnectionFactory(url, url.login, 0, DEADLINE_S), clock)
    assert nodes.of(b"name") == ("127.0.0.1", well)
    answers[b"SENTINEL"] = b"*-1\r\n"
    nodes.suspect()
    clock.now += 100.0
    assert nodes.of(b"name") == ("127.0.0.1", well)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"*-1\r\n", "knows no service 'main'"),
        (b"-ERR unknown command 'SENTINEL'\r\n", "is no Sentinel"),
    ],
)
def test_a_sentinel_that_cannot_help_is_said_at_the_start(stack, answer, words):
    sentinel = stack.enter_context(scripted({b"SENTINEL": answer}))
    with pytest.raises(TierError, match=words):
        opened(stack, "sentinel", sentinel, free_port())


@pytest.mark.parametrize(
    "answer",
    [b"*2\r\n$1\r\nh\r\n$1\r\nx\r\n", b"*1\r\n$1\r\nh\r\n", b":1\r\n", b"*3\r\n:1\r\n:1\r\n:1\r\n"],
)
def test_a_sentinel_s_word_that_is_no_address_is_a_fault(stack, answer):
    sentinel = stack.enter_context(scripted({b"SENTINEL": answer}))
    url = parse(f"redis+sentinel://127.0.0.1:{sentinel}/main")
    with pytest.raises(RedisError):
        SentinelNodes(url, ConnectionFactory(url, url.login, 0, SHORT_S)).every()
