"""Who may drop what lies in a tier where others write too: its owner and the operator, also after a
restart, and nobody else."""

import pytest
from obstore.store import MemoryStore

from kvtier.core.chunk import ChunkLayout
from kvtier.core.steps import whole
from kvtier.core.tenant import UNOWNED, owner_of, tenant
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.protocol import wire
from kvtier.server.registry import SizeClass
from kvtier.server.stream import ChunkStream
from kvtier.testing import DictTier
from kvtier.tiers.away.library_process import LibraryError
from kvtier.tiers.away.whole_objects import ObjectForm, room
from kvtier.tiers.sealed import SealedTier, sealed_bytes
from tests.answering import Session
from tests.memory_bucket import MemoryBucket
from tests.stores import SLOT, over, save

FORM = ObjectForm("cache/a", b"size 4096")
ACME, EVIL = (owner_of(bytes(32), name) for name in ("acme", "evil"))
THEIRS, EVILS = (
    ChunkLayout(name.ljust(32), 1, 1, (SLOT,)).keys(range(5)) for name in (b"acme", b"evil")
)


class Host:
    """A server's Store over a bucket that outlives it."""

    def __init__(self, tier):
        self.store, (self.lane,) = over(tier, slots=16, bound=999)

    def save(self, keys, owner):
        save(self.store, keys, self.lane, owner=owner)

    def held(self, keys):
        """How many of these can be loaded."""
        with self.store.load(keys) as lease:
            self.lane.run()
            return lease.poll().ready


def resets(session, known=()):
    """An attached engine forgets ``known``, of which it knows the names, then all chunks that there
    are, as vLLM's ``/reset_prefix_cache`` does."""
    whole(session.begin(wire.Invalidate(wire.joined(known))))
    whole(session.begin(wire.InvalidateAllCall()))


def deletes(stream, known):
    """An engine on another host deletes each of these."""
    for number, key in enumerate(known, 1):
        whole(stream.begin(wire.Delete(number, key)))


@pytest.fixture(params=["plain", "sealed"])
def opened(request):
    """Each call is a restart: another server with the same bucket."""
    medium = MemoryStore()

    def host():
        if request.param == "plain":
            return Host(ObjectTier(MemoryBucket(medium), FORM, 64 * room(SLOT), SLOT))
        size = sealed_bytes(SLOT)
        tier = ObjectTier(MemoryBucket(medium), FORM, 64 * room(size), size)
        return Host(SealedTier(tier, bytes(range(32)), SLOT))

    host.medium = medium  # type: ignore[attr-defined]
    return host


def filled(opened):
    """A host that has found what two tenants wrote before it started."""
    before = opened()
    before.save(THEIRS, ACME)
    before.save(EVILS, EVIL)
    return opened()


def test_a_tenant_that_resets_its_cache_after_a_restart_takes_its_own_and_nothing_else(opened):
    host = filled(opened)
    resets(Session(host.store, EVIL), THEIRS)
    host.lane.run()
    assert (host.held(THEIRS), host.held(EVILS)) == (5, 0)
    again = opened()
    assert (again.held(THEIRS), again.held(EVILS)) == (5, 0), "in the bucket itself"
    again.store.check(idle=True)


def test_an_engine_on_another_host_deletes_its_own_and_nothing_else(opened):
    host = filled(opened)
    size_class = SizeClass(host.store, lambda call: call())
    deletes(ChunkStream(size_class, EVIL, SLOT, lambda data: None, lambda: None), THEIRS + EVILS)
    host.lane.run()
    assert (host.held(THEIRS), host.held(EVILS)) == (5, 0)


def test_a_search_for_a_tenants_chunks_finds_that_tenants(opened):
    host = filled(opened)
    (search,) = host.store.purge.unseen(tenant("evil"))
    host.lane.run()
    assert search.result() == (5, True)
    assert (host.held(THEIRS), host.held(EVILS)) == (5, 0)


def test_objects_of_before_are_served_and_only_the_operator_drops_them(opened):
    opened().save(THEIRS, UNOWNED)
    host = opened()
    resets(Session(host.store, EVIL), THEIRS)
    (search,) = host.store.purge.unseen(tenant("acme"))
    host.lane.run()
    assert (search.result(), host.held(THEIRS)) == ((0, False), 5)
    host.store.invalidate_all()
    host.lane.run()
    assert (host.held(THEIRS), opened().held(THEIRS)) == (0, 0)


def test_an_answer_about_owners_that_is_none_is_nobodys(opened):
    bucket = MemoryBucket(opened.medium)
    for owner in (1 << 127, 1, ACME):
        bucket.put("one", [b"x"], owner)
        assert bucket.owner("one") == owner
    bucket.put("one", [b"x"])
    assert (bucket.owner("one"), bucket.owner("none")) == (UNOWNED, UNOWNED)


def test_what_a_bucket_cannot_be_asked_now_stays_and_is_asked_again(opened, monkeypatch):
    host = filled(opened)
    session = Session(host.store, EVIL)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBucket, "owner", failing)
        resets(session)
        host.lane.run()
    assert host.store.lookup(EVILS).known == 5
    for lower in host.store.lower:
        tier = lower.tier.inner if isinstance(lower.tier, SealedTier) else lower.tier
        tier._breaker.ok()  # type: ignore[union-attr]
        lower.sweep_soon()
    host.lane.run()
    assert (host.held(THEIRS), host.held(EVILS)) == (5, 0)


def failing(_, name):
    raise LibraryError(name)


def test_what_a_tier_of_our_own_does_not_say_is_nobodys_goes_with_any_tenant():
    ours, shared = (DictTier(9, held=dict.fromkeys(THEIRS, bytes(SLOT))) for _ in "12")
    shared.shared = True
    for tier, left in ((ours, 0), (shared, 5)):
        host = Host(tier)
        resets(Session(host.store, EVIL), THEIRS)
        host.lane.run()
        assert host.held(THEIRS) == left
