"""A real S3 server that fails in the middle: uploads that break off, answers that are lost, cut,
late or lies. Each is a miss or a refusal that is counted, and never a hit."""

import time
import urllib.request

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import TierError
from kvtier.extensions.objects.bucket import Bucket
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.tiers.away.whole_objects import HEADER_BYTES
from kvtier.tiers.breaker import OPENING_FAULTS
from tests.clock import Clock
from tests.memory_bucket import beside
from tests.s3_proxy import Answer, S3Proxy
from tests.s3_server import FORM, URL, S3Server, operated
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

LONG = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys(range(128))
LARGE = 65 << 20
REFUSED = Answer(403, b"<Error><Code>AccessDenied</Code></Error>")
AWAY = Answer(500, b"<Error><Code>InternalError</Code></Error>")


@pytest.fixture(scope="module")
def started():
    with S3Server() as server:
        yield server


@pytest.fixture
def proxy(started):
    started.reset()
    with S3Proxy(started) as proxy, operated(proxy.environment):
        yield proxy


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(proxy, clock):
    return opened(clock)


def opened(clock):
    room = 64 * (CHUNK_BYTES + HEADER_BYTES)
    return ObjectTier(Bucket(URL, CHUNK_BYTES), FORM, room, CHUNK_BYTES, clock)


def behind(server):
    """Names of chunks in the bucket, past the proxy."""
    with operated(server.environment):
        return sorted(name for name, _, _ in beside().listed(FORM.folder))


def test_an_upload_that_breaks_off_leaves_neither_an_object_nor_parts(started, proxy):
    tier = ObjectTier(Bucket(URL, LARGE), FORM, 1 << 30, LARGE)
    proxy.refuse = lambda _, path: REFUSED if "partNumber=3" in path else None
    assert not tier.write(KEYS[0], memoryview(bytes(LARGE)))
    assert any("partNumber=3" in path for _, path in proxy.seen), "it went in parts"
    assert (behind(started), tier.counts["failed_writes"]) == ([], 1)
    with urllib.request.urlopen(f"{started.endpoint}/bucket?uploads") as reply:  # noqa: S310 - ours
        assert b"<Upload>" not in reply.read()


def test_a_write_whose_answer_is_lost_is_taken_back(started, proxy, tier):
    proxy.change = lambda method, _, answer: AWAY if method == "PUT" else answer
    assert not tier.write(KEYS[0], chunk(KEYS[0]))
    assert (behind(started), tier.owed) == ([FORM.name(KEYS[0])], 1)
    proxy.well()
    assert not holds(tier, KEYS[1])
    assert (behind(started), tier.owed) == ([], 0)


def test_what_is_written_anew_is_not_taken_back(started, proxy, tier):
    proxy.refuse = lambda method, _: AWAY if method == "PUT" else None
    assert not tier.write(KEYS[0], chunk(KEYS[0]))
    assert tier.owed == 1
    proxy.well()
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    assert holds(tier, KEYS[0]) and holds(tier, KEYS[0])
    assert (behind(started), tier.owed) == ([FORM.name(KEYS[0])], 0)


@pytest.mark.parametrize("answer", [REFUSED, AWAY])
def test_a_delete_that_is_refused_is_owed_and_made_good(started, proxy, tier, answer):
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    proxy.refuse = lambda _, path: answer if path.endswith("?delete") else None
    tier.delete(KEYS[0])
    assert (tier.owed, tier.counts["failed_deletes"]) == (1, 1)
    proxy.well()
    assert tier.find(KEYS[1:2]) == 0
    assert (behind(started), tier.owed) == ([], 0)


def test_an_answer_that_is_cut_is_a_fault_and_the_chunk_stays_known(proxy, tier):
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    proxy.change = lambda method, _, answer: (
        answer._replace(pieces=()) if method == "GET" else answer
    )
    assert holds(tier, KEYS[0]) is None
    assert tier.counts["failed_reads"] == 1 and tier.counts["corrupt"] == 0
    proxy.well()
    assert holds(tier, KEYS[0])


