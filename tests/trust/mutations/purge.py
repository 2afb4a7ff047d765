"""Erasing a tenant, or everything."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/admin/test_purge.py"),
        "shared": (*PYTEST, "tests/unit/store/test_shared_owners.py"),
        "directory": (
            *PYTEST,
            "tests/unit/store/test_directory.py",
            "tests/unit/server/test_session.py",
        ),
    },
    (
        Mutant(
            "purge.purge",
            "unfinished = await _drop(size_class.store, owner, seen)",
            "unfinished = 0 * len(seen)",
            "what engines load during a purge survives it",
        ),
        Mutant(
            "purge.purge",
            "await _purge_unseen(size_class.store, owner)",
            "(0, list[str]())",
            "what only a shared tier knows of is not erased",
        ),
        Mutant(
            "Purge._may_drop",
            "key in tier.order and tier.may_drop(key, owner)",
            "key in tier.order",
            "a purge of one tenant counts what others have in lower tiers",
        ),
        Mutant(
            "purge._drop",
            "store.purge.finding(owner)",
            "store.purge.finding(None)",
            "a purge counts chunks of others",
        ),
        Mutant(
            "Directory.keys",
            "every += tier.order.keys()",
            "pass",
            "clearing everything misses what only lower tiers hold",
        ),
        Mutant(
            "Directory.invalidate",
            "entry is not None and entry.state is READY and may(owner, entry.owner)",
            "entry is not None and entry.state is READY",
            "in RAM a tenant drops another's chunks",
        ),
        Mutant(
            "Directory.invalidate",
            "[index for index in self.holders(key) if self.tiers[index].may_drop(key, owner)]",
            "[index for index in self.holders(key)]",
            "in lower tiers a tenant drops another's chunks",
        ),
        Mutant(
            "tenant.may",
            "not shared",
            "True",
            "after a restart every tenant deletes all tenants' chunks in a bucket",
        ),
        Mutant(
            "LowerTier.__init__",
            "self.chunks.shared = place.tier.shared",
            "",
            "a tenant drops what a shared tier does not say is his",
        ),
        Mutant(
            "Bucket.put",
            "{_OWNER: f'{owner:0{2 * OWNER_BYTES}x}'} if owner else None",
            "None",
            "no tenant can drop what it has in a bucket from before a restart",
        ),
        Mutant(
            "LowerTier._ask_whose",
            "[key for key, one in asked if may(owner, one, shared=True)]",
            "[key for key, _ in asked]",
            "a bucket is asked whose a chunk is, and the answer does not count",
        ),
        Mutant(
            "Store.invalidate",
            "self.lower[index].discard(key)",
            "pass",
            "what is forgotten stays in the tiers",
        ),
        Mutant(
            "LowerTier._purge_unseen",
            "self.delete(going)",
            "",
            "what a search of a shared tier found is not deleted",
        ),
        Mutant(
            "LowerTier._purge_unseen",
            "self.chunks.leave_all(keys)",
            "[]",
            "what others wrote into a shared tier is not erased",
        ),
    ),
)
