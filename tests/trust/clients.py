"""The engines of the simulation: clients that save, load, hold leases long, forget, clear and
die."""

from contextlib import contextmanager
from functools import lru_cache

from kvtier.core.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.eviction.adaptive import Adaptive
from kvtier.store.lease import LoadLease
from kvtier.store.store import Store
from kvtier.testing import content
from tests.trust.scheduler import Dead, Process, ViolationError

SLOT = 2 * PAGE_BYTES
LAYOUT = ChunkLayout(fingerprint({"model": "simulation"}), 1, 1, (SLOT,))
PROMPTS = (
    [0],
    [0, 0],
    [0, 0, 0],
    [0, 0, 0, 0],
    [0, 1],
    [0, 1, 1],
    [1, 0, 1],
    [1, 1, 1, 1, 1],
    [2],
    [3, 3],
    [4],
    [5, 5],
)
RUNS = [LAYOUT.keys(prompt) for prompt in PROMPTS]
FRESH = [LAYOUT.keys([100 + number]) for number in range(8)]


@lru_cache(maxsize=256)
def right(key):
    """The only bytes that may ever be served for the key."""
    return bytes(content(key, SLOT))


def opened(pool, places, setting, clock, share=None):
    """A Store with the orders of ``policy: auto``, which keep this setting and learn nothing."""
    adaptive = Adaptive()
    store = Store(pool, places, adaptive.orders()._replace(adaptive=None), share, clock=clock)
    for order, _ in adaptive.places:
        order.settle(setting)
    return store


class Client:
    """One client: its open leases and what it does next."""

    def __init__(self, simulation, number):
        self.sim, self.world, self.number = simulation, simulation.world, number
        self.loads: list[LoadLease] = []
        self.process: Process | None = None

    def run(self):
        rng = self.world.rng
        for _ in range(rng.randint(4, 20)):
            self.world.sleep(rng.choice((0.0, 0.0, 0.03, 0.3)))
            store, process = self.sim.store, self.sim.process
            if store is None:
                self.world.sleep(0.3)
                continue
            if process is not self.process:
                self.process = process
                self._drop_all()
            try:
                (verb,) = rng.choices(
                    (self.save, self.load, self.look, self.drop, self.erase), (8, 9, 3, 2, 1)
                )
                verb(store)
            except Dead:
                if self.world.over:
                    raise
                self.world.say("the server has died under a call")
        try:
            self.let_go()
        except Dead:
            if self.world.over:
                raise
        self._drop_all()

    def save(self, store):
        keys, rng = self.sim.run_of_keys(), self.world.rng
        with self.call("save", len(keys)):
            lease = store.save(keys, self.sim.owner(self.number))
        slots = set(lease.slots)
        if slots & self.sim.filling:
            raise ViolationError("a slot has two writers")
        self.sim.filling |= slots
        try:
            self.fill(lease)
            with self.call("end of save", len(keys)):
                if rng.random() < 0.85:
                    self.sim.computed.update(lease.keys)
                    self.sim.filling -= slots
                    lease.commit()
                    self.sim.events["saved"] += len(slots)
                else:
                    self.sim.events["aborted saves"] += 1
                    self.sim.filling -= slots
                    lease.close()
        finally:
            self.sim.filling -= slots

    def fill(self, lease):
        """In two halves, so that whoever reads too early reads a torn chunk."""
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = b"\xdd" * SLOT
            self.world.step(None, "fill")
            view[: SLOT // 2] = right(key)[: SLOT // 2]
            self.world.step(None, "fill, half")
            view[SLOT // 2 :] = right(key)[SLOT // 2 :]

    def load(self, store):
        keys, rng = self.sim.run_of_keys(), self.world.rng
        with self.call("load", len(keys)):
            lease = store.load(keys, rng.choice((0, 0, 1)), self.sim.owner(self.number))
        self.loads.append(lease)
        self.sim.loads.append(lease)
        for _ in range(rng.randint(0, 12)):
            with self.call("poll", len(keys)):
                before = lease.ready
                ready, coming = lease.poll()
            if ready < before:
                raise ViolationError("a lease took back what it had shown")
            if not coming:
                break
            if rng.random() < 0.5:
                store.wait(rng.choice((0.01, 1.0)))
            else:
                self.world.sleep(rng.choice((0.01, 0.1)))
        self.sim.verify(lease)
        self.sim.events["served"] += lease.ready
        self.sim.events["served from below"] += sum(source != "ram" for source in lease.sources)
        if rng.random() < 0.75:
            self.close(lease)

    def look(self, store):
        keys = self.sim.run_of_keys()
        with self.call("lookup", len(keys)):
            ready, coming = store.lookup(keys).progress
        if self.world.rng.random() < 0.7:
            with self.call("decline", len(keys)):
                store.decline(keys, "slower")
        if not 0 <= ready <= ready + coming <= len(keys) or not self.sim.computed.issuperset(
            keys[:ready]
        ):
            raise ViolationError(f"lookup of {ready} + {coming} of {len(keys)} chunks")

    def drop(self, store):
        """Let go of one lease, or die with all."""
        if self.world.rng.random() < 0.3:
            self.sim.events["engines died"] += 1
            self.let_go()
        elif self.loads:
            self.close(self.loads[0])

    def erase(self, store):
        keys = self.sim.run_of_keys()
        if self.world.rng.random() < 0.2:
            with self.call("clear", 64):
                store.invalidate(store.every_key(), self.sim.owner(self.number) or None)
        else:
            with self.call("forget", len(keys)):
                store.invalidate(keys[-1:], self.sim.owner(self.number) or None)
        self.sim.events["erased"] += 1

    def close(self, lease):
        if lease in self.sim.loads:
            self.sim.verify(lease)
            self.sim.loads.remove(lease)
        self.loads.remove(lease)
        with self.call("close", len(lease.keys)):
            lease.close()

    def let_go(self):
        for lease in list(self.loads):
            self.close(lease)

    def _drop_all(self):
        """The server they were from is no more."""
        self.sim.loads = [lease for lease in self.sim.loads if lease not in self.loads]
        self.loads.clear()

    @contextmanager
    def call(self, name, keys):
        task = self.world.current
        before, bound = task.steps, 12 + 6 * keys
        self.world.say(name)
        task.calling = True
        try:
            yield
        finally:
            task.calling = False
        if task.steps - before > bound:
            raise ViolationError(f"{name} took {task.steps - before} steps, more than {bound}")
