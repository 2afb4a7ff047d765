"""Stores for tests: over tiers in memory, with lanes and a clock that are turned by hand, or as a
configuration has them."""

from kvtier.assemble import assemble
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.core.tenant import UNOWNED
from kvtier.started import Started
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from kvtier.tiers.breaker import Breaker
from tests.clock import Clock

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "test"}), 1, 1, (SLOT,))


def keys(*tokens):
    return LAYOUT.keys(tokens)


def save(store, run, *lanes, owner=UNOWNED):
    """Save a run, each chunk with its key's bytes first, and turn the lanes. Returns how many were
    new."""
    with store.save(run, owner) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[: len(key)] = key
        lease.commit()
    for lane in lanes:
        lane.run()
    return len(lease.slots)


def held(run):
    """What a tier's medium has of chunks that were saved so."""
    return {key: key.ljust(SLOT, b"\0") for key in run}


def shown(lease):
    """The keys of what lies in the lease's slots."""
    return [bytes(view[:40]) for view in lease.views()]


def over(*tiers, slots=4, bound=64, **more):
    lanes = [ManualLane(urgent_bound=bound, bound=bound) for _ in tiers]
    return Store(Pool(slots, SLOT), list(zip(tiers, lanes, strict=True)), **more), lanes


def spilled(run, *tiers, **more):
    """A store whose tiers, and not RAM, hold ``run``. Nothing waits to be written."""
    store, lanes = over(*tiers, slots=len(run), **more)
    save(store, run, *lanes)
    save(store, keys(*range(900, 900 + len(run))))
    for lane in lanes:
        lane.queues[False].clear()
    return store, lanes


def taken(directory, key, keep=(), **how):
    """The entry of a chunk that finds room."""
    entry = directory.reserve(key, keep, **how)
    assert entry is not None
    return entry


def filled(directory, key, **how):
    directory.filled((entry := taken(directory, key, **how),))
    return entry


def assembled(layout=LAYOUT, **settings):
    """What an engine with this configuration has."""
    return assemble(Started(Config().with_keys(**settings)), layout)


class SlowTier(DictTier):
    """Every call takes ``seconds`` of the test's clock."""

    def __init__(self, clock, seconds=0.5, capacity=64, **more):
        super().__init__(capacity, **more)
        self.clock, self.seconds = clock, seconds
        self.reads: list[ChunkKey] = []

    def read(self, key, into):
        self.reads.append(key)
        self.clock.now += self.seconds
        return super().read(key, into)

    def write(self, key, data, owner=UNOWNED):
        self.clock.now += self.seconds
        return super().write(key, data, owner)

    def find(self, keys):
        self.clock.now += self.seconds
        return super().find(keys)


class AwayTier(DictTier):
    """Cannot be asked while ``away``, nor ever for what is ``lost`` with another machine of its.
    Each machine has a breaker. ``reads``: calls that these let through."""

    away = False
    calls = reads = 0
    lost: frozenset[ChunkKey] = frozenset()

    def __init__(self, capacity, clock=None, **more):
        super().__init__(capacity, **more)
        self.breakers = {lost: Breaker(clock or Clock()) for lost in (True, False)}

    @property
    def nodes_away(self):
        return ("away",) if self.breakers[False].open else ()

    def may_read(self, key):
        return self.breakers[key in self.lost].reserves()

    def read(self, key, into):
        self.calls += 1
        assert self.calls < 100, "it is asked for ever"
        breaker = self.breakers[key in self.lost]
        if not breaker.allows():
            return None
        self.reads += 1
        if self.away or key in self.lost:
            breaker.fault()
            return None
        breaker.ok()
        return super().read(key, into)
