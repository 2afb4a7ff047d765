"""Headers as they lie on a disk, in Redis and in a sealed chunk, with anything in them: what is
believed is just what was written, and nothing else is more than a miss."""

from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.core.chunk import KEY_BYTES, PAGE_BYTES, ChunkKey
from kvtier.testing import DictTier, content
from kvtier.tiers.nvme.folder import INDEX_NAME, SLOTS_NAME
from kvtier.tiers.nvme.index import (
    FORMAT_VERSION,
    RECORD_BYTES,
    Superblock,
    pack_record,
    read_records,
    table_bytes,
)
from kvtier.tiers.redis.layout import HEADER_BYTES
from kvtier.tiers.sealed import SealedTier, sealed_bytes
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, fill, holds, room
from tests.redis_server import FORM, RedisServer
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk
from tests.tier_chunks import holds as redis_holds

SLOTS = 8
FUZZ = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
U64 = st.integers(0, 2**64 - 1)
NEAR_U64 = st.one_of(U64, st.sampled_from([0, 1, SLOTS, SLOTS + 1, SLOT, 2**32, 2**63, 2**64 - 1]))
SUPERBLOCKS = st.builds(
    Superblock,
    slot_bytes=NEAR_U64,
    slots=NEAR_U64,
    pid=U64,
    clean=st.booleans(),
    version=st.integers(0, 2**32 - 1),
)
ROWS = st.one_of(
    st.tuples(st.just("free"), st.just(b"")),
    st.tuples(st.just("rubbish"), st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES)),
    st.tuples(st.just("good"), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)),
    st.tuples(st.just("moved"), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)),
    st.tuples(st.just("flipped"), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)),
)


@pytest.fixture
def places(tmp_path):
    """New folders."""
    return (tmp_path / str(number) for number in count())


@given(
    superblock=SUPERBLOCKS,
    bit=st.integers(0, 48 * 8 - 1),
    cut=st.integers(0, 47),
    noise=st.binary(max_size=200),
)
@FUZZ
def test_a_superblock_is_read_as_written_or_not_at_all(superblock, bit, cut, noise):
    page = superblock.pack()
    assert len(page) == PAGE_BYTES
    can_be = superblock.version != FORMAT_VERSION or (
        superblock.slot_bytes in range(PAGE_BYTES, (1 << 30) + 1, PAGE_BYTES)
        and superblock.slots in range(1, 1 << 32)
    )
    assert Superblock.unpack(page) == (superblock if can_be else None)
    assert Superblock.unpack(page[:cut]) is None
    assert Superblock.unpack(noise) is None
    damaged = bytearray(page)
    damaged[bit // 8] ^= 1 << bit % 8
    assert Superblock.unpack(bytes(damaged)) is None


@given(rows=st.lists(ROWS, min_size=1, max_size=SLOTS), bit=st.integers(0, 120 * 8 - 1))
@FUZZ
def test_of_any_table_just_the_good_records_are_believed(rows, bit):
    table, good = bytearray(), []
    for slot, (kind, given_) in enumerate(rows):
        record = bytearray(given_ if kind == "rubbish" else RECORD_BYTES)
        if kind in {"good", "moved", "flipped"}:
            record[:] = pack_record(
                slot + (kind == "moved"), SLOT, ChunkKey(given_), bytes(16), slot + 1
            )
        if kind == "flipped":
            record[bit // 8] ^= 1 << bit % 8
        if kind == "good":
            good.append((slot, given_))
        table += record
    records = read_records(memoryview(table), len(rows), SLOT)
    assert list(zip(records.slots.tolist(), records.keys, strict=True)) == good
    assert records.damaged <= sum(kind not in {"free", "good"} for kind, _ in rows)


@given(
    head=st.one_of(SUPERBLOCKS.map(Superblock.pack), st.binary(max_size=PAGE_BYTES)),
    ours=st.booleans(),
    table=st.binary(max_size=3 * RECORD_BYTES),
    payload=st.integers(0, 3 * SLOT),
)
@FUZZ
def test_a_folder_with_anything_in_it_is_opened_and_holds_no_lie(
    places, head, ours, table, payload
):
    """``ours``: the superblock is one of this tier's own, so that the records behind it are looked
    at."""
    folder = next(places)
    folder.mkdir()
    head = Superblock(SLOT, SLOTS, 1, True, FORMAT_VERSION).pack() if ours else head
    for name in (INDEX_NAME, SLOTS_NAME):
        (folder / name).touch(0o600)
    (folder / INDEX_NAME).write_bytes(head.ljust(PAGE_BYTES, b"\0") + table)
    (folder / SLOTS_NAME).write_bytes(b"\xa5" * payload)
    tier = chunk_folder(folder, room(SLOTS))
    assert not [key for key in tier.held() if holds(tier, key)]
    keys = LAYOUT.keys(range(3))
    fill(tier, keys)
    assert all(holds(tier, key) for key in keys)
    assert (folder / INDEX_NAME).stat().st_size == table_bytes(SLOTS)
    tier.close()


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def redis_tier(server):
    return server.tier()


@pytest.mark.redis
@given(
    header=st.one_of(
        st.binary(max_size=2 * HEADER_BYTES),
        st.binary(min_size=16, max_size=16).map(
            lambda checksum: FORM.header(KEYS[0], CHUNK_BYTES, checksum, 1)
        ),
        st.integers(0, 2**63).map(lambda length: FORM.header(KEYS[0], length, bytes(16), 1)),
        st.sampled_from(KEYS[1:]).map(lambda key: FORM.header(key, CHUNK_BYTES, bytes(16), 1)),
    )
)
@FUZZ
def test_any_other_header_in_redis_is_a_miss(server, redis_tier, header):
    key = KEYS[0]
    assert redis_tier.write(key, chunk(key))
    with server.admin() as behind:
        behind.set(FORM.header_name(key), header)
        assert not redis_holds(redis_tier, key)
        assert not behind.exists(*FORM.names(key, CHUNK_BYTES)), "dropped, header and parts"


@given(
    name=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=60).map(lambda end: FORM.header_name(KEYS[0]) + end),
    )
)
@FUZZ
def test_a_name_in_redis_is_a_chunks_or_nobodys(name):
    parsed = FORM.parse(name)
    if parsed is not None:
        key, is_header = parsed
        assert name.lower() == (
            FORM.header_name(key) if is_header else FORM.part_names(key, CHUNK_BYTES)[0]
        )


@given(
    at=st.integers(0, sealed_bytes(SLOT) - 1),
    written=st.binary(min_size=1, max_size=64),
    cut=st.one_of(st.none(), st.integers(0, sealed_bytes(SLOT) - 1)),
)
@FUZZ
def test_a_sealed_chunk_with_anything_in_it_opens_as_written_or_not_at_all(at, written, cut):
    below = DictTier(1)
    tier = SealedTier(below, bytes(32), SLOT)
    (key,) = LAYOUT.keys([1])
    assert tier.write(key, content(key, SLOT))
    before = below.held[key]
    changed = (before[:at] + written + before[at + len(written) :])[: len(before)][:cut]
    below.held[key] = changed
    signed = SLOT + 16 + 24
    assert holds_sealed(tier, key) == (
        len(changed) == len(before) and changed[:signed] == before[:signed]
    )


def holds_sealed(tier, key):
    into = memoryview(bytearray(SLOT))
    found = tier.read(key, into)
    assert not found or into == content(key, SLOT), "a lie"
    return found is True
