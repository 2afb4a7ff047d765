"""Wire against whatever bytes come back: it yields what a well-formed reply holds, or ends, or
raises. Never hangs, never writes outside, never makes more of a header than was asked for, never
leaves a connection in use whose replies nobody read."""

import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.redis.errors import (
    FAULTS,
    MovedError,
    MovingError,
    ProtocolError,
    RedisError,
    RefusedError,
    SetupError,
    WrongSizeError,
)
from kvtier.tiers.redis.servers import MOST_NODES, cluster_map, slot_of
from kvtier.tiers.redis.startup import NodeFacts, facts_of, limit_of
from kvtier.tiers.redis.wire import INFO, SCANNED, SLOTS, SMALL, Wire

SIZE = 12
VALUE = bytes(range(SIZE))
GOOD = b"$%d\r\n%s\r\n" % (SIZE, VALUE)
PIECES = [
    GOOD,
    b"$-1\r\n",
    b"$3\r\nabc\r\n",
    b"$130\r\n",
    b"-ERR no\r\n",
    b"-MOVED 1 host:1\r\n",
    b":1\r\n",
    b"*0\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n",
    b"*100000000\r\n",
    b"$99999999999\r\n",
    b"*1\r\n*1\r\n*1\r\n*1\r\n",
    b"+OK\r\n",
    b"\r\n",
]


class Socket:
    """Replies as they come: at most ``step`` bytes at once, then the end of the stream."""

    def __init__(self, data, step=1000):
        self.data, self.step = data, step
        self.closed = False

    def recv_into(self, memory):
        got = self.recv(memory.nbytes)
        memory[: len(got)] = got
        return len(got)

    def recv(self, most):
        got, self.data = self.data[: min(self.step, most)], self.data[min(self.step, most) :]
        return got

    def sendall(self, data):
        """Nobody listens."""

    def sendmsg(self, pieces):
        return sum(map(len, pieces))

    def settimeout(self, seconds):
        assert seconds > 0

    def close(self):
        self.closed = True


def on(data, step=1000, secrets=()):
    return Wire(Socket(data, step), 10.0, secrets)  # type: ignore[arg-type]


def values_in(data, names):
    """What a reader may take from the stream: whole values of the right size, up to the first other
    reply."""
    values: list[bytes] = []
    head = GOOD[: GOOD.index(VALUE)]
    while (
        len(values) < names and data.startswith(head) and data[len(GOOD) - 2 : len(GOOD)] == b"\r\n"
    ):
        values.append(data[len(head) : len(head) + SIZE])
        data = data[len(GOOD) :]
    return values


@given(
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=6),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_any_reply_is_taken_for_what_it_is(pieces, step, names):
    data = b"".join(pieces)
    room = memoryview(bytearray(b"\xee" * (names + 2) * SIZE))
    into = [room[(1 + index) * SIZE : (2 + index) * SIZE] for index in range(names)]
    socket = Socket(data, step)
    wire = Wire(socket, 10.0)  # type: ignore[arg-type]
    arrived: list[bytes] = []
    try:
        arrived.extend(map(bytes, wire.get([b"name%d" % index for index in range(names)], into)))
        assert not socket.closed
        read = data[: len(data) - len(socket.data)]
        assert len(arrived) == names or b"$-1\r\n" in read, (
            "it ends early only where a name does not exist"
        )
    except (*FAULTS, WrongSizeError):
        assert socket.closed
    assert arrived == values_in(data, names)
    assert bytes(room[:SIZE]) == bytes(room[-SIZE:]) == b"\xee" * SIZE


def test_nobody_gets_a_connection_whose_replies_were_not_read():
    socket = Socket(GOOD * 3)
    wire = Wire(socket, 10.0)  # type: ignore[arg-type]
    memories = wire.get([b"a", b"b", b"c"], [memoryview(bytearray(SIZE)) for _ in range(3)])
    next(memories)
    memories.close()
    assert socket.closed


@given(
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=6),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([SMALL, INFO, SCANNED]),
)
def test_any_answer_to_small_commands_is_replies_or_a_fault(pieces, step, commands, bounds):
    with suppress(*FAULTS):
        replies = on(b"".join(pieces), step).ask([("EXISTS", b"name")] * commands, bounds)
        assert len(replies) == commands
        assert all(_within(reply, bounds.depth) for reply in replies)


