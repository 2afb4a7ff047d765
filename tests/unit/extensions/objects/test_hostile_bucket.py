"""A bucket that lies, floods, drips, forgets or leads elsewhere: what it costs is bounded, and a
start says what is wrong. No server has to be installed."""

import mmap
import os
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from obstore.store import MemoryStore

from kvtier.core.errors import TierError
from kvtier.core.tenant import UNOWNED
from kvtier.extensions.objects import bucket as buckets
from kvtier.extensions.objects.bucket import FAULTS, Bucket
from kvtier.extensions.objects.child import BucketCalls
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.tiers.away.whole_objects import header, room
from tests.attack.bucket import (
    Answer,
    Turncoat,
    dripping_object,
    elsewhere,
    endless_object,
    endless_page,
    endless_refusal,
    environment,
    hostile,
)
from tests.attack.stage import own_mib
from tests.clock import Clock
from tests.memory_bucket import MemoryBucket
from tests.s3_server import FORM, URL, operated
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

ROOM = room(CHUNK_BYTES)
ENDLESS = 64 << 20
FLOOD = 384 << 20
"""Twice the limit of the library's process."""


def opened(bucket, clock=None):
    return ObjectTier(bucket, FORM, 64 * ROOM, CHUNK_BYTES, clock or Clock())


def test_an_object_without_end_is_a_miss_and_no_more_of_it_is_taken_than_a_chunk():
    with hostile(endless_object(ROOM, ENDLESS)) as (url, seen), operated(environment(url)):
        found = Bucket(URL, CHUNK_BYTES).get("endless", ROOM)
    assert found is not None and not found.nbytes
    assert len(seen.requests) == 1
    assert seen.sent[0] < ENDLESS // 2, "what the kernel's buffers hold, and no more"


@pytest.mark.parametrize("length", [0, 6])
def test_an_object_of_the_right_length_is_taken_whole(length):
    bucket = MemoryBucket()
    bucket.put("name", [b"kvtier"[:length]])
    assert bytes(bucket.get("name", length) or b"") == b"kvtier"[:length]
    assert bucket.get("name", length + 1) == memoryview(b"")
    assert bucket.get("other", length) is None


def test_a_bucket_that_drips_does_not_hold_a_lane(monkeypatch):
    monkeypatch.setattr(buckets, "_ANSWER_S", 0.3)
    content = bytes(chunk(KEYS[0], ROOM))
    with hostile(dripping_object(content, 0.25)) as (url, _), operated(environment(url)):
        bucket = Bucket(URL, CHUNK_BYTES)
        with pytest.raises(FAULTS):
            bucket.get("dripping", ROOM)  # all of it comes, after 4 s


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_reaches_no_other_host(status):
    inside: Answer = endless_object(6, 0)
    with (
        hostile(inside, "127.0.0.2") as (other, reached),
        hostile(elsewhere(f"{other}/secret", status)) as (url, seen),
        operated(environment(url)),
    ):
        bucket = Bucket(URL, CHUNK_BYTES)
        for call in (
            lambda: bucket.get("a", 6),
            lambda: bucket.has("a"),
            lambda: bucket.delete(["a"]),
            lambda: bucket.put("a", [b"x"]),
            lambda: list(bucket.listed(FORM.folder)),
        ):
            with pytest.raises(FAULTS):
                call()
    assert seen.requests and not reached.requests


@pytest.mark.parametrize(
    "missed",
    [lambda tier: holds(tier, KEYS[0]) is None, lambda tier: tier.held_of(None) == ([], False)],
    ids=["a refusal", "a page of a list"],
)
def test_a_flood_costs_the_librarys_process_its_limit_and_this_one_a_miss(missed):
    """The library takes refusals and pages whole, and makes an error of them with its interpreter's
    lock held."""
    turncoat = Turncoat()
    with hostile(turncoat) as (url, seen), operated(environment(url)):
        tier = opened(Bucket(URL, CHUNK_BYTES))
        assert tier.write(KEYS[0], chunk(KEYS[0]))
        turncoat.lies = {"GET": endless_refusal(FLOOD), "LIST": endless_page(FLOOD)}
        before = own_mib(os.getpid())
        assert missed(tier)
        assert own_mib(os.getpid()) - before < 32
        assert max(seen.sent) < FLOOD, "the process ended at its limit"
        turncoat.lies = {}
        assert holds(tier, KEYS[0]), "the next call starts another one"
        tier.close()


