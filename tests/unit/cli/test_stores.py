"""Stores: what ``kvtier serve`` opens for each chunk size, out of one budget."""

from typing import Any

import pytest

from kvtier.cli import serve
from kvtier.config.keys import Config
from kvtier.core.errors import TierError
from kvtier.extensions.objects import parts
from kvtier.started import Started
from kvtier.tiers.nvme import parts as nvme
from tests.nvme_place import room


def test_the_budget_is_looked_at_once_and_each_size_could_have_all_of_it(tmp_path, monkeypatch):
    """Later the first size has most of the memory and of the disk, and less is free."""
    memory, disk = iter([64 * 4096, 8 * 4096]), [room(64, 4096)]
    looked = property(lambda own: own.config.ram.bytes_ or next(memory))
    monkeypatch.setattr(Started, "ram_bytes", looked)
    monkeypatch.setattr(nvme, "free_rooms", lambda folders: ([2 * disk[0]], [0]))
    stores = serve.Stores(
        Started(Config().with_keys(nvme_path=str(tmp_path / "nvme"), nvme_write_limit=1 << 30))
    )
    first = stores(4096)
    disk[0] = room(8, 4096)
    second = stores(8192, True)
    try:
        assert (first.pool.slots, second.pool.slots) == (64, 32)
        assert [tier.capacity for tier in (*first.tiers, *second.tiers)] == [64, 32]
        assert (first.most_held, first.capacities) == (64, [64])
        assert (second.most_held, second.capacities, second.touched.done()) == (0, [0], True)
        assert budget_of(first) is budget_of(second) is not None
    finally:
        assert first.close() and second.close()


def test_what_was_opened_before_a_tier_that_cannot_be_is_closed_again(tmp_path, monkeypatch):
    """The folder on the disk is free for the next store of this process."""

    def away(own, around):
        raise TierError("no such bucket")

    monkeypatch.setattr(parts, "open", away)
    place: dict[str, Any] = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": room(64, 4096)}
    disk = Config().with_keys(ram_bytes=64 * 4096, **place)
    with pytest.raises(TierError, match="no such bucket") as held:
        serve.Stores(
            Started(Config().with_keys(ram_bytes=64 * 4096, **place, object_url="s3://bucket"))
        )(4096)
    assert serve.Stores(Started(disk))(4096).close()
    assert held.value.args, "what the error keeps alive was closed, and not collected"


def budget_of(store):
    (spills,) = list(store._on_save) + list(store._on_evict)
    return spills.budget
