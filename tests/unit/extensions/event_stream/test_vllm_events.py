"""KV events by the Store's own changes: announced once a place, withdrawn when a chunk leaves,
and withdrawn altogether when changes were lost."""

import pytest

from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.lookup import RAM_PLACE
from kvtier.testing import DictTier
from tests.announcing import BLOCK, CHUNK, GEOMETRY, Announcing, Asked
from tests.stores import over

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    """vLLM publishes 64 bits of each hash by default."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Bench(Announcing):
    """A Store of four slots over one tier, whose lane is turned by hand."""

    def __init__(self, tier="nvme"):
        store, (self.lane,) = over(DictTier(2, name=tier))
        super().__init__(store)

    def heard(self):
        """Kind, medium, owner and first hash's first byte of each event."""
        return [
            (type(one).__name__, one.medium, one.ownership, one.block_hashes[0][2])
            for one in self.announcer.events()
        ]


def test_a_chunk_is_announced_when_it_is_ready_and_again_when_a_tier_has_it():
    bench, request = Bench(), Asked(1, 2)
    with bench.store.save(request.keys) as lease:
        pieces = dict(zip(request.keys, GEOMETRY.trunk(0, 2), strict=True))
        bench.announcer.saving(Prompt(request, None), 0, 1, pieces)
        assert bench.heard() == [], "nothing can be served yet"
        lease.commit()
    assert bench.announcer.waits
    first, second = bench.announcer.events()
    assert (first.medium, first.locality, first.ownership) == ("CPU", "LOCAL", None)
    assert first.block_hashes == request.block_hashes[:2]
    assert first.parent_block_hash is None
    assert second.parent_block_hash == request.block_hashes[1]
    assert second.token_ids == request.all_token_ids[CHUNK:]
    assert (second.block_size, second.group_idx) == (BLOCK, 0)
    bench.lane.run()
    assert bench.heard() == [
        ("BlockStored", "STORAGE", None, 0),
        ("BlockStored", "STORAGE", None, 2),
    ]
    assert not bench.announcer.waits


def test_what_other_hosts_reach_too_is_owned_by_its_tier():
    owners = {}
    for tier in ("nvme", "redis", "object", "mooncake"):
        bench = Bench(tier)
        bench.save(Asked(1, 1))
        bench.lane.run()
        _, lower = bench.announcer.events()
        owners[tier] = (lower.medium, lower.locality, lower.ownership)
    assert owners == {
        "nvme": ("STORAGE", "LOCAL", None),
        "redis": ("STORAGE", "REMOTE", "redis"),
        "object": ("STORAGE", "REMOTE", "object"),
        "mooncake": ("STORAGE", "REMOTE", "mooncake"),
    }


def test_what_leaves_is_withdrawn_from_where_it_left():
    bench = Bench()
    bench.save(Asked(1, 2))
    bench.lane.run()
    bench.heard()
    bench.store.invalidate_all()
    assert sorted(bench.heard()) == [
        ("BlockRemoved", "CPU", None, 0),
        ("BlockRemoved", "CPU", None, 2),
        ("BlockRemoved", "STORAGE", None, 0),
        ("BlockRemoved", "STORAGE", None, 2),
    ]
    assert not bench.announcer._described, "nothing is remembered of what is nowhere"


def test_a_save_that_failed_is_never_announced():
    bench, request = Bench(), Asked(1, 1)
    bench.save(request, fails=True)
    assert bench.heard() == []
    assert not bench.announcer._described


def test_chunks_from_before_are_announced_when_a_prompt_names_them():
    bench, request = Bench(), Asked(1, 2)
    with bench.store.save(request.keys) as lease:
        lease.commit()
    bench.lane.run()
    assert bench.heard() == [], "their tokens are not known"
    bench.name(request)
    assert [one[:3] for one in bench.heard()] == [
        ("BlockStored", "CPU", None),
        ("BlockStored", "STORAGE", None),
    ] * 2
    bench.name(request)
    assert bench.heard() == [], "once is enough"


def test_after_a_loss_everything_is_withdrawn_and_named_anew(monkeypatch):
    bench, request = Bench(), Asked(1, 1)
    bench.save(request)
    assert len(bench.heard()) == 1
    monkeypatch.setattr("kvtier.store.observers.changes._WAITING_CHANGES", 0)
    bench.lane.run()
    assert bench.heard() == [("BlockRemoved", "CPU", None, 0)]
    bench.name(request)
    assert [one[:3] for one in bench.heard()] == [
        ("BlockStored", "CPU", None),
        ("BlockStored", "STORAGE", None),
    ]
    assert RAM_PLACE == 0


def test_tokens_that_vllm_has_not_hashed_are_not_announced():
    bench, request = Bench(), Asked(1, 1)
    request.block_hashes = request.block_hashes[:1]
    bench.save(request)
    assert bench.heard() == []
