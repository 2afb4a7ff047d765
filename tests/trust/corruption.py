"""Damage to everything that is kept: every bit of every header, thousands of bits of payloads,
whole files and values.

Whatever is done to NVMe files, Redis values and objects, each damaged chunk is one counted miss and
is dropped, every other chunk is still served whole, nothing raises, and the place can be written
again. A case is one damaged chunk (or one damaged file).
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.core.chunk import PAGE_BYTES, ChunkKey, ChunkLayout
from kvtier.testing import content
from kvtier.tiers.nvme.index import FORMAT_VERSION, RECORD_BYTES, Superblock, table_bytes
from tests.nvme_place import chunk_folder, delete

SLOT = PAGE_BYTES
SLOTS = 32
ROOM = table_bytes(SLOTS) + SLOTS * SLOT
SUPERBLOCK_BYTES = 48
INDEX, PAYLOAD = "index.kvtier", "slots.kvtier"
_LOSSES = ("corrupt", "misses", "failed_reads", "evicted")


@dataclass
class Tally:
    """What a suite did and saw."""

    cases: int = 0
    bits: int = 0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds, words):
        if not holds:
            self.violations.append(words)


class Reader:
    """Reads a tier's chunks and books what came: right, missed or wrong."""

    def __init__(self, tally, keys, size):
        self.tally, self.keys, self.size = tally, keys, size
        self.right = {key: bytes(content(key, size)) for key in keys}
        self._into = memoryview(bytearray(size))

    def read(self, tier, key):
        held = bool(tier.read(key, self._into))
        self.tally.expect(not held or self._into == self.right[key], "wrong bytes are served")
        return held

    def expect_lost(self, tier, lost, what):
        """Exactly these are missed, each counted once, as what is returned. A second look finds
        them gone, and they can be written anew."""
        gone, before = set(lost), Counter(tier.counts)
        missed = {index for index, key in enumerate(self.keys) if not self.read(tier, key)}
        found = Counter(tier.counts) - before
        losses = sum(found[name] for name in _LOSSES)
        self.tally.cases += len(gone)
        self.tally.expect(
            missed == gone, f"{what}: missed {sorted(missed)}, damaged {sorted(gone)}"
        )
        self.tally.expect(losses == len(gone), f"{what}: {losses} counted, {len(gone)} damaged")
        self.tally.expect(
            not any(self.read(tier, self.keys[index]) for index in missed), f"{what}: kept"
        )
        for index in missed:
            stored = tier.write(self.keys[index], memoryview(self.right[self.keys[index]]))
            self.tally.expect(
                stored and self.read(tier, self.keys[index]), f"{what}: its place takes no chunk"
            )
        return found


# ---- NVMe ----------------------------------------------------------------------------------------


