"""ObjectTier on a real S3 server: every promise of a tier, and its own: sharing, few requests,
words at the start."""

import logging
import os
from contextlib import contextmanager
from functools import partial

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import StateError, TierError
from kvtier.extensions.objects.bucket import Bucket
from kvtier.extensions.objects.parts import ObjectSection, probe
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.testing import check_tier
from kvtier.tiers.away.whole_objects import HEADER_BYTES, ObjectForm
from tests.child_process import wait_for
from tests.clock import Clock
from tests.http_server import answered_by
from tests.memory_bucket import beside
from tests.redis_server import RedisServer
from tests.s3_server import FORM, SECRET, URL, S3Server, operated
from tests.stores import assembled
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

pytestmark = pytest.mark.usefixtures("patient_with_objects")

LONG = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys(range(128))


@pytest.fixture(scope="module")
def started():
    with S3Server() as server, operated(server.environment):
        yield server


@pytest.fixture
def server(started):
    started.reset()
    return started


class CountedBucket(Bucket):
    """How often it was asked whether an object is there."""

    asked = 0

    def has(self, name):
        self.asked += 1
        return super().has(name)


def object_names(server):
    return sorted(name for name, _, _ in beside().listed("cache"))


def overwrite(name, data):
    beside().put(name, [data])


def stored(name):
    bucket = beside()
    (length,) = [size for listed, size, _ in bucket.listed("cache") if listed == name]
    found = bucket.get(name, length)
    assert found is not None
    return bytearray(found)


# ---- the promises of every tier ------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1])
def test_it_keeps_the_promises_of_a_tier(server, chunk_bytes):
    def make():
        server.reset()
        return ObjectTier(
            Bucket(URL, chunk_bytes), FORM, 64 * (chunk_bytes + HEADER_BYTES), chunk_bytes
        )

    check_tier(make, chunk_bytes=chunk_bytes)


def test_a_large_chunk_goes_in_parts_and_comes_back(server):
    size = 65 << 20
    tier = ObjectTier(Bucket(URL, size), FORM, 1 << 30, size)
    data = memoryview(os.urandom(1 << 20) * 65)
    assert tier.write(KEYS[0], data)
    into = memoryview(bytearray(size))
    assert tier.read(KEYS[0], into) is True and into == data


# ---- looking up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 1, 2, 63, 64, 65, 100, 127, 128])
def test_a_run_of_128_chunks_is_found_with_at_most_8_requests(server, held):
    bucket = CountedBucket(URL, CHUNK_BYTES)
    tier = ObjectTier(bucket, FORM, 1 << 30, CHUNK_BYTES)
    for key in LONG[:held]:
        overwrite(FORM.name(key), b"x")
    bucket.asked = 0
    assert tier.find(LONG) == held
    assert bucket.asked <= (8 if held else 1)


def test_a_gap_makes_a_miss_and_no_wrong_byte(server):
    tier = server.tier(capacity=128)
    for key in LONG[:40]:
        assert tier.write(key, chunk(key))
    tier.delete(LONG[7])
    assert 1 <= tier.find(LONG) <= 40
    assert [holds(tier, key) for key in LONG[6:9]] == [True, False, True]


# ---- sharing, names, what lies there -------------------------------------------------------------


def test_two_tiers_on_one_bucket_share(server):
    one, two = server.tier(), server.tier()
    assert one.write(KEYS[0], chunk(KEYS[0]))
    assert two.find(KEYS) == 1
    assert holds(two, KEYS[0])
    two.delete(KEYS[0])
    assert holds(one, KEYS[0]) is False


def test_a_chunk_is_one_object_below_prefix_and_namespace_and_a_start_leaves_no_trial(server):
    tier = server.tier()
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    assert object_names(server) == [f"cache/a/kvtier-1/{bytes(range(8)).hex()}/{KEYS[0].hex()}"]
    tier.delete(KEYS[0])
    assert object_names(server) == []


