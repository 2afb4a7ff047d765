"""A server that is no Redis, or wants to harm: over a real socket, on every road. It may cost
chunks and the time that was promised. No memory, no thread, no error that looks like a bug, and no
line in a log that it makes up."""

import logging
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvtier.assemble import assemble
from kvtier.autoconfig.facts import Facts
from kvtier.autoconfig.start import measure
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import TierError
from kvtier.core.tenant import UNOWNED
from kvtier.started import Started
from kvtier.tiers.redis.layout import CHECKSUM_BYTES
from kvtier.tiers.redis.parts import Redis, RedisSection, findings, probe
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier
from tests.clock import Clock
from tests.redis_server import FORM, PART_BYTES
from tests.scripted_redis import Answer, scripted
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk

SHORT_S = 0.2
GENEROUS_S = 100 * SHORT_S
"""Several times what :class:`RedisServers` promises of a call that must first connect and ask where
the nodes are."""
MEMORY = 24 << 20
"""Less than any of these servers wants us to take. A page of SCAN may be 16 MiB."""


def dribble(begin, pause_s=SHORT_S / 10):
    """``begin``, then a byte at a time, for longer than any call may take: each comes sooner than
    any time-out of a single byte."""

    def answer(client):
        client.sendall(begin)
        until = time.monotonic() + 1.2 * GENEROUS_S
        while time.monotonic() < until:
            time.sleep(pause_s)
            client.sendall(b"1")

    return answer


def silence(client):
    while client.recv(1 << 16):
        pass


HEADER = FORM.header(KEYS[0], CHUNK_BYTES, bytes(CHECKSUM_BYTES), UNOWNED)
HOSTILE: dict[str, Answer] = {
    "a list of a hundred million": b"*100000000\r\n",
    "a list of ten million, come in part": b"*10000000\r\n" + b"$-1\r\n" * 100_000,
    "a value of a gigabyte": b"$1073741824\r\n" + bytes(1 << 16),
    "lists within lists": b"*1\r\n" * 200_000,
    "an endless line": b"+" + b"x" * (1 << 20),
    "an endless error": b"-" + b"x" * (1 << 20),
    "dribbled digits": dribble(b":"),
    "a dribbled error": dribble(b"-ERR ", SHORT_S / 2),
    "a dribbled value": dribble(b"$4000\r\n"),
    "a dribbled list": dribble(b"*2\r\n$1\r\n0\r\n*3\r\n$90\r\n"),
    "a header, and a dribbled part": dribble(
        b"$%d\r\n%s\r\n$%d\r\n" % (len(HEADER), HEADER, PART_BYTES)
    ),
    "silence": silence,
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20,
    "no bytes": lambda client: client.close(),
    "too many answers": b":1\r\n" * 2000,
    "a nothing": b"*-1\r\n",
    "words": b"$5\r\nwords\r\n",
    "a map": b"%1\r\n+a\r\n:1\r\n",
}


