"""The production Store, Directory, leases, lanes and tiers in a
:class:`~tests.trust.scheduler.World` of faults.

``python -m tests.trust.simulation --seed N`` replays one seed and prints its trace. ``--seeds N``
runs many.

A seed draws a machine (slots, tiers, lanes, quotas), engines, faults and deaths. Engines save
chunks whose bytes follow from their key alone, load, hold leases long, forget, clear and die.
Servers die between any two steps and open again on what their media kept. Other servers use the
shared media. An NVMe tier is one folder or a set of 1, 2 or 5 unequal disks, of which each fails,
hangs, vanishes and comes back, maybe empty. After every step that may have changed something:

- Every READY chunk, and every byte under an open load lease, is exactly what was computed for its
  key.
- The Directory's own rules hold (slots, capacities, quotas, see :mod:`kvtier.store.directory`), no
  lane work has raised.
- No call of an engine waits for a lock or does I/O, and each ends within a number of steps that its
  keys bound.

A kill (no power cut, no fault) loses nothing that was stored and brings back nothing that was
deleted. At rest: nothing is FILLING, pinned, being written or deleted. NVMe and index agree, also
while disks are left alone. After faults end every disk is back, and every tier can be filled to its
capacity again. A clear leaves nothing behind. A close
ends in time.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import kvtier.tiers.nvme.chunk_folder
import kvtier.tiers.nvme.disk_set
import kvtier.tiers.nvme.files
import kvtier.tiers.nvme.folder
import kvtier.tiers.own_folder
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import TierError
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.eviction.order import LRU_SETTING, SETTINGS
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.store.entry import READY
from kvtier.store.lease import LoadLease
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.lower.write_budget import WriteBudget
from kvtier.store.store import Store
from kvtier.tiers.away.whole_objects import ObjectForm
from kvtier.tiers.away.whole_objects import room as object_room
from kvtier.tiers.nvme.chunk_folder import ChunkFolder
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.nvme.index import table_bytes
from kvtier.tiers.redis.layout import Form
from kvtier.tiers.redis.tier import RedisTier
from tests.trust.clients import FRESH, RUNS, SLOT, Client, opened, right
from tests.trust.disk import SimDisk
from tests.trust.media import Medium, SimBucket, SimLink, SimObjects, SimRedis, SimTier, Watched
from tests.trust.scheduler import Process, Threading, Time, ViolationError, World

FORM = Form("sim", b"model", SLOT // 2)
OBJECT_FORM = ObjectForm("sim", b"model")
KINDS = (
    ("plain",),
    ("nvme",),
    ("nvme",),
    ("redis",),
    ("nvme", "redis"),
    ("nvme", "redis"),
    ("plain", "shared"),
    ("nvme", "shared"),
    ("object",),
    ("nvme", "object"),
    ("redis", "object"),
    (),
)
CLOSE_S = 2.0


@lru_cache(maxsize=1)
def folder():
    """A folder with an empty one for each disk. The simulated files are there in name only."""
    path = Path(tempfile.mkdtemp(prefix="kvtier-simulation-"))
    atexit.register(shutil.rmtree, path)
    return path


@dataclass
class Outcome:
    """What one seed did."""

    seed: int
    steps: int
    events: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    trace: list[str] = field(default_factory=list)


class Simulation:
    """One seed."""

    def __init__(self, seed, *, trace=False):
        self.world = world = World(seed, trace=trace)
        rng = world.rng
        self.events: Counter[str] = Counter()
        self.slots = rng.choice((1, 2, 3, 4, 6, 8))
        self.kinds = rng.choice(KINDS)
        self.capacity = rng.choice((1, 2, 3, 4, 6, 8))
        self.threads, self.bound = rng.randint(1, 3), rng.choice((1, 2, 4, 16))
        self.share = rng.choice((None, None, 0.5))
        self.engines = rng.randint(1, 3)
        self.rate = rng.choice((0.0, 0.0, 0.01, 0.05, 0.2))
        self.runs = rng.sample(RUNS, rng.randint(3, 7))
        """Few, so that they meet again."""
        self.crashes = rng.choice((0, 0, 1, 2))
        self.on_evict, self.a_day = rng.random() < 0.3, rng.choice((None, None, None, 10**6))
        """Of tiers of our own: when they are written, and how much: a chunk, then one in six
        minutes."""
        self.setting = rng.choice((LRU_SETTING, *SETTINGS))
        disks = min(rng.choice((1, 2, 5)), self.capacity)
        ends = [*sorted(rng.sample(range(1, self.capacity), disks - 1)), self.capacity]
        self.set = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        """Capacity of each disk of the NVMe tier."""
        self.set = self.set if "nvme" in self.kinds else []
        self.disk, self.redis, self.bucket = SimDisk(world), SimRedis(world), SimObjects(world)
        self.media = {
            name: Medium(world, self.capacity, shared=name == "shared")
            for name in ("plain", "shared")
        }
        self.computed: set[ChunkKey] = set()
        self.filling: set[int] = set()
        self.loads: list[LoadLease] = []
        self.store: Store | None = None
        self.lanes: list[Lane] = []
        self.tiers: list[Watched] = []
        self.nvme: list[ChunkFolder] = []
        """All there were."""
        self.process: Process | None = None
        self.opened = 0
        world.observe, world.ring = self.observe, self.crash

    def owner(self, number):
        return number + 1 if self.share else 0

    def run_of_keys(self):
        return self.runs[int(self.world.rng.random() * len(self.runs))]

    # ---- invariants ------------------------------------------------------------------------------

    def observe(self):
        store = self.store
        if store is None:
            return
        directory = store._directory
        directory.check()
        for entry in directory._entries.values():
            if entry.state is READY and bytes(store.pool.view(entry.slot)) != right(entry.key):
                raise ViolationError(
                    f"READY, but not whole: {entry.key.hex()[:8]} in slot {entry.slot}"
                )
        for lease in self.loads:
            self.verify(lease)
        for lane in self.lanes:
            if lane.failures:
                raise ViolationError(f"a work of lane {lane.name} raised")
        if len(self.media["plain"].held) > self.capacity:
            raise ViolationError("the tier holds more than its capacity")
        if self.set and any(disk.calls > disk.most_calls for disk in self.disks().disks):
            raise ViolationError("a disk has more calls than its most")

    def verify(self, lease):
        """No byte is served that was not computed for its key."""
        for key, view in zip(lease.keys, lease.views(), strict=False):
            if key not in self.computed or bytes(view) != right(key):
                raise ViolationError(f"wrong bytes served for {key.hex()[:8]}")

    # ---- birth and death -------------------------------------------------------------------------

    def open(self):
        while self.store is None:
            self.opened += 1
            process = Process(f"server{self.opened}")
            self.world.opening = process
            self.world.say("opens")
            try:
                self._open(process)
            except TierError as error:
                self.world.say(f"refused: {error}")
                self.events["opening refused"] += 1
                self.world.kill(process)
                self.world.fault_rate = 0.0
                self.mend("fails", "vanishes")
            finally:
                self.world.opening = None

    def _open(self, process):
        self.lanes = []
        tiers = [Watched(self.world, self.tier(kind)) for kind in self.kinds]
        for tier in tiers:
            self.lanes.append(
                Lane(tier.name, self.threads, urgent_bound=self.bound, bound=self.bound)
            )
        clock = Time(self.world).monotonic
        places = [self.place(tier, lane) for tier, lane in zip(tiers, self.lanes, strict=True)]
        store = opened(Pool(self.slots, SLOT), places, self.setting, clock, self.share)
        self.filling.clear()
        self.loads.clear()
        self.store, self.process, self.tiers = store, process, tiers

    def place(self, tier, lane):
        if tier.shared:
            return TierSpec(tier, lane)
        return TierSpec(
            tier, lane, WriteBudget(self.a_day, SLOT) if self.a_day else None, self.on_evict
        )

    def tier(self, kind):
        if kind == "nvme":
            places = [
                DiskPlace(folder() / f"disk{at}", _room(slots), self.world.rng.randint(1, 2))
                for at, slots in enumerate(self.set)
            ]
            return DiskSet(places, SLOT, clock=Time(self.world).monotonic)
        if kind == "redis":
            link: Any = SimLink(self.world, self.redis)
            clock = Time(self.world).monotonic
            return RedisTier(link, FORM, self.capacity * FORM.room(SLOT), SLOT, clock=clock)
        if kind == "object":
            bucket: Any = SimBucket(self.world, self.bucket)
            clock, bytes_ = Time(self.world).monotonic, self.capacity * object_room(SLOT)
            return ObjectTier(bucket, OBJECT_FORM, bytes_, SLOT, clock)
        return SimTier(self.world, self.media[kind], kind)

    def chunk_folder(self, *given):
        self.nvme.append(ChunkFolder(*given))
        return self.nvme[-1]

    def disks(self):
        """The set of the server that runs, or ran last."""
        tier = self.tiers[self.kinds.index("nvme")].inner
        assert isinstance(tier, DiskSet)
        return tier

    def nvme_now(self):
        """Folders of the disks that are not left alone."""
        return [disk.chunks for disk in self.disks().disks if not disk.away]

    def running(self):
        assert self.store is not None
        return self.store

    def crash(self):
        """The server dies now, in the middle of whatever it does. Returns the step at which to do
        it again."""
        assert self.process is not None
        if self.store is None:
            return self.world.steps + 20
        self.world.say("DIES")
        self.events["crashes"] += 1
        self.loads.clear()
        self.world.kill(self.process)
        self.store = None
        self.crashes -= 1
        return self.world.steps + self.world.rng.randint(1, 400) if self.crashes else math.inf

    def reopen(self, *, closed=False):
        """What was cut off unwinds. Then the medium is as the death left it."""
        dying, before = self.process, self.on_disk()
        while any(task.process is dying for task in self.world.tasks):
            self.world.sleep(0.01)
        if self.world.rng.random() < 0.5:
            self.world.say("power cut")
            self.events["power cuts"] += 1
            self.disk.power_cut()
            for medium in self.media.values():
                medium.power_cut()
        if self.world.rng.random() < 0.5 or not self.set:
            self.mend("hangs")
        self.open()
        if not closed and not self.events["power cuts"] and not self.world.injected:
            found, (held, moving) = self.on_disk()[0], before
            if not held - moving <= found <= held | moving:
                raise ViolationError(f"a kill made {len(held)} chunks on disk {len(found)}")

    def on_disk(self):
        """What the NVMe tier holds, and what is on its way there or away. Nothing where there is
        none."""
        if "nvme" not in self.kinds:
            return set(), set()
        held = set[ChunkKey]().union(*(folder._places for folder in self.nvme_now()))
        return held, self.tiers[self.kinds.index("nvme")].moving

    def let_go(self):
        """No simulated descriptor may outlive the simulated ``os``."""
        self.world.failure = self.store = None
        for tier in self.nvme:
            if tier.was_open:
                tier._files.index = tier._files._payload = tier._files._null = -1
        for lane in self.lanes:
            for queue in lane.queues.values():
                queue.clear()
        self.disk.handles.clear()

    # ---- the walk --------------------------------------------------------------------------------

    def run(self):
        world, rng = self.world, self.world.rng
        world.fault_rate = self.rate if rng.random() < 0.3 else 0.0
        self.open()
        world.fault_rate = self.rate
        if self.crashes:
            world.alarm_at = world.steps + rng.randint(1, 400)
        working = [
            world.spawn(f"engine{number}", Client(self, number).run)
            for number in range(self.engines)
        ]
        if {"shared", "redis", "object"} & set(self.kinds):
            world.spawn("peer", self.peer)
        while any(task in world.tasks for task in working):
            if self.store is None:
                self.reopen()
            elif rng.random() < 0.2:
                self.rot()
            world.sleep(0.02)
        if self.store is None:
            self.reopen()
        world.alarm_at = math.inf
        if rng.random() < 0.15:
            self.close_in_the_middle()
        self.rest()
        if rng.random() < 0.4:
            self.start_again()
        if rng.random() < 0.5:
            self.erase_and_fill()

    def peer(self):
        """Another server on the shared media."""
        shared, world = self.media["shared"], self.world
        remote = next((kind for kind in ("redis", "object") if kind in self.kinds), None)
        tier = self.tier(remote) if remote else None
        for _ in range(world.rng.randint(0, 3)):
            world.sleep(world.rng.random() / 4)
            keys = self.run_of_keys()
            self.computed.update(keys)
            for key in keys:
                if tier is not None:
                    tier.write(key, memoryview(right(key)))
                else:
                    shared.set(key, (right(key), _check(key)))
            if world.rng.random() < 0.3:
                shared.held.pop(keys[0], None)
                self.redis.values.pop(FORM.header_name(keys[-1]), None)
                self.bucket.held.pop(OBJECT_FORM.name(keys[-1]), None)

    def rot(self):
        if self.rate and self.set and self.world.rng.random() < 0.1:
            folder = f"disk{self.world.rng.randrange(len(self.set))}"
            (self.disk.mend if folder in self.disk.fates else self.disk.strike)(folder)
        self.disk.rot()
        self.redis.evict()
        self.bucket.expire()
        for medium in self.media.values():
            medium.rot()

    def mend(self, *fates):
        for folder, fate in list(self.disk.fates.items()):
            if fate in fates:
                self.disk.mend(folder)

    def rest(self):
        """Faults end, everybody is done: nothing is left in between. Disks that failed are left
        alone, and come back."""
        world, store = self.world, self.running()
        world.fault_rate = 0.0
        self.redis.away_until = self.bucket.away_until = 0.0
        self.mend("hangs")
        world.settle()
        if self.set:
            self.sweep(store)
            self.come_back(store)
        self.idle(store)
        if not world.injected and not self.events["crashes"] and "plain" in self.kinds:
            held = store.stats()["plain_held"]
            if held != len(self.media["plain"].held):
                raise ViolationError(
                    f"the tier holds {len(self.media['plain'].held)} chunks, the index {held}"
                )

    def come_back(self, store):
        self.mend("fails", "vanishes")
        self.lanes[self.kinds.index("nvme")].submit(self.touch)
        self.sweep(store)
        self.world.sleep(120.0)
        self.sweep(store)
        if (tier := self.disks()).nodes_away or tier.owed:
            raise ViolationError(f"not back: {tier.nodes_away}, {tier.owed} deletions owed")

    def touch(self):
        """A folder that was replaced is noticed when it is used."""
        for disk in self.disks().disks:
            if disk.chunks.was_open:
                disk.chunks.works()

    def sweep(self, store):
        """What disks that are left alone had is not told of any more, nor is their room."""
        lower = store.lower[self.kinds.index("nvme")]
        self.world.settle()
        told = False
        while not told:
            lower.lane.submit(lower.sweep)
            self.world.settle()
            told = not (self.disks()._lost or self.disks()._found)
        self.idle(store)

    def idle(self, store):
        self.world.quiet = True
        try:
            store.check(idle=True)
        finally:
            self.world.quiet = False
        self.observe()
        directory = store._directory
        for order in directory._orders:
            parts = {key: owner for owner, part in order._parts.items() for key in part}
            if order._split and parts != {
                key: order.owner(key) for key in order if order.owner(key)
            }:
                raise ViolationError(
                    "an owner's own order is not the part of all that is the owner's"
                )
        if "nvme" in self.kinds:
            index, tiers = directory.tiers[self.kinds.index("nvme")], self.nvme_now()
            known, held = sorted(index.order), sorted(key for each in tiers for key in each._places)
            free = sum(len(each._free) + each.owed for each in tiers)
            room = index.capacity
            if known != held or not len(held) + free == sum(each.slots for each in tiers) == room:
                raise ViolationError(
                    f"NVMe: {len(held)} held and {free} free of {room}, {len(known)} known"
                )
            owners = self.tiers[self.kinds.index("nvme")].owners(known)
            if any(
                index.order.owner(key) != whose for key, whose in zip(known, owners, strict=True)
            ):
                raise ViolationError("NVMe: the disk says other owners than the index")

    def close_in_the_middle(self):
        """A close among queued work and slow I/O ends in its time."""
        self.mend("hangs")
        store, begun = self.running(), self.world.now
        self.loads.clear()
        self.store = None
        store.close(CLOSE_S)
        took = self.world.now - begun
        # Each tier's own end is one table of records: a few I/Os, each of which may be slow.
        tables = len(self.kinds) + len(self.set)
        if took > CLOSE_S * len(self.kinds) + 100 * tables + 1.0:
            raise ViolationError(f"close({CLOSE_S}) took {took:.1f} s")
        self.events["closed in the middle"] += 1
        assert self.process is not None
        self.world.kill(self.process)
        self.reopen(closed=True)

    def start_again(self):
        """A clean stop, a start, and a look at everything that was kept."""
        store, held = self.running(), self.on_disk()[0]
        self.store = None
        if not store.close(CLOSE_S):
            raise ViolationError("an idle store did not close in time")
        assert self.process is not None
        self.world.kill(self.process)
        self.events["clean restarts"] += 1
        self.open()
        kept = self.on_disk()[0]
        if kept != held and not (self.on_evict and len(kept) >= len(held)):
            raise ViolationError("a clean restart changed what is on disk")
        store = self.running()
        for keys in RUNS:
            lease = store.load(keys)
            self.loads.append(lease)
            self.world.settle()
            if lease.poll().coming:
                raise ViolationError("a lane has run dry, but something is said to come")
            self.verify(lease)
            self.events["kept over a restart"] += lease.ready
            self.loads.remove(lease)
            lease.close()
        self.world.settle()
        self.idle(store)

    def erase_and_fill(self):
        """After a clear nothing is held. Then every tier takes as much as it ever could."""
        store, world = self.running(), self.world
        store.invalidate_all()
        world.sleep(120.0)
        world.settle()
        self.idle(store)
        if any(store.lookup(keys).progress != (0, 0) for keys in RUNS) or any(
            count for name, count in store.stats().items() if name.endswith("_held")
        ):
            raise ViolationError("chunks are left after a clear")
        if "plain" in self.kinds and self.media["plain"].held:
            raise ViolationError("a clear did not reach what the tier holds")
        world.sleep(120.0)
        for keys in FRESH[: self.capacity]:
            with store.save(keys) as lease:
                if not lease.slots:
                    raise ViolationError("an idle store takes no chunk")
                lease.views()[0][:] = right(keys[0])
                self.computed.update(keys)
                lease.commit()
            world.settle()
        eager = {"redis"} if self.on_evict or self.a_day else {"nvme", "redis"}
        for kind in eager & set(self.kinds):
            held = store.stats()[f"{kind}_held"]
            if held != self.capacity:
                raise ViolationError(
                    f"{kind} takes {held} chunks, not {self.capacity}: room is lost"
                )
        self.events["filled again"] += 1


def _room(slots):
    return table_bytes(slots) + slots * SLOT


def _check(key):
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(key + right(key))


@contextmanager
def replaced(sim):
    """The product's threads, clock and files are the simulation's."""
    stand_ins: dict[str, Any] = {"threading": Threading(sim.world), "time": Time(sim.world)}
    modules = [module for name, module in sys.modules.items() if name.startswith("kvtier.")]
    before: list[tuple[Any, str, Any]] = []
    for module in modules:
        before += [(module, name, vars(module)[name]) for name in stand_ins if name in vars(module)]
    files: Any = kvtier.tiers.nvme.files
    nvme: Any = kvtier.tiers.nvme
    before += [(files, "os", files.os), (nvme.folder, "fcntl", nvme.folder.fcntl)]
    for module in (kvtier.tiers.own_folder, nvme.folder, nvme.chunk_folder):
        before.append((module, "os", vars(module)["os"]))
    before.append((files, "holders_of_removed", files.holders_of_removed))
    stand_ins["holders_of_removed"] = lambda path: []
    before.append((nvme.disk_set, "below", nvme.disk_set.below))
    stand_ins["below"] = lambda place, pattern: []
    before.append((nvme.disk_set, "ChunkFolder", ChunkFolder))
    stand_ins["ChunkFolder"] = sim.chunk_folder
    for module, name, _ in before:
        setattr(module, name, stand_ins.get(name, sim.disk))
    try:
        yield
    finally:
        for module, name, real in before:
            setattr(module, name, real)


def simulate(seed, *, trace=False):
    """Run one seed to its end or its first violation."""
    sim = Simulation(seed, trace=trace)
    world = sim.world
    violation = ""
    with replaced(sim):
        try:
            sim.run()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            violation = f"{type(error).__name__}: {error}"
            world.say(f"VIOLATION {violation}")
        finally:
            world.end()
            sim.let_go()
    return Outcome(seed, world.steps, sim.events, world.injected, violation, world.trace or [])


def many(seeds, *, stop=False):
    """Outcomes of many seeds. ``stop`` at the first violation."""
    outcomes = []
    for seed in seeds:
        outcomes.append(simulate(seed))
        if stop and outcomes[-1].violation:
            break
    return outcomes


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="replay one seed and print its trace")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--stop", action="store_true", help="stop at the first violation")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(  # noqa: S606
            sys.executable,
            [sys.executable, "-m", "tests.trust.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    logging.getLogger("kvtier").setLevel(logging.CRITICAL + 1)
    if given.seed is not None:
        outcome = simulate(given.seed, trace=True)
        sys.stdout.write("\n".join(outcome.trace) + f"\n{outcome.violation or 'no violation'}\n")
        return bool(outcome.violation)
    begun = time.monotonic()
    outcomes = many(range(given.first, given.first + given.seeds), stop=given.stop)
    sys.stdout.write(summary(outcomes, time.monotonic() - begun) + "\n")
    return any(outcome.violation for outcome in outcomes)


def summary(outcomes, seconds):
    """One line of JSON."""
    import json

    return json.dumps(
        {
            "seeds": len(outcomes),
            "steps": sum(outcome.steps for outcome in outcomes),
            "seconds": round(seconds, 1),
            "events": dict(sum((outcome.events for outcome in outcomes), Counter())),
            "injected": dict(sum((outcome.injected for outcome in outcomes), Counter())),
            "violations": [
                f"seed {each.seed}: {each.violation}" for each in outcomes if each.violation
            ],
        }
    )


if __name__ == "__main__":
    sys.exit(main())
