"""MooncakeTier on a real Mooncake, over TCP: every promise of a tier, and its own: sharing, exact
lookups, words at the start."""

import os
import secrets

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import TierError
from kvtier.extensions.mooncake.tier import MooncakeStore, MooncakeTier
from kvtier.testing import check_tier
from kvtier.tiers.away.whole_objects import HEADER_BYTES, ObjectForm, header
from tests.mooncake_pool import CALLS, FORM, Mooncake, mooncake, python
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

LONG = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys(range(1200))


@pytest.fixture(scope="module")
def pool():
    with mooncake() as started:
        yield started


@pytest.fixture
def form():
    """Names that no other test has: the pool is one for all."""
    return ObjectForm("", secrets.token_bytes(8))


def raw(pool, size=CHUNK_BYTES):
    return MooncakeStore(pool.url, size, 1, python())


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1])
def test_it_keeps_the_promises_of_a_tier(pool, chunk_bytes):
    room = 64 * (chunk_bytes + HEADER_BYTES)
    url = f"mooncake://{pool.address}?bytes={room}B"

    def make():
        return pool.tier(ObjectForm("", secrets.token_bytes(8)), url=url, size=chunk_bytes)

    check_tier(make, chunk_bytes=chunk_bytes)


def test_a_large_chunk_comes_back(pool, form):
    size = 33 << 20
    tier = pool.tier(form, size=size)
    data = memoryview(os.urandom(1 << 20) * 33)
    assert tier.write(KEYS[0], data)
    into = memoryview(bytearray(size))
    assert tier.read(KEYS[0], into) is True and into == data
    tier.delete(KEYS[0])
    tier.close()


def test_a_run_of_1200_chunks_is_found_exactly_and_a_gap_ends_it(pool, form):
    tier = pool.tier(form)
    for key in LONG[:520]:
        assert tier.write(key, chunk(key))
    assert tier.find(LONG) == 520
    tier.delete(LONG[7])
    assert tier.find(LONG) == 7
    tier.close()


def test_two_tiers_share_and_what_one_deletes_is_gone_for_both(pool, form):
    one, two = pool.tier(form), pool.tier(form)
    assert one.write(KEYS[0], chunk(KEYS[0]))
    assert two.find(KEYS) == 1 and holds(two, KEYS[0])
    two.delete(KEYS[0])
    assert holds(one, KEYS[0]) is False
    assert (one.counts["misses"], one.held_of(None), list(one.recovered())) == (1, ([], False), [])
    for tier in (one, two):
        tier.close()


def test_memory_that_is_lent_is_used_and_taken_back_at_the_end(form):
    with Mooncake().master_alone() as alone:
        tier = alone.tier(form)
        assert not tier.write(KEYS[0], chunk(KEYS[0])), "nobody lends memory"
        lender = alone.tier(form, url=f"{alone.url}&segment=64MiB")
        assert tier.write(KEYS[0], chunk(KEYS[0]))
        assert holds(tier, KEYS[0])
        lender.close()
        assert not holds(tier, KEYS[0])
        tier.close()


@pytest.mark.parametrize("place", [0, 30, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_a_wrong_bit_is_a_miss_counted_and_deleted(pool, form, place):
    tier, store = pool.tier(form), raw(pool)
    damaged = bytearray(header(KEYS[0], chunk(KEYS[0])) + bytes(chunk(KEYS[0])))
    damaged[place] ^= 1
    assert store.put(form.name(KEYS[0]), [bytes(damaged)])
    assert holds(tier, KEYS[0]) is False
    assert (tier.counts["corrupt"], tier.find(KEYS)) == (1, 0)
    for one in (tier, store):
        one.close()


@pytest.mark.parametrize("length", [1, HEADER_BYTES, CHUNK_BYTES, CHUNK_BYTES + HEADER_BYTES + 1])
def test_an_object_of_another_length_is_a_miss(pool, form, length):
    tier, store = pool.tier(form), raw(pool, CHUNK_BYTES + 1)
    assert store.put(form.name(KEYS[0]), [bytes(length)])
    assert holds(tier, KEYS[0]) is False
    assert (tier.counts["corrupt"], tier.counts["failed_reads"], tier.find(KEYS)) == (1, 0, 0)
    for one in (tier, store):
        one.close()


def test_a_full_pool_refuses_writes_and_is_no_fault(form):
    with Mooncake().master_alone() as alone:
        size = 4 << 20
        tier = alone.tier(form, url=f"{alone.url}&segment=16MiB", size=size)
        written = [tier.write(key, memoryview(bytes(size))) for key in LONG[:8]]
        assert written[0] and not all(written)
        assert tier.counts["refused"] >= 1
        assert (tier.open_breakers, tier.counts["failed_writes"], tier.owed) == (0, 0, 0)
        tier.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_a_master_that_does_not_listen_is_misses_and_words(host, caplog):
    url = f"mooncake://{host}:{free_port()}"
    words = f"no master listens at {url.partition('//')[2]}"
    tier = MooncakeTier(MooncakeStore(url, CHUNK_BYTES, CALLS, python()), FORM, CHUNK_BYTES)
    assert words in caplog.text and "correct mooncake_url" in caplog.text
    assert tier.find(KEYS[:2]) == 0 and not tier.write(KEYS[0], chunk(KEYS[0]))
    tier.close()


def test_a_python_without_the_library_is_an_error_in_words(pool):
    store = MooncakeStore(pool.url, CHUNK_BYTES, CALLS)
    with pytest.raises(TierError, match=r"No module named 'mooncake'.*; install what it needs"):
        store.greet()


def test_a_budget_of_less_than_a_chunk_is_an_error(pool):
    with pytest.raises(TierError, match="give at least bytes in mooncake_url="):
        pool.tier(url=f"mooncake://{pool.address}?bytes=100B")
