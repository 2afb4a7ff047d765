"""Simulated media: a plain tier that does everything wrong a tier may do, a Redis under the real
RedisTier, and a bucket under the real ObjectTier.

Both outlive the processes that use them, and others use them too: what is *shared* is written and
deleted by peers.
"""

import fnmatch
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from kvtier.core.chunk import ChunkKey
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.away.whole_objects import HEADER_BYTES, room
from kvtier.tiers.base import ForwardingTier, Tier
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.redis.errors import RedisError, RefusedError, WrongSizeError
from tests.trust.scheduler import Time, ViolationError

T = TypeVar("T")


class Medium:
    """Chunks by key with a checksum each. Unsynced changes may be lost, in any order, by a power
    cut."""

    def __init__(self, world, capacity, *, shared):
        self.world = world
        self.capacity = capacity
        self.shared = shared
        self.held: dict[ChunkKey, tuple[bytes, int]] = {}
        self.unsynced: list[tuple[ChunkKey, tuple[bytes, int] | None]] = []
        """What each changed key had before."""

    def set(self, key, value):
        self.unsynced.append((key, self.held.pop(key, None)))
        if value is not None:
            self.held[key] = value
        if self.world.rng.random() < 0.2:
            self.unsynced.clear()

    def power_cut(self):
        if self.shared:
            return  # it is another machine's
        rng = self.world.rng
        for key, before in reversed(self.unsynced):
            if rng.random() < 0.5:
                self.held.pop(key, None)
                if before is not None and len(self.held) < self.capacity:
                    self.held[key] = before
        self.unsynced.clear()

    def rot(self):
        for key, (data, check) in self.held.items():
            if self.world.fault("bit rot"):
                at = self.world.rng.randrange(len(data))
                self.held[key] = (data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :], check)


class SimTier(Tier):
    """The promises of :mod:`kvtier.tiers.base`, kept over a medium that fails, tears, shortens,
    delays and repeats."""

    def __init__(self, world, medium, name):
        self.world, self.medium, self.name = world, medium, name
        self.capacity, self.shared = medium.capacity, medium.shared
        self.process = world.opening
        self.breaker = Breaker(Time(world).monotonic)

    def may_read(self, key):
        return self.breaker.reserves()

    def recovered(self):
        self._io("recover")
        return list(self.medium.held)[-self.capacity :] if self.shared else list(self.medium.held)

    def write(self, key, data, owner=UNOWNED):
        world, medium = self.world, self.medium
        self._io("write")
        if world.fault("write fails"):
            return False
        half = data.nbytes // 2
        first = bytes(data[:half])
        self._io("write, half")
        whole = first + bytes(data[half:])
        check = xxh3_64_intdigest(key + whole)
        if world.fault("write short"):
            whole = first
        elif world.fault("write torn"):
            whole = first + b"\xa5" * len(first)
        if not self.shared and key not in medium.held and len(medium.held) >= self.capacity:
            return False
        medium.set(key, (whole, check))
        if self.shared and world.fault("write repeated"):

            def again():
                world.sleep(world.rng.random())
                medium.set(key, (whole, check))

            world.spawn("late write", again)
        self._io("written")
        return True

    def read(self, key, into):
        world, medium = self.world, self.medium
        into[:] = b"\xee" * into.nbytes
        self._io("read")
        if not self.breaker.allows():
            return None
        if world.fault("read fails"):
            self.breaker.fault()
            return None
        self.breaker.ok()
        data, check = medium.held.get(key, (b"", 0))
        half = into.nbytes // 2
        into[: len(data[:half])] = data[:half]
        self._io("read, half")
        into[half : half + len(data[half:])] = data[half:]
        if world.fault("read damaged"):
            into[half] ^= 1
        if xxh3_64_intdigest(key + bytes(into)) == check:
            self._io("read, whole")
            return True
        if key in medium.held:
            medium.set(key, None)
        return False

    def find(self, keys):
        self._io("find")
        if self.world.fault("find fails"):
            return 0
        held = next(
            (count for count, key in enumerate(keys) if key not in self.medium.held), len(keys)
        )
        self._io("found")
        return held

    def delete(self, key):
        self._io("delete")
        if key in self.medium.held:
            self.medium.set(key, None)

    def close(self, coldest_first=()):
        self._io("close")
        self.medium.unsynced.clear()

    def _io(self, what):
        self.world.io(self.process, f"{self.name} {what}")
        if self.world.fault(f"{self.name} slow"):
            self.world.sleep(self.world.rng.choice((0.05, 1.0, 20.0)), self.process)


