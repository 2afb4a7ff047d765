"""A start measures a tier that holds something from before."""

from contextlib import closing

from kvtier.assemble import assemble_store, paces
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.started import Started
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from kvtier.tiers.nvme.check import discard
from kvtier.tiers.nvme.folder import Learnt, read_learnt, write_learnt
from tests.child_process import wait_for

SLOT = 8192
LAYOUT = ChunkLayout(fingerprint({"model": "a"}), 1, 1, (SLOT,))
KEYS = LAYOUT.keys(range(6))


def test_a_tier_that_holds_chunks_is_measured_before_anybody_asks(tmp_path):
    config = Config().with_keys(
        ram_bytes=8 * SLOT, nvme_path=str(tmp_path / "tier"), nvme_bytes=1 << 20
    )
    name = f"nvme {SLOT} {tmp_path / 'tier'}"
    with closing(assemble_store(Started(config), LAYOUT)) as store:
        (pace,) = paces(store, config).values()
        with store.save(KEYS) as lease:
            lease.commit()
        wait_for(lambda: store.stats()["nvme_held"] == 6, "written")
        assert pace.read_s is None, "nothing was there, and nothing was read"
    with closing(assemble_store(Started(config), LAYOUT)) as store:
        pace = paces(store, config)[name]
        wait_for(lambda: pace.read_s is not None and store.lanes[0].is_idle, "measured")
        assert (pace.wait(1, store.clock()) or 9) < 9
        stats = store.stats()
        assert (stats["ram_free"], stats.get("nvme_missed", 0)) == (8, 0), "no slot was taken"
        store.check(idle=True)


def test_what_has_left_by_then_and_what_a_shared_tier_may_hold_are_not_read():
    for shared in (False, True):
        lane, reads = ManualLane(), list[bytes]()

        class Tier(DictTier):
            def read(self, key, into, reads=reads):
                reads.append(key)
                return super().read(key, into)

        tier = Tier(8, shared=shared)
        store = Store(Pool(8, SLOT), [(tier, lane)])
        tier.held |= {key: bytes(SLOT) for key in KEYS}
        if not shared:
            store._directory.tiers[0].found(KEYS, [0] * 6)
        store.lower[0].measure()
        assert len(lane) == (0 if shared else lane.threads)
        store.invalidate(KEYS)
        lane.run()
        assert not reads
        store.close()


def test_what_was_learnt_goes_with_its_folder(tmp_path):
    folder = tmp_path / "tier"
    config = Config().with_keys(ram_bytes=8 * SLOT, nvme_path=str(folder), nvme_bytes=1 << 20)
    assemble_store(Started(config), LAYOUT).close()
    write_learnt(folder, Learnt({"one": (1e-3, 0.0)}))
    with closing(assemble_store(Started(config), LAYOUT)):
        assert read_learnt(folder).engines, "a start keeps it"
    discard(folder)
    assert not folder.exists()