def _within(reply, depth):
    if isinstance(reply, list):
        return depth > 0 and all(_within(each, depth - 1) for each in reply)
    return isinstance(reply, bytes | int | RefusedError | None)


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=30), max_size=8), st.integers(1, 40))
def test_any_answer_to_a_scan_is_names_or_a_fault(pieces, step):
    with suppress(*FAULTS):
        for names in on(b"".join(pieces), step).scan(b"*"):
            assert all(isinstance(name, bytes) for name in names)


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=6), st.integers(1, 40))
def test_a_write_counts_as_done_only_when_every_part_was_acknowledged(pieces, step):
    data = b"".join(pieces)
    with suppress(*FAULTS):
        refusal = on(data, step).put([(b"a", memoryview(b"1")), (b"b", memoryview(b"2"))], None)
        assert (refusal is None) == data.startswith(b"+OK\r\n" * 2)


@pytest.mark.parametrize(
    ("answer", "bounds"),
    [
        (b"*100000000\r\n", SMALL),
        (b"*100000000\r\n", SCANNED),
        (b"*2\r\n$1\r\n0\r\n*99999\r\n", SCANNED),
        (b"*-2\r\n", SCANNED),
        (b"$4095\r\n" + bytes(4095) + b"\r\n", SMALL),
        (b"$1073741824\r\n", SMALL),
        (b"$1073741824\r\n", SCANNED),
        (b"$-2\r\n", SMALL),
        (b"*1\r\n" * 3, SCANNED),
        (b"*1\r\n" * 100_000, SCANNED),
        (b"+" + b"x" * 600, INFO),
        (b":" + b"9" * 20 + b"\r\n", SMALL),
        (b":1e3\r\n", SMALL),
        (b":1\r\n:2\r\n", SMALL),
        (b"$1\r\nab\r\n", SMALL),
    ],
)
def test_an_answer_of_more_than_was_asked_for_is_refused_at_its_header(answer, bounds):
    """At once: there is no more behind it, so whoever waits for more, or makes room for it, fails
    here."""
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        on(answer, 1 << 20).ask([("EXISTS", b"name")], bounds)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize(
    "answer",
    [
        b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n$-1\r\n",
        b"*2\r\n$1\r\nx\r\n*0\r\n",
        b"*2\r\n:0\r\n*0\r\n",
        b"*1\r\n$1\r\n0\r\n",
        b":0\r\n",
    ],
)
def test_a_scan_of_something_else_than_names_is_a_fault(answer):
    with pytest.raises(ProtocolError):
        list(on(answer).scan(b"*"))


def test_a_value_that_is_longer_than_it_says_ends_the_connection():
    """What follows is not a reply of its own."""
    with pytest.raises(ProtocolError):
        on(b"$1\r\naXX:1\r\n").ask([("GET", b"name")] * 2)
    with pytest.raises(WrongSizeError):
        list(
            on(GOOD[:-2] + b"XX" + GOOD).get(
                [b"a", b"b"], [memoryview(bytearray(SIZE)) for _ in range(2)]
            )
        )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("MOVED 5 host:7", MovedError),
        ("ASK 5 host:7", MovingError),
        ("TRYAGAIN later", MovingError),
        ("CLUSTERDOWN no slots", RedisError),
        ("MASTERDOWN link", RedisError),
        ("LOADING dataset", RedisError),
        ("NOAUTH Authentication required", SetupError),
        ("WRONGPASS invalid", SetupError),
    ],
)
@pytest.mark.parametrize("verb", ["ask", "put", "get"])
def test_an_error_that_is_not_about_the_command_is_none_of_its_replies(line, fault, verb):
    wire = on(b"-%s\r\n" % line.encode())
    with pytest.raises(fault) as raised:
        if verb == "ask":
            wire.ask([("EXISTS", b"name")])
        elif verb == "put":
            wire.put([(b"a", memoryview(b"1"))], None)
        else:
            list(wire.get([b"a"], [memoryview(bytearray(1))]))
    assert isinstance(raised.value, MovingError) == issubclass(fault, MovingError), (
        "the node itself is well"
    )