class Watched(ForwardingTier):
    """A tier whose caller is held to its part of :class:`kvtier.tiers.base.Tier`, and which is held
    to its word."""

    def __init__(self, world, inner):
        super().__init__(inner)
        self.world = world
        self.writing: set[ChunkKey] = set()
        self.deleting: Counter[ChunkKey] = Counter()

    @property
    def moving(self):
        """Chunks in the middle of a write or delete, or that were when their process died."""
        return self.writing | set(+self.deleting)

    def write(self, key, data, owner=0):
        if key in self.writing or self.deleting[key]:
            raise ViolationError("two writes, or a write and a delete, of one chunk at once")
        self.writing.add(key)
        task = self.world.current
        task.failed = False
        stored = self.inner.write(key, data, owner)
        if stored and task.failed:
            raise ViolationError("a write that failed counts as stored")
        self.writing.discard(key)
        return stored

    def delete(self, key):
        if key in self.writing:
            raise ViolationError("a delete of a chunk that is being written")
        self.deleting[key] += 1
        self.inner.delete(key)
        self.deleting[key] -= 1


class SimRedis:
    """One Redis server's values. It may be away, full, evict by itself, and do late what nobody
    waits for any more."""

    def __init__(self, world):
        self.world = world
        self.values: dict[bytes, bytes] = {}
        self.sets: dict[bytes, set[bytes]] = {}
        self.away_until = 0.0

    def evict(self):
        for name in list(self.values):
            if self.world.fault("redis evicts"):
                del self.values[name]

    def _sign(self, word, name, what):
        """Of a set: whether something changed."""
        known = self.sets.setdefault(name, set())
        if word == "PEXPIRE":
            return int(bool(known))
        changes = (what in known) == (word == "SREM")
        (known.discard if word == "SREM" else known.add)(what)
        return int(changes)

    def do(self, command):  # noqa: PLR0911 - one for each command
        match command:
            case ("INFO", *_):
                return b"maxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
            case ("SET", name, value, *_):
                self.values[name] = bytes(value)
                return b"OK"
            case ("GET", name):
                return self.values.get(name)
            case ("GETRANGE", name, first, last):
                return self.values.get(name, b"")[first : last + 1]
            case ("SADD" | "SREM" | "PEXPIRE" as word, name, what):
                return self._sign(word, name, what)
            case ("SRANDMEMBER", name, _):
                return list(self.sets.get(name, ()))
            case ("EXISTS", *names):
                return sum(name in self.values or bool(self.sets.get(name)) for name in names)
            case ("UNLINK", *names):
                gone = [self.values.pop(name, None) or self.sets.pop(name, None) for name in names]
                return sum(one is not None for one in gone)
            case ("SCAN", _, "MATCH", pattern, "COUNT", _):
                return [0, [name for name in self.values if fnmatch.fnmatchcase(name, pattern)]]
            case ("OBJECT", "IDLETIME", _):
                return 0
        raise ViolationError(f"Redis is asked {command[0]!r}, which this one does not know")


class SimLink:
    """:class:`kvtier.tiers.redis.servers.RedisServers`, as far as RedisTier sees it."""

    label = "simulated"
    kind = "server"

    def __init__(self, world, server):
        self.world, self.server = world, server
        self.process = world.opening

    def node_of(self, name):
        return self.label

    def nodes(self):
        return [self.label]

    def suspect(self):
        """There is one server."""

    @contextmanager
    def wire(self, name):
        yield SimWire(self.world, self.server, self.process)

    def wires(self, within_s):
        yield SimWire(self.world, self.server, self.process)

    def close(self):
        pass


