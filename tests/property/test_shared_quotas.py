"""Several chunk sizes and several tenants in one budget, at random: quotas hold at every moment,
and a tenant has room for its quota of what its size has, whatever the others took before."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.pool import Pool
from kvtier.server.registry import SizeClass, SizeClasses
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.child_process import DEADLINE_S

SIZES = (4096, 8192, 12288)
RAM, DISK = 48 * 4096, 60 * 4096
OWNERS = (1, 2, 3)
ACTS = st.lists(
    st.tuples(st.sampled_from(SIZES), st.sampled_from(OWNERS), st.integers(1, 12), st.booleans()),
    max_size=25,
)


class Disk(DictTier):
    """Of a budget that the sizes divide."""

    def __init__(self, slot_bytes):
        super().__init__(DISK // slot_bytes, name="nvme")
        self.chunk_room = slot_bytes


class Sizes:
    """Three sizes. Every tier's lane runs when a test says so."""

    def __init__(self, share):
        self._share = share
        self.lanes: dict[int, ManualLane] = {}
        self._all = SizeClasses(self._store, lambda call: call())
        self.classes: dict[int, SizeClass] = {}
        for size in SIZES:
            self.classes[size] = self._all.get(size).result(DEADLINE_S)
            self._all.enter(self.classes[size])
        self._saved = 0

    def _store(self, slot_bytes, lent=False):
        self.lanes[slot_bytes] = ManualLane(urgent_bound=64, bound=256)
        store = Store(
            Pool(RAM // slot_bytes, slot_bytes),
            [(Disk(slot_bytes), self.lanes[slot_bytes])],
            share=self._share,
        )
        if lent:
            store.sharing.lend()
        return store

    def save(self, size, owner, count):
        """Save so many new prompts of a chunk each. Returns the keys."""
        keys = list[ChunkKey]()
        for _ in range(count):
            self._saved += 1
            keys += (run := ChunkLayout(bytes(32), 1, 1, (size,)).keys([self._saved]))
            with self.classes[size].store.save(run, owner) as lease:
                lease.commit()
            self.lanes[size].run()
        return keys

    def settle(self):
        self._all.settle()
        self._all.on_lane(lambda: None).result(DEADLINE_S)

    def check(self):
        for size, one in self.classes.items():
            self.lanes[size].run()
            one.store.check(idle=True)
            directory = one.store._directory
            for owner in OWNERS:
                assert directory._used[owner] <= max(1, int(RAM // size * self._share))
                held = directory.tiers[0].order.count(owner)
                assert held <= max(1, int(DISK // size * self._share))
        assert sum(one.store.sharing.occupied * size for size, one in self.classes.items()) <= RAM

    def close(self):
        assert self._all.close(10.0)


@given(acts=ACTS, percent=st.sampled_from([10, 34, 50, 90, 100]), last=st.sampled_from(SIZES))
@settings(max_examples=60, deadline=None)
def test_quotas_hold_while_room_moves_and_each_tenant_gets_its_part(acts, percent, last):
    sizes = Sizes(percent / 100)
    try:
        for size, owner, count, settles in acts:
            sizes.save(size, owner, count)
            if settles:
                sizes.settle()
            sizes.check()
        directory = sizes.classes[last].store._directory
        part = directory._quota.part
        assert part is not None
        newcomer = sizes.save(last, 4, part)
        assert all(directory.get(key) is not None for key in newcomer[-directory.slots.limit :])
        sizes.check()
    finally:
        sizes.close()