@pytest.mark.parametrize(
    ("line", "slot", "address"),
    [
        (b"MOVED 5 host:7", 5, ("host", 7)),
        (b"MOVED 5 ::1:7", 5, ("::1", 7)),
        (b"MOVED 5 :7", 5, None),
        (b"MOVED 16384 host:7", 0, None),
        (b"MOVED 99999999999 host:7", 0, None),
        (b"MOVED", 0, None),
        (b"MOVED x host:7", 0, None),
    ],
)
def test_where_a_slot_moved_is_read_or_not_known(line, slot, address):
    with pytest.raises(MovedError) as raised:
        on(b"-" + line + b"\r\n").ask([("EXISTS", b"name")])
    assert (raised.value.slot, raised.value.address) == (slot, address)


def test_an_error_of_the_server_is_printable_short_and_hides_the_password():
    (refusal,) = on(b"-ERR \x1b[31m no 's3cret'\t" + b"x" * 300 + b"\r\n", secrets=("s3cret",)).ask(
        [("INFO",)]
    )
    assert isinstance(refusal, RefusedError) and refusal.code == "ERR"
    text = str(refusal)
    assert "s3cret" not in text and "***" in text
    assert text.isascii() and text.isprintable() and len(text) <= 200


# ---- what replies mean ---------------------------------------------------------------------------

REPLIES = st.recursive(
    st.none() | st.integers(-(10**18), 10**18) | st.binary(max_size=12) | st.integers(0, SLOTS),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


@given(
    REPLIES
    | st.lists(
        st.tuples(st.integers(0, SLOTS), st.integers(0, SLOTS), REPLIES).map(list), max_size=4
    )
)
def test_any_map_of_a_cluster_is_whole_or_refused(reply):
    with suppress(ProtocolError):
        drawn = cluster_map(reply, "asked")
        assert len(drawn) == SLOTS
        assert all(one is None or (one[0] and 0 < one[1] < 65536) for one in drawn)


def test_a_map_says_which_node_has_a_slot():
    reply = [
        [0, 99, [b"a", 7000, b"id"], [b"replica", 7001, b"id"]],
        [100, 100, [b"", 7002, b"id"]],
    ]
    drawn = cluster_map(reply, "asked")
    assert drawn[0] == drawn[99] == ("a", 7000)
    assert drawn[100] == ("asked", 7002), "a node that does not know its own name"
    assert set(drawn[101:]) == {None}


@pytest.mark.parametrize(
    "line", [[0, SLOTS, [b"a", 1]], [5, 4, [b"a", 1]], [-1, 4, [b"a", 1]], [0, 1, [b"a", 0]], [0]]
)
def test_a_map_with_a_line_that_is_none_is_refused(line):
    with pytest.raises(ProtocolError):
        cluster_map([line], "asked")


def test_a_map_of_very_many_nodes_is_refused():
    with pytest.raises(ProtocolError, match="more than"):
        cluster_map(
            [[slot, slot, [b"host%d" % slot, 1]] for slot in range(MOST_NODES + 2)], "asked"
        )


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        (b"a{tag}b", b"tag"),
        (b"{tag}", b"tag"),
        (b"a{}b", b"a{}b"),
        (b"a{tag}{x}", b"tag"),
        (b"a{b", b"a{b"),
    ],
)
def test_a_hash_tag_alone_decides_the_slot(name, same_as):
    assert slot_of(b"123456789") == 12739, "the specification's example"
    assert slot_of(name) == (
        slot_of(b"{" + same_as + b"}") if b"{" not in same_as else slot_of(same_as)
    )


@given(st.binary(max_size=200) | st.none() | st.integers())
def test_any_answer_to_info_is_facts(info):
    assert isinstance(facts_of(info), NodeFacts)


def test_numbers_and_words_of_info_that_make_no_sense_are_none():
    assert facts_of(
        b"maxmemory:100\r\nmaxmemory_policy:noeviction\r\ncluster_enabled:1\r\nused_memory:7\r\n"
    ) == NodeFacts(100, 7, "noeviction", True)
    garbage = b"maxmemory:many\r\nmaxmemory_policy:\x1b[31m\nWARNING forged\r\nused_memory:-1\r\n"
    assert facts_of(garbage) == NodeFacts()
    assert facts_of(b"maxmemory:" + b"9" * 5000) == NodeFacts()


def test_memory_of_a_cluster_is_known_when_every_node_tells_it():
    assert limit_of([NodeFacts(maxmemory=1), NodeFacts(maxmemory=2)]) == 3
    assert limit_of([NodeFacts(maxmemory=1), NodeFacts(maxmemory=0)]) == 0, "a node without a limit"
    assert limit_of([NodeFacts(maxmemory=1), NodeFacts()]) is None
    assert limit_of([]) is None