class Place:
    """A folder with a full tier, cleanly closed, and a copy to start every case from."""

    def __init__(self, folder, tally):
        self.tally = tally
        self.keys = ChunkLayout(bytes(32), 1, 1, (SLOT,)).keys(range(SLOTS))
        self.reader = Reader(tally, self.keys, SLOT)
        self.sound, self.path = folder / "sound", folder / "tier"
        tier = chunk_folder(self.sound, ROOM, SLOT)
        for key in self.keys:
            tier.write(key, content(key, SLOT))
        tier.close(self.keys)

    def restore(self):
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.sound, self.path)

    @contextmanager
    def opened(self, room=ROOM):
        tier = chunk_folder(self.path, room, SLOT)
        try:
            yield tier
        finally:
            tier.close()

    def flip(self, name, bits):
        """Turn over bits, each given by its place in the file."""
        with (self.path / name).open("r+b", buffering=0) as file:
            for bit in bits:
                (byte,) = os.pread(file.fileno(), 1, bit // 8)
                os.pwrite(file.fileno(), bytes([byte ^ (1 << bit % 8)]), bit // 8)
                self.tally.bits += 1


def record_at(slot):
    return PAGE_BYTES + slot * RECORD_BYTES


def nvme(folder, payload_bits, seed=0):
    """All of it, on real files in ``folder``."""
    tally = Tally()
    place = Place(folder, tally)
    every_bit_of_the_superblock(place)
    every_bit_of_the_records(place)
    random_bits_of_payloads(place, payload_bits, random.Random(seed))
    truncated_files(place)
    swapped_and_stale(place)
    foreign_files(place)
    return tally


def every_bit_of_the_superblock(place):
    """Costs every chunk, and leaves an empty tier that works."""
    for bit in range(SUPERBLOCK_BYTES * 8):
        place.restore()
        place.flip(INDEX, [bit])
        with place.opened() as tier:
            place.tally.cases += 1
            place.tally.expect(tier.held() == [], f"superblock bit {bit}: believed")
            place.tally.expect(
                not place.reader.read(tier, place.keys[bit % SLOTS]),
                f"superblock bit {bit}: served",
            )
            place.tally.expect(tier.counts["misses"] == 1, f"superblock bit {bit}: not counted")


def every_bit_of_the_records(place):
    """Bit ``32 * turn + slot`` in the record of each slot, first of the even slots, then of the odd
    ones."""
    for turn in range(RECORD_BYTES * 8 // SLOTS):
        for chosen in (range(0, SLOTS, 2), range(1, SLOTS, 2)):
            place.restore()
            place.flip(INDEX, [record_at(slot) * 8 + turn * SLOTS + slot for slot in chosen])
            with place.opened() as tier:
                place.tally.expect(
                    tier.counts["corrupt"] == len(chosen), f"records, turn {turn}: not counted"
                )
                place.reader.expect_lost(tier, chosen, f"records, turn {turn}")


def random_bits_of_payloads(place, bits, draw):
    place.restore()
    with place.opened() as tier:
        for turn in range(-(-bits // (SLOTS // 2))):
            where = dict.fromkeys(draw.sample(range(SLOTS), SLOTS // 2))
            # Rewritten chunks have moved: ask the tier's own index where they lie.
            slots = {index: tier._places[place.keys[index]] % tier.slots for index in where}
            place.flip(
                PAYLOAD, [slot * SLOT * 8 + draw.randrange(SLOT * 8) for slot in slots.values()]
            )
            before = tier.counts["corrupt"]
            place.reader.expect_lost(tier, where, f"payloads, turn {turn}")
            place.tally.expect(
                tier.counts["corrupt"] - before == len(where),
                f"payloads, turn {turn}: not as corrupt",
            )


def truncated_files(place):
    index_bytes = table_bytes(SLOTS)
    cuts = [(INDEX, size) for size in [0, 1, 47, 48, 4095, *range(PAGE_BYTES, index_bytes, 96)]]
    cuts += [(PAYLOAD, size) for size in range(0, SLOTS * SLOT, 1999)]
    for name, size in cuts:
        place.restore()
        os.truncate(place.path / name, size)
        if name == PAYLOAD:
            kept = size // SLOT
        else:
            kept = (size - PAGE_BYTES) // RECORD_BYTES if size >= SUPERBLOCK_BYTES else 0
        with place.opened() as tier:
            place.reader.expect_lost(tier, range(max(0, kept), SLOTS), f"{name} cut to {size}")


def swapped_and_stale(place):
    def exchange(name, first, second, size):
        data = bytearray((place.path / name).read_bytes())
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        (place.path / name).write_bytes(data)

    for slot in range(1, SLOTS):
        for name, at, size in (
            (PAYLOAD, SLOT, SLOT),
            (INDEX, RECORD_BYTES, RECORD_BYTES),
            (PAYLOAD, SLOT, 512),
        ):
            place.restore()
            base = PAGE_BYTES if name == INDEX else 0
            exchange(name, base, base + slot * at, size)
            with place.opened() as tier:
                place.reader.expect_lost(
                    tier, {0, slot}, f"{name}: {size} bytes of slots 0 and {slot} swapped"
                )
    for name in (INDEX, PAYLOAD):
        place.restore()
        old = (place.path / name).read_bytes()
        others = [ChunkKey(key[::-1]) for key in place.keys[:8]]
        with place.opened() as tier:
            for key, other in zip(place.keys[:8], others, strict=True):
                delete(tier, key)
                tier.write(other, content(other, SLOT))
        (place.path / name).write_bytes(old)
        stale = Reader(place.tally, others, SLOT)
        with place.opened() as tier:
            place.tally.expect(
                not any(stale.read(tier, key) for key in others), f"{name} is stale: served"
            )
            for other in others:
                delete(tier, other)
            place.reader.expect_lost(tier, range(8), f"{name} is stale")


def foreign_files(place):
    pages: dict[str, Callable[[], bytes]] = {
        "version": lambda: Superblock(
            SLOT, SLOTS, 1, clean=True, version=FORMAT_VERSION + 1
        ).pack(),
        "older version": lambda: Superblock(
            SLOT, SLOTS, 1, clean=True, version=FORMAT_VERSION - 1
        ).pack(),
        "slot size": lambda: Superblock(2 * SLOT, SLOTS // 2, 1, clean=True).pack(),
        "nothing of ours": lambda: random.Random(1).randbytes(PAGE_BYTES),
    }
    for what, page in pages.items():
        place.restore()
        with (place.path / INDEX).open("r+b") as file:
            file.write(page())
        with place.opened() as tier:
            place.tally.expect(tier.held() == [], f"foreign {what}: believed")
            place.reader.expect_lost(tier, range(SLOTS), f"foreign {what}")
    place.restore()
    other = ChunkLayout(b"\1" * 32, 1, 1, (SLOT,)).keys(range(SLOTS))
    with place.opened() as tier:
        before = tier.counts["misses"]
        strangers = Reader(place.tally, other, SLOT)
        place.tally.expect(
            not any(strangers.read(tier, key) for key in other), "another model's file: served"
        )
        place.tally.expect(
            tier.counts["misses"] - before == SLOTS, "another model's file: not counted"
        )
        place.tally.cases += SLOTS
    foreign = chunk_folder(place.path.with_name("foreign"), ROOM, SLOT)
    for key in other:
        foreign.write(key, content(key, SLOT))
    foreign.close(other)
    for name in (INDEX, PAYLOAD):
        place.restore()
        shutil.copy(place.path.with_name("foreign") / name, place.path / name)
        with place.opened() as tier:
            place.tally.expect(
                not any(strangers.read(tier, key) for key in other),
                f"another model's {name}: served",
            )
            place.reader.expect_lost(
                tier, range(SLOTS), f"another model's {name} beside our other file"
            )


# ---- tiers that are services ---------------------------------------------------------------------


class Damage:
    """What is hurt behind a tier's back: the tier must lose it, and count it."""

    def __init__(self, reader, tier):
        self.reader, self.tier = reader, tier

    def hurt(self, where, what, count):
        chunks = list(where)
        found = self.reader.expect_lost(self.tier, chunks, what)
        self.reader.tally.expect(found[count] == len(chunks), f"{what}: not counted as {count}")

    def ended(self, whose):
        """All damage was a miss, and none of it a fault of the service."""
        self.reader.tally.expect(
            self.tier.counts["failed_reads"] == 0 and not self.tier.open_breakers,
            f"damage counts as a {whose}'s fault",
        )
        self.tier.close()


# ---- Redis ---------------------------------------------------------------------------------------


REDIS_CHUNK, REDIS_PART, REDIS_CHUNKS = 300, 128, 64


def redis(payload_bits, seed=0):
    """All of it, on a redis-server of its own."""
    from kvtier.tiers.redis.layout import HEADER_BYTES, Form
    from kvtier.tiers.redis.servers import RedisServers
    from kvtier.tiers.redis.tier import RedisTier
    from tests.child_process import DEADLINE_S
    from tests.redis_server import RedisServer
    from tests.tier_chunks import NAMESPACE

    tally, draw = Tally(), random.Random(seed)
    form = Form("kvtier", NAMESPACE, REDIS_PART)
    keys = ChunkLayout(bytes(32), 1, 1, (REDIS_CHUNK,)).keys(range(REDIS_CHUNKS))
    reader = Reader(tally, keys, REDIS_CHUNK)
    with RedisServer() as server, server.admin() as admin:
        servers = RedisServers(f"unix://{server.path}", timeout_s=DEADLINE_S)
        tier = RedisTier(servers, form, REDIS_CHUNKS * form.room(REDIS_CHUNK), REDIS_CHUNK)
        for key in keys:
            tier.write(key, content(key, REDIS_CHUNK))
        damage = RedisDamage(reader, form, tier, admin)
        for first in range(0, HEADER_BYTES * 8, REDIS_CHUNKS // 2):
            damage.flip(
                {index: (0, first + index) for index in range(REDIS_CHUNKS // 2)},
                f"header from bit {first}",
            )
        for turn in range(-(-payload_bits // (REDIS_CHUNKS // 2))):
            chosen = draw.sample(range(REDIS_CHUNKS), REDIS_CHUNKS // 2)
            bits = [divmod(draw.randrange(REDIS_CHUNK * 8), REDIS_PART * 8) for _ in chosen]
            damage.flip(
                {index: (part + 1, bit) for index, (part, bit) in zip(chosen, bits, strict=True)},
                f"turn {turn}",
            )
        damage.values()
        foreign_names(tally, admin, servers, form, keys)
        damage.ended("server")
    return tally


class RedisDamage(Damage):
    """Hurts values behind a tier's back and looks what it makes of them."""

    def __init__(self, reader, form, tier, admin):
        super().__init__(reader, tier)
        self.admin = admin
        self.names = [form.names(key, REDIS_CHUNK) for key in reader.keys]

    def flip(self, where, what):
        """``where``: chunk -> which of its values, which bit of it."""
        chosen = [(self.names[index][value], bit) for index, (value, bit) in where.items()]
        old = self.admin.mget([name for name, _ in chosen])
        pipe = self.admin.pipeline(transaction=False)
        for (name, bit), value in zip(chosen, old, strict=True):
            pipe.setbit(name, bit, not value[bit // 8] >> (7 - bit % 8) & 1)
        pipe.execute()
        self.reader.tally.bits += len(chosen)
        self.hurt(where, what, "corrupt")

    def values(self):
        """Every value of a chunk truncated to every other length, longer, swapped, lost. Headers of
        other chunks."""
        admin, names = self.admin, self.names
        for value in range(len(names[0])):
            size = admin.strlen(names[0][value])
            for length in range(0, size, 7):
                admin.set(
                    names[0][value],
                    admin.getrange(names[0][value], 0, length - 1) if length else b"",
                )
                self.hurt([0], f"value {value} cut to {length}", "corrupt")
            admin.append(names[1][value], b"\0")
            self.hurt([1], f"value {value} one byte longer", "corrupt")
            admin.copy(names[3][value], names[2][value], replace=True)
            self.hurt([2], f"value {value} of another chunk", "corrupt")
            admin.delete(names[4][value])
            self.hurt([4], f"value {value} lost", "evicted" if value else "misses")
        admin.copy(names[5][1], names[5][2], replace=True)
        self.hurt([5], "parts swapped", "corrupt")


def foreign_names(tally, admin, servers, form, keys):
    """Another version's and another model's chunks under names of their own: not seen, not
    touched."""
    from kvtier.tiers.redis.layout import Form
    from kvtier.tiers.redis.tier import RedisTier
    from tests.tier_chunks import NAMESPACE

    other_form = Form("kvtier", NAMESPACE[::-1], REDIS_PART)
    other = RedisTier(servers, other_form, 1 << 20, REDIS_CHUNK)
    reader = Reader(tally, keys, REDIS_CHUNK)
    for key in keys:
        for name in form.names(key, REDIS_CHUNK):
            admin.copy(name, name.replace(b"kvtier:2:", b"kvtier:1:"))
    held = admin.dbsize()
    tally.expect(list(other.recovered()) == [], "another model's chunks: recovered")
    tally.expect(not any(reader.read(other, key) for key in keys), "another model's chunks: served")
    tally.expect(other.counts["misses"] == len(keys), "another model's chunks: not counted")
    for key in keys:
        other.delete(key)
    tally.expect(admin.dbsize() == held, "another model's chunks: deleted")
    tally.cases += 2 * len(keys)


# ---- objects -------------------------------------------------------------------------------------

OBJECT_CHUNK, OBJECT_CHUNKS = 300, 64


def objects(payload_bits, seed=0):
    """All of it, on a store in memory."""
    from kvtier.extensions.objects.tier import ObjectTier
    from kvtier.tiers.away.whole_objects import HEADER_BYTES
    from tests.memory_bucket import MemoryBucket
    from tests.s3_server import FORM

    tally, draw, bucket = Tally(), random.Random(seed), MemoryBucket()
    room = OBJECT_CHUNKS * (OBJECT_CHUNK + HEADER_BYTES)
    tier = ObjectTier(bucket, FORM, room, OBJECT_CHUNK)
    keys = ChunkLayout(bytes(32), 1, 1, (OBJECT_CHUNK,)).keys(range(OBJECT_CHUNKS))
    for key in keys:
        tier.write(key, content(key, OBJECT_CHUNK))
    damage = ObjectDamage(Reader(tally, keys, OBJECT_CHUNK), FORM, tier, bucket)
    some = OBJECT_CHUNKS // 2
    for first in range(0, HEADER_BYTES * 8, some):
        damage.flip({index: first + index for index in range(some)}, f"header from bit {first}")
    for turn in range(-(-payload_bits // some)):
        bits = {
            index: HEADER_BYTES * 8 + draw.randrange(OBJECT_CHUNK * 8)
            for index in draw.sample(range(OBJECT_CHUNKS), some)
        }
        damage.flip(bits, f"turn {turn}")
    damage.whole()
    foreign_objects(tally, bucket, FORM, keys)
    damage.ended("store")
    return tally


class ObjectDamage(Damage):
    """Hurts objects behind a tier's back and looks what it makes of them."""

    def __init__(self, reader, form, tier, bucket):
        super().__init__(reader, tier)
        self.bucket = bucket
        self.names = [form.name(key) for key in reader.keys]

    def stored(self, index):
        (size,) = (size for name, size, _ in self.listed() if name == self.names[index])
        return bytes(self.bucket.get(self.names[index], size))

    def listed(self):
        return self.bucket.listed("")

    def flip(self, where, what):
        """``where``: chunk -> which bit of its object."""
        for index, bit in where.items():
            data = bytearray(self.stored(index))
            data[bit // 8] ^= 1 << bit % 8
            self.bucket.put(self.names[index], [bytes(data)])
            self.reader.tally.bits += 1
        self.hurt(where, what, "corrupt")

    def whole(self):
        """Objects truncated to every other length, longer, of other chunks, empty, and lost."""
        sound = self.stored(0)
        for length in range(0, len(sound), 7):
            self.bucket.put(self.names[0], [sound[:length]])
            self.hurt([0], f"an object cut to {length}", "corrupt")
        for more in (1, 80, len(sound)):
            self.bucket.put(self.names[1], [self.stored(1), bytes(more)])
            self.hurt([1], f"an object {more} bytes longer", "corrupt")
        self.bucket.put(self.names[2], [self.stored(3)])
        self.hurt([2], "another chunk's object", "corrupt")
        self.bucket.put(self.names[4], [self.stored(5)[:80], self.stored(4)[80:]])
        self.hurt([4], "another chunk's header", "corrupt")
        self.bucket.delete([self.names[6]])
        self.hurt([6], "an object lost", "misses")


def foreign_objects(tally, bucket, form, keys):
    """Another version's and another model's objects under names of their own: not seen, not
    touched."""
    from kvtier.extensions.objects.tier import ObjectTier
    from kvtier.tiers.away.whole_objects import ObjectForm

    other = ObjectTier(bucket, ObjectForm("cache/a", b"another"), 1 << 20, OBJECT_CHUNK)
    reader = Reader(tally, keys, OBJECT_CHUNK)
    for key in keys:
        older = form.name(key).replace("/kvtier-1/", "/kvtier-0/")
        bucket.put(older, [bytes(OBJECT_CHUNK + 80)])
    held = len(list(bucket.listed("")))
    tally.expect(list(other.recovered()) == [], "another model's objects: recovered")
    tally.expect(
        not any(reader.read(other, key) for key in keys), "another model's objects: served"
    )
    tally.expect(other.counts["misses"] == len(keys), "another model's objects: not counted")
    for key in keys:
        other.delete(key)
    tally.expect(len(list(bucket.listed(""))) == held, "another model's objects: deleted")
    tally.cases += 2 * len(keys)