class SimWire:
    """One connection for one call: each command is a step, and may be lost before or after the
    server did it."""

    def __init__(self, world, server, process):
        self.world, self.server, self.process = world, server, process

    def _one(self, command):
        world = self.world
        world.io(self.process, f"redis {command[0]}")
        if world.fault("redis goes away", 0.2):
            self.server.away_until = world.now + world.rng.choice((0.2, 2.0, 60.0))
        if world.now < self.server.away_until or world.fault("redis connection lost"):
            world.current.failed |= command[0] == "SET"
            raise RedisError("simulated")
        if world.fault("redis answers too late"):
            if world.rng.random() < 0.5:

                def late():
                    world.sleep(world.rng.random() * 3)
                    self.server.do(command)

                world.spawn("late command", late)
            else:
                self.server.do(command)
            world.current.failed |= command[0] == "SET"
            raise TimeoutError("simulated")
        return self.server.do(command)

    def renew(self):
        """Its time is the world's."""

    def ask(self, commands, bounds=None):
        return [self._one(command) for command in list(commands)]

    def put(self, items, ttl_ms):
        for name, data in items:
            if self.world.fault("redis full"):
                self.world.current.failed = True
                return RefusedError("OOM", "OOM simulated")
            self._one(("SET", name, bytes(data)))
        return None

    def get(self, names, into):
        for name, memory in zip(names, into, strict=True):
            value = self._one(("GET", name))
            if value is None:
                return
            if len(value) != memory.nbytes:
                raise WrongSizeError("simulated")
            memory[:] = value
            if self.world.fault("redis read damaged"):
                memory[self.world.rng.randrange(memory.nbytes)] ^= 4
            yield memory

    def scan(self, pattern):
        (answer,) = self.ask([("SCAN", 0, "MATCH", pattern, "COUNT", 1000)])
        yield answer[1]


class SimObjects:
    """One bucket's objects, each with the time of its last write. It may be away, and do late what
    nobody waits for any more. A lifecycle rule takes some."""

    def __init__(self, world):
        self.world = world
        self.held: dict[str, tuple[bytes, float]] = {}
        self.owners: dict[str, int] = {}
        """Of each name that was ever written: its owner goes with the request, done or lost."""
        self.away_until = 0.0

    def expire(self):
        for name in list(self.held):
            if self.world.fault("object expires"):
                del self.held[name]

    def put(self, name, data):
        self.held[name] = data, self.world.now
        return len(data)

    def get(self, name):
        return self.held.get(name, (None, 0.0))[0]

    def delete(self, name):
        return self.held.pop(name, None) is not None


class SimBucket:
    """:class:`kvtier.extensions.objects.bucket.Bucket`, as far as ObjectTier sees it: each request
    is a step, and may be lost before or after the store did it."""

    label = "simulated"
    faults = (OSError,)

    def __init__(self, world, store):
        self.world, self.store = world, store
        self.process = world.opening

    def greet(self, folder):
        self._ask("list", dict)

    def told(self, error):
        return str(error)

    def put(self, name, parts, owner=UNOWNED):
        whole = b"".join(bytes(part) for part in parts)
        self.store.owners[name] = owner
        return self._ask("put", partial(self.store.put, name, whole))

    def owner(self, name):
        return self._ask("head", lambda: self.store.owners.get(name, UNOWNED))

    def get(self, name, length):
        data = self._ask("get", partial(self.store.get, name))
        if data is None:
            return None
        if len(data) != length or self.world.fault("object cut"):
            return memoryview(b"")
        copy = bytearray(data)
        if self.world.fault("object damaged"):
            copy[self.world.rng.randrange(length)] ^= 4
        return memoryview(copy)

    def fetch(self, name, into):
        found = self.get(name, room(into.nbytes))
        if found:
            into[:] = found[HEADER_BYTES:]
        return None if found is None else bytes(found[:HEADER_BYTES])

    def has(self, name):
        return self._ask("head", partial(self.store.held.__contains__, name))

    def delete(self, names):
        for name in names:
            self._ask("delete", partial(self.store.delete, name))
        return len(names)

    def close(self):
        """It has nothing of its own."""

    def listed(self, folder):
        found = self._ask("list", lambda: list(self.store.held.items()))
        for name, (data, written) in found:
            if name.startswith(f"{folder}/"):
                yield name, len(data), _BEGINNING + timedelta(seconds=written)

    def _ask(self, what, do):
        world = self.world
        world.io(self.process, f"object {what}")
        if world.fault("bucket goes away", 0.2):
            self.store.away_until = world.now + world.rng.choice((0.2, 2.0, 60.0))
        if world.now < self.store.away_until or world.fault("bucket connection lost"):
            world.current.failed |= what == "put"
            raise ConnectionError("simulated")
        if world.fault("bucket answers too late"):
            if world.rng.random() < 0.5:

                def late():
                    world.sleep(world.rng.random() * 3)
                    do()

                world.spawn("late request", late)
            else:
                do()
            world.current.failed |= what == "put"
            raise TimeoutError("simulated")
        return do()


_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