@pytest.mark.parametrize("place", [0, 8, 20, 30, 79, 80, 5000, -1])
def test_a_wrong_bit_anywhere_is_a_miss_counted_and_deleted(server, place):
    tier, name = server.tier(), FORM.name(KEYS[0])
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    damaged = stored(name)
    damaged[place] ^= 1
    overwrite(name, bytes(damaged))
    assert holds(tier, KEYS[0]) is False
    assert tier.counts["corrupt"] == 1
    assert object_names(server) == []


@pytest.mark.parametrize("length", [0, 79, 80, CHUNK_BYTES, CHUNK_BYTES + HEADER_BYTES + 1])
def test_an_object_of_another_length_is_a_miss(server, length):
    tier = server.tier()
    overwrite(FORM.name(KEYS[0]), bytes(length))
    assert holds(tier, KEYS[0]) is False
    assert tier.counts["corrupt"] == 1


def test_another_chunks_bytes_under_this_name_are_a_miss(server):
    tier = server.tier()
    assert tier.write(KEYS[1], chunk(KEYS[1]))
    overwrite(FORM.name(KEYS[0]), bytes(stored(FORM.name(KEYS[1]))))
    assert holds(tier, KEYS[0]) is False
    assert holds(tier, KEYS[1])


def test_what_is_recovered_is_what_is_there_parents_last_and_no_stranger(server):
    tier = server.tier()
    for key in KEYS:
        assert tier.write(key, chunk(key))
    for name in ("trial-00", "x" * 80, LONG[100].hex().upper()):
        overwrite(f"{FORM.folder}/{name}", bytes(CHUNK_BYTES))
    assert list(server.tier().recovered()) == KEYS[::-1]
    assert list(server.tier(capacity=3).recovered()) == KEYS[2::-1], (
        "our share: the rest is left to others"
    )
    late = server.tier()
    overwrite(FORM.name(LONG[100]), bytes(HEADER_BYTES + CHUNK_BYTES // 2))
    assert (len(late.recovered()), late.is_apart, tier.is_apart) == (len(KEYS) + 1, True, False)


def test_a_list_without_end_is_cut_short_and_said_to_be(server, monkeypatch):
    tier = server.tier()
    assert all(tier.write(key, chunk(key)) for key in KEYS)
    assert (sorted(tier.held_of(None)[0]), tier.held_of(None)[1]) == (sorted(KEYS), True)
    assert tier.held_of(7) == ([], False), "they are nobody's, or whose they are is not known"
    monkeypatch.setattr("kvtier.extensions.objects.tier._LISTED_NAMES", 2)
    assert tier.held_of(None)[1] is False


def test_another_layouts_objects_are_neither_seen_nor_touched(server):
    """Both keep chunks below one prefix."""
    tier = server.tier()
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    form = ObjectForm("cache/a", b"of another layout")
    other = ObjectTier(Bucket(URL, CHUNK_BYTES), form, 1 << 20, CHUNK_BYTES)
    assert list(other.recovered()) == [] and other.held_of(None) == ([], True)
    assert other.find(KEYS) == 0 and holds(other, KEYS[0]) is False
    other.delete(KEYS[0])
    assert holds(tier, KEYS[0])


def test_what_is_larger_than_a_chunk_of_ours_is_not_recovered(server):
    overwrite(FORM.name(KEYS[0]), bytes(CHUNK_BYTES + HEADER_BYTES + 1))
    overwrite(FORM.name(KEYS[1]), bytes(HEADER_BYTES))
    assert list(server.tier().recovered()) == []


def test_the_header_is_part_of_the_budget(server):
    assert ObjectTier(Bucket(URL, 1), FORM, 64 * (1 + HEADER_BYTES), 1).capacity == 64


def test_a_chunk_of_a_wrong_size_is_a_bug_of_the_caller(server):
    for size in (0, CHUNK_BYTES + 1):
        with pytest.raises(StateError, match=f"a chunk of {size} bytes"):
            server.tier().write(KEYS[0], memoryview(bytes(size)))


# ---- a host that comes and goes ------------------------------------------------------------------


LAYOUT = ChunkLayout(bytes(32), 1, 1, (4096,))
PROMPT = LAYOUT.keys(range(20))


def saved(store):
    with store.save(PROMPT) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:4096] = chunk(key, 4096)
        lease.commit()
    wait_for(lambda: store.stats()["object_stored"] == len(PROMPT), "all is in the bucket")


def loaded(store):
    """Load the prompt and compare it. Returns where it came from."""
    with store.load(PROMPT) as lease:
        wait_for(lambda: lease.poll().coming == 0, "what is below has come")
        assert list(lease.keys) == PROMPT
        assert all(
            view[:4096] == chunk(key, 4096) for key, view in zip(PROMPT, lease.views(), strict=True)
        )
        return set(lease.sources)


def opened(**more):
    given = {"ram_bytes": 1 << 20, "object_url": URL, "object_bytes": 1 << 20}
    return assembled(LAYOUT, **given | more)


def test_a_store_on_an_empty_host_starts_warm_from_the_bucket(server):
    store = opened()
    saved(store)
    store.close()
    again = opened()
    assert loaded(again) == {"object"}
    again.close()


def test_a_running_store_finds_what_another_host_writes(server):
    one, other = opened(), opened()
    saved(one)
    assert loaded(other) == {"object"}
    one.close()
    other.close()


@pytest.mark.redis
def test_with_a_redis_that_knows_nothing_the_bucket_is_asked_too(server):
    with RedisServer() as redis:
        one, other = opened(), opened(redis_url=redis.url, redis_bytes=1 << 20)
        saved(one)
        assert loaded(other) == {"object"}
        one.close()
        other.close()


FORM_OF_STORE = ObjectForm("cache/a", LAYOUT.fingerprint[:8])


def knows(store, keys):
    return store.lookup_by_tier(keys)[1] == len(keys)


def test_a_budget_is_kept_and_the_end_of_a_prompt_leaves_first(server):
    store = opened(object_bytes=8 * (4096 + HEADER_BYTES))
    for tokens in (range(8), range(100, 104)):
        keys = LAYOUT.keys(tokens)
        with store.save(keys) as lease:
            lease.commit()
        wait_for(partial(knows, store, keys), "the tier knows all")
    store.close()
    first = LAYOUT.keys(range(8))
    assert object_names(server) == sorted(
        map(FORM_OF_STORE.name, [*first[:4], *LAYOUT.keys(range(100, 104))])
    )


# ---- what the start says -------------------------------------------------------------------------


def test_credentials_that_nobody_knows_are_an_error_without_a_secret():
    with S3Server(refuses_after=2) as server, operated(server.environment):
        with pytest.raises(
            TierError, match="the access key is not known there; correct AWS_ACCESS_KEY_ID"
        ) as raised:
            server.tier()
        assert SECRET not in str(raised.value) and "someone" not in str(raised.value)


def test_a_bucket_that_is_not_there_is_an_error(server):
    with pytest.raises(
        TierError, match=r"s3://nowhere: there is no such bucket; make it, or correct object_url"
    ):
        server.tier("s3://nowhere")


def test_no_credentials_and_no_tls_are_errors(server):
    with (
        operated(server.environment | {"AWS_ALLOW_HTTP": ""}),
        pytest.raises(TierError, match="set AWS_ALLOW_HTTP"),
    ):
        server.tier()
    with operated({}), pytest.raises(TierError, match="no account: set AZURE_STORAGE_ACCOUNT_NAME"):
        server.tier("az://container/x")


@pytest.mark.parametrize(("status", "code", "words"), [
    (403, "RequestTimeTooSkewed", "this host's clock is too far from the store's; set the clock"),
    (400, "AuthorizationHeaderMalformed", "the bucket is in another region"),
    (301, "PermanentRedirect", "the bucket is in another region"),
    (403, "SignatureDoesNotMatch", "the secret key does not fit; correct AWS_ACCESS_KEY_ID"),
    (400, "ExpiredToken", "the session token is no longer valid"),
    (403, "AccessDenied", "the credentials lack a right; allow s3:GetObject, s3:PutObject"),
    (403, "", "the credentials are refused; correct AWS_ACCESS_KEY_ID"),
])  # fmt: skip
def test_what_only_an_operator_can_mend_ends_the_start(status, code, words):
    """moto checks neither clock nor region: the answers are those that S3 documents."""
    with answering(
        status, f"<Error><Code>{code}</Code><X>{SECRET}</X></Error>" if code else ""
    ) as environment:
        with operated(environment), pytest.raises(TierError, match=words) as raised:
            ObjectTier(Bucket(URL, CHUNK_BYTES), FORM, 1 << 20, CHUNK_BYTES)
        assert SECRET not in str(raised.value)


def test_a_budget_of_less_than_a_chunk_is_an_error(server):
    with pytest.raises(
        TierError, match=f"give at least object_bytes={CHUNK_BYTES + HEADER_BYTES:,}"
    ):
        server.tier(capacity=0)


# ---- outages -------------------------------------------------------------------------------------


def test_a_store_that_is_away_at_the_start_is_misses_and_there_later(caplog):
    server, clock = S3Server(), Clock()
    with operated(server.environment), server:
        server.kill()
        seen = probe(ObjectSection(url=URL))
        assert (seen.away, seen.reachable.value) == (True, False)
        tier = server.tier(clock=clock)
        assert (list(tier.recovered()), holds(tier, KEYS[0]), tier.find(KEYS)) == ([], None, 0)
        assert not tier.write(KEYS[0], chunk(KEYS[0]))
        assert tier.open_breakers == 1 and tier.counts["breaker_trips"] == 1
        server.start()
        assert not tier.write(KEYS[0], chunk(KEYS[0])), "it is left alone for a while"
        clock.now += 60
        assert tier.write(KEYS[0], chunk(KEYS[0]))
        assert holds(tier, KEYS[0]) and tier.open_breakers == 0
    assert SECRET not in caplog.text and "no connection" in caplog.text


def test_a_delete_that_could_not_be_made_is_made_good():
    server, clock = S3Server(), Clock()
    with operated(server.environment), server:
        tier = server.tier(clock=clock)
        assert all(tier.write(key, chunk(key)) for key in KEYS[:2])
        server.pause()
        for _ in range(3):
            with quick_answers(tier):
                assert holds(tier, KEYS[1]) is None
        tier.delete(KEYS[0])
        assert tier.owed == 1
        server.resume()
        clock.now += 60
        assert holds(tier, KEYS[1]), "and what a server that answers again has is there"
        assert tier.owed == 0
        assert object_names(server) == [FORM.name(KEYS[1])]


def test_a_store_that_answers_with_errors_is_misses(caplog):
    caplog.set_level(logging.WARNING)
    with (
        answering(503, f"<Error><Code>SlowDown</Code><X>{SECRET}</X></Error>") as environment,
        operated(environment),
    ):
        tier = ObjectTier(Bucket(URL, CHUNK_BYTES), FORM, 1 << 20, CHUNK_BYTES)
        assert holds(tier, KEYS[0]) is None
        assert not tier.write(KEYS[0], chunk(KEYS[0]))
        assert tier.find(KEYS) == 0
    assert "HTTP 503 SlowDown" in caplog.text and SECRET not in caplog.text


def test_after_close_nothing_is_held_and_nothing_is_asked(server):
    tier = server.tier()
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    tier.close(KEYS)
    assert not holds(tier, KEYS[0])
    assert not tier.write(KEYS[1], chunk(KEYS[1]))
    assert tier.find(KEYS) == 0


@contextmanager
def quick_answers(tier):
    """A call of its bucket gives up after half a second instead of five."""
    before = tier._store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "_store", beside(timeout="500ms"))
        yield
    assert tier._store is before


@contextmanager
def answering(status, body):
    """A server that gives one answer to everything, and the environment that leads there."""
    with answered_by(lambda exchange: exchange.answer(body.encode(), status)) as url:
        named = S3Server()
        named.endpoint = url
        yield named.environment


def test_names_and_keys_are_two_ways_of_one_thing():
    assert FORM.key(FORM.name(KEYS[0])) == KEYS[0]
    assert [FORM.key(name) for name in ("", KEYS[0].hex(), f"{FORM.folder}/{'zz' * 40}")] == [
        None
    ] * 3
