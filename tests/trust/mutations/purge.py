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
            "admin/purge.py",
            "        unfinished = await _drop(size_class.store, owner, seen)\n",
            "        unfinished = 0 * len(seen)\n",
            "what engines load during a purge survives it",
        ),
        Mutant(
            "admin/purge.py",
            ("        unseen, unsearched = await _purge_unseen(size_class.store, owner)\n"),
            ("        unseen, unsearched = 0, list[str]()\n"),
            "what only a shared tier knows of is not erased",
        ),
        Mutant(
            "store/purge.py",
            "key in tier.order and tier.may_drop(key, owner) for tier in tiers",
            "key in tier.order for tier in tiers",
            "a purge of one tenant counts what others have in lower tiers",
        ),
        Mutant(
            "admin/purge.py",
            "await in_turns(store.purge.finding(owner))",
            "await in_turns(store.purge.finding(None))",
            "a purge counts chunks of others",
        ),
        Mutant(
            "store/directory.py",
            ("            every += tier.order.keys()\n"),
            ("            pass\n"),
            "clearing everything misses what only lower tiers hold",
        ),
        Mutant(
            "store/directory.py",
            (
                "        if entry is not None and entry.state is READY and may(owner, "
                "entry.owner):\n"
            ),
            ("        if entry is not None and entry.state is READY:\n"),
            "in RAM a tenant drops another's chunks",
        ),
        Mutant(
            "store/directory.py",
            "for index in self.holders(key) if self.tiers[index].may_drop(key, owner)]\n",
            "for index in self.holders(key)]\n",
            "in lower tiers a tenant drops another's chunks",
        ),
        Mutant(
            "core/tenant.py",
            "        return not shared\n",
            "        return True\n",
            "after a restart every tenant deletes all tenants' chunks in a bucket",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "        self.chunks.shared = place.tier.shared\n",
            "",
            "a tenant drops what a shared tier does not say is his",
        ),
        Mutant(
            "extensions/objects/bucket.py",
            'attributes = {_OWNER: f"{owner:0{2 * OWNER_BYTES}x}"} if owner else None',
            "attributes = None",
            "no tenant can drop what it has in a bucket from before a restart",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "                own = [key for key, one in asked if may(owner, one, shared=True)]\n",
            "                own = [key for key, _ in asked]\n",
            "a bucket is asked whose a chunk is, and the answer does not count",
        ),
        Mutant(
            "store/store.py",
            "                        self.lower[index].discard(key)\n",
            "                        pass\n",
            "what is forgotten stays in the tiers",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "leave_all(keys)\n            self.delete(going)\n",
            "leave_all(keys)\n",
            "what a search of a shared tier found is not deleted",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            ("                going = self.chunks.leave_all(keys)\n"),
            ("                going = []\n"),
            "what others wrote into a shared tier is not erased",
        ),
    ),
)