def test_each_call_has_its_own_part_of_the_memory():
    memory, said = mmap.mmap(-1, 4 * ROOM), (b"one", b"two")
    calls = BucketCalls(MemoryStore(), memory, ROOM)
    for seat, text in enumerate(said):
        memory[seat * ROOM : seat * ROOM + 3] = text
    for seat, text in enumerate(said):
        calls.put(seat, text.decode(), 3, None, False)
    assert calls.get(2, "two", 3) and calls.get(3, "one", 3)
    assert [memory[seat * ROOM :][:3] for seat in range(4)] == [*said, b"two", b"one"]


def test_a_name_that_is_too_long_to_be_a_chunks_is_left_out_of_the_list():
    """A page of such names would be more than an answer may have, and cost all of the list."""
    store = MemoryStore()
    for name in ("long" * 500, "short"):
        store.put(f"folder/{name}", b"")
    page = BucketCalls(store, mmap.mmap(-1, ROOM), ROOM).first_page(0, "folder") or []
    assert [name for name, *_ in page] == ["folder/short"]


class _Endless(MemoryBucket):
    """Its list has no end. Each thousand names take a second."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.named = clock, 0

    def listed(self, folder):
        for self.named in range(100_000):
            self.clock.now += 0.001
            yield f"{folder}/{self.named:080x}", ROOM, datetime.now(UTC)
        raise AssertionError("a start goes on listing")


def test_a_list_without_end_does_not_hold_up_the_start():
    clock = Clock()
    bucket = _Endless(clock)
    assert len(opened(bucket, clock).recovered()) == 64
    assert bucket.named < 10_000


class _Forgetful(MemoryBucket):
    def put(self, name, parts, owner=UNOWNED):
        return sum(memoryview(part).nbytes for part in parts)


class _Garbling(MemoryBucket):
    def put(self, name, parts, owner=UNOWNED):
        return super().put(name, [bytes(memoryview(part).nbytes) for part in parts], owner)


@pytest.mark.parametrize("kind", [_Forgetful, _Garbling])
def test_a_bucket_that_does_not_keep_what_is_written_ends_the_start_in_words(kind):
    with pytest.raises(TierError, match="what was written is not what is read"):
        opened(kind())


class _Nameless(MemoryBucket):
    """It drops user metadata, as some gateways do."""

    def put(self, name, parts, owner=UNOWNED):
        return super().put(name, parts)


def test_a_bucket_that_drops_metadata_is_told_at_the_start_and_at_a_clear(caplog):
    tier = opened(_Nameless())
    assert "it drops the metadata kvtierowner of an object" in caplog.text
    assert all(tier.write(key, chunk(key), 7) for key in KEYS[:3])
    assert tier.held_of(7) == ([], False), "a clear that left them is not complete"
    assert "3 chunks have no owner there" in caplog.text


def test_a_bucket_that_keeps_metadata_is_silent(caplog):
    tier = opened(MemoryBucket())
    assert tier.write(KEYS[0], chunk(KEYS[0]), 7)
    assert tier.held_of(7) == ([KEYS[0]], True) and not caplog.text


class _Reused(MemoryBucket):
    """As a store of memory does, it gives a deleted chunk's room to another one that is being
    read."""

    def __init__(self, store):
        super().__init__(store)
        self.meanwhile: Callable[[], None] = lambda: None

    def fetch(self, name, into):
        found = super().fetch(name, into)
        self.meanwhile()
        return found


def test_a_read_beside_a_deletion_that_finds_other_bytes_deletes_nothing():
    bucket = _Reused(MemoryStore())
    tier = opened(bucket)
    assert tier.write(KEYS[0], chunk(KEYS[0])) and tier.write(KEYS[1], chunk(KEYS[1]))
    bucket.put(FORM.name(KEYS[0]), [header(KEYS[2], chunk(KEYS[2])), chunk(KEYS[2])])
    bucket.meanwhile = lambda: tier.delete(KEYS[1])
    assert holds(tier, KEYS[0]) is False
    assert bucket.has(FORM.name(KEYS[0])), "whose it is now, nobody can tell"
    assert (tier.counts["corrupt"], tier.counts["misses"]) == (0, 1)
    bucket.meanwhile = lambda: None
    assert holds(tier, KEYS[0]) is False
    assert not bucket.has(FORM.name(KEYS[0])), "nothing was deleted meanwhile: it is damaged"
    assert tier.counts["corrupt"] == 1