@contextmanager
def bounded():
    """Neither more memory nor more time than promised."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        yield
        assert time.monotonic() - begun < GENEROUS_S
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def opened(port, kind=""):
    service = "/service" if kind == "+sentinel" else ""
    servers = RedisServers(f"redis{kind}://:s3cret@127.0.0.1:{port}{service}", timeout_s=SHORT_S)
    return RedisTier(servers, FORM, 1 << 20, CHUNK_BYTES, clock=Clock())


def started(port, kind=""):
    """The tier, or the error by which the start was refused. What it needs of the server it has
    asked by now."""
    try:
        return opened(port, kind), ""
    except TierError as error:
        return None, str(error)


into = memoryview(bytearray(CHUNK_BYTES))
VERBS: dict[str, tuple[bytes, Callable[[RedisTier], Any], Any]] = {
    "find": (b"EXISTS", lambda tier: tier.find(KEYS), 0),
    "read": (b"GET", lambda tier: bool(tier.read(KEYS[0], into)), False),
    "owners": (b"GET", lambda tier: tier.owners(KEYS[:2]), [0, 0]),
    "write": (b"SET", lambda tier: tier.write(KEYS[0], chunk(KEYS[0])), False),
    "delete": (b"UNLINK", lambda tier: tier.delete(KEYS[0]), None),
    "recovered": (b"SCAN", lambda tier: list(tier.recovered()), []),
    "held_of": (b"SCAN", lambda tier: list(tier.held_of(None)[0]), []),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("answer", HOSTILE)
def test_no_call_takes_more_than_was_promised_or_believes_it(verb, answer):
    command, call, nothing = VERBS[verb]
    if (answer, verb) == ("too many answers", "find"):
        # The first is what a Redis that has the chunk says. More is seen by the next call.
        return
    answers: dict[bytes, Answer] = {}
    with scripted(answers) as port:
        tier = opened(port)
        answers[command] = HOSTILE[answer]
        with bounded():
            assert call(tier) == nothing
        tier.close()


@pytest.mark.parametrize("command", [b"AUTH", b"INFO", b"SET"])
@pytest.mark.parametrize("answer", HOSTILE)
def test_a_start_is_degraded_or_refused_in_words(command, answer):
    with scripted({command: HOSTILE[answer]}) as port, bounded():
        tier, said = started(port)
        assert "s3cret" not in said
        if tier is not None:
            assert tier.find(KEYS) == 0
            tier.close()


@pytest.mark.parametrize("kind", ["+cluster", "+sentinel"])
@pytest.mark.parametrize("answer", HOSTILE)
def test_a_cluster_s_map_and_a_sentinel_s_word_are_bounded_too(kind, answer):
    with scripted({b"CLUSTER": HOSTILE[answer], b"SENTINEL": HOSTILE[answer]}) as port, bounded():
        tier, said = started(port, kind)
        assert tier is not None or "correct redis_url" in said
        if tier is not None:
            assert tier.find(KEYS) == 0
            assert not tier.write(KEYS[0], chunk(KEYS[0]))
            tier.close()


GARBAGE: dict[str, dict[bytes, Answer]] = {
    "SCAN tells no names": {b"SCAN": b"*2\r\n$1\r\n0\r\n*2\r\n:1\r\n:2\r\n"},
    "SCAN's cursor is a word": {b"SCAN": b"*2\r\n$4\r\nword\r\n*0\r\n"},
    "SCAN is a number": {b"SCAN": b":5\r\n"},
    "SCAN is refused": {b"SCAN": b"-ERR unknown command\r\n"},
    "idle since a word": {b"OBJECT": b"$4\r\nword\r\n"},
    "idle since a list": {b"OBJECT": b"*1\r\n:1\r\n"},
    "INFO of garbage": {b"INFO": b"$29\r\nmaxmemory:x\r\nmaxmemory_policy\r\n"},
    "INFO is a number": {b"INFO": b":7\r\n"},
}
NAME = FORM.header_name(KEYS[0])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_engine_starts_over_garbage(garbage):
    """Through the configuration, as an engine does it: the Redis tier misses, everything else
    works."""
    held: dict[bytes, Answer] = {
        b"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$%d\r\n%s\r\n" % (len(NAME), NAME)
    }
    with scripted(held | GARBAGE[garbage]) as port:
        config = Config().with_keys(
            ram_bytes=1 << 20, redis_url=f"redis://127.0.0.1:{port}", redis_bytes=1 << 24
        )
        layout = ChunkLayout(bytes(32), 1, 1, (4096,))
        with closing(assemble(Started(config), layout)) as store:
            with store.save(layout.keys(range(2))) as lease:
                lease.commit()
            assert store.lookup(layout.keys(range(2))).ready == 2


def test_a_server_can_neither_forge_a_line_of_the_log_nor_show_the_password(caplog):
    forged = b"-OOM \x1b[31ms3cret\r\x0bWARNING kvtier.admin.http: cleared everything\r\n"
    with (
        scripted({b"SET": forged, b"EXISTS": b"-LOADING s3cret \x1b[0m\r\n"}) as port,
        caplog.at_level(logging.DEBUG),
    ):
        tier = opened(port)
        assert not tier.write(KEYS[0], chunk(KEYS[0]))
        assert tier.find(KEYS) == 0
        tier.close()
    assert "first fault" in caplog.text
    assert "s3cret" not in caplog.text and "\x1b" not in caplog.text and "\x0b" not in caplog.text


@pytest.mark.parametrize("answer", HOSTILE)
def test_doctor_and_plan_look_at_it_in_bounded_time(answer):
    with scripted({b"INFO": HOSTILE[answer]}) as port:
        url = f"redis://:s3cret@127.0.0.1:{port}"
        seen = probe(RedisSection(url=url))
        assert "s3cret" not in str(seen.reachable)
        if not seen.reachable.value:
            (finding,) = findings(RedisSection(url=url, bytes_=1 << 24), None)
            assert finding.state == "fail" and "s3cret" not in finding.seen


def test_a_speed_that_cannot_be_measured_is_none():
    with scripted({b"GET": b"*100000000\r\n"}) as port:
        found = probe(RedisSection(url=f"redis://127.0.0.1:{port}"))
        timed = measure(Facts(tiers={"redis": found}), seconds=0.5).tiers["redis"]
        assert isinstance(timed, Redis) and timed.speed.value is None
        assert "trial failed" in timed.speed.source