def test_a_page_of_somebody_else_is_no_chunk(proxy, tier):
    page = b"<html>please log in</html>".ljust(CHUNK_BYTES + HEADER_BYTES)
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    proxy.change = lambda method, _, answer: (
        answer._replace(body=page) if method == "GET" else answer
    )
    assert holds(tier, KEYS[0]) is False
    assert tier.counts["corrupt"] == 1


@pytest.mark.parametrize("status", [400, 403, 429, 500, 503])
def test_an_error_is_never_a_hit(proxy, tier, clock, status):
    for key in KEYS:
        assert tier.write(key, chunk(key))
    proxy.refuse = lambda *_: Answer(status, b"<Error><Code>SlowDown</Code></Error>")
    assert tier.find(KEYS) == tier.find([*KEYS, *LONG]) == 0
    assert holds(tier, KEYS[0]) is None
    assert tier.counts["misses"] == 0
    proxy.well()
    clock.now += 60
    assert holds(tier, KEYS[0]), "and it was not taken for lost"


def test_an_error_in_the_middle_of_a_search_ends_it_with_what_is_known(proxy, tier):
    for key in LONG[:65]:
        assert tier.write(key, chunk(key))
    kept = {f"/bucket/{FORM.name(LONG[0])}", f"/bucket/{FORM.name(LONG[64])}"}
    proxy.refuse = lambda method, path: AWAY if method == "HEAD" and path not in kept else None
    assert tier.find(LONG) == 65
    assert tier.find(LONG[:8]) == 1


def test_a_lookup_that_is_told_too_much_ends_in_misses(proxy, tier):
    """A cache before a store may still know what is gone."""
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    size, stamp = str(CHUNK_BYTES + HEADER_BYTES), "Sun, 22 Nov 2026 12:00:00 GMT"
    stale = Answer(200, b"", (("Content-Length", size), ("Last-Modified", stamp), ("ETag", '"x"')))
    proxy.refuse = lambda method, _: stale if method == "HEAD" else None
    assert tier.find(KEYS) == len(KEYS)
    assert [holds(tier, key) for key in KEYS] == [True] + [False] * (len(KEYS) - 1)
    assert tier.counts["misses"] == len(KEYS) - 1


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(0,) * 60, (1,) * 60], ids=["no byte", "a byte a second"])
def test_an_answer_that_does_not_end_holds_a_lane_for_a_bounded_time(proxy, tier, pieces):
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    proxy.change = lambda method, _, answer: (
        answer._replace(pieces=pieces) if method == "GET" else answer
    )
    begun = time.monotonic()
    assert holds(tier, KEYS[0]) is None
    assert time.monotonic() - begun < 45, "it would take a minute"


def test_a_list_that_is_none_is_a_store_that_is_away(started, proxy, clock):
    tier = opened(clock)
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    proxy.refuse = lambda _, path: Answer(200, b"no list") if "list-type" in path else None
    again = opened(clock)
    assert list(again.recovered()) == []
    assert again.counts["failed_finds"] == 2
    assert holds(again, KEYS[0]), "what is there is found by asking"
    assert again.held_of(None) == ([], False), "and a purge says that it was not searched"
    assert behind(started) == [FORM.name(KEYS[0])], "and no trial is left"


def test_a_store_that_gives_other_bytes_than_were_written_ends_the_start(proxy, clock):
    proxy.change = lambda method, path, answer: (
        answer._replace(body=answer.body[::-1]) if method == "GET" and "trial" in path else answer
    )
    with pytest.raises(TierError, match="what was written is not what is read; look at the store"):
        opened(clock)


def test_while_it_is_left_alone_no_read_is_worth_a_slot(proxy, tier, clock):
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    proxy.refuse = lambda *_: AWAY
    for _ in range(OPENING_FAULTS):
        assert tier.may_read(KEYS[0])
        assert holds(tier, KEYS[0]) is None
    asked = len(proxy.seen)
    assert not tier.may_read(KEYS[0]) and holds(tier, KEYS[0]) is None
    assert len(proxy.seen) == asked, "nobody knocks"
    proxy.well()
    clock.now += 60
    assert tier.may_read(KEYS[0]) and not tier.may_read(KEYS[0]), "one call tries"
    assert holds(tier, KEYS[0]) and tier.may_read(KEYS[0])
