"""Chunk sizes that share one budget, and whose chunks are whose."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/server/test_realm.py", "tests/unit/store/test_directory.py"),
    },
    (
        Mutant(
            "server/registry.py",
            ("        if len(self._owners) > _MAX_OWNERS:\n"),
            ("        if False:\n"),
            "names of tenants fill the memory",
        ),
        Mutant(
            "server/registry.py",
            ("        self._owners.move_to_end(name)\n"),
            "",
            "a tenant who is here all the time is forgotten",
        ),
        Mutant(
            "server/registry.py",
            ("            self._owners.popitem(last=False)\n"),
            ("            self._owners.popitem()\n"),
            "the newest tenant is forgotten",
        ),
        Mutant(
            "server/registry.py",
            ("        if len(self._opening) - len(closing) >= _MOST_SIZES:\n"),
            ("        if False:\n"),
            "sizes of chunks have no bound",
        ),
        Mutant(
            "server/registry.py",
            "if size != self._kept and not realm.users]",
            "if not realm.users]",
            "the configured size is closed",
        ),
        Mutant(
            "server/registry.py",
            "if size != self._kept and not realm.users]",
            "if size != self._kept]",
            "a size is closed under its engines",
        ),
        Mutant(
            "server/registry.py",
            ("        if realm not in self.open.values():\n"),
            ("        if False:\n"),
            "an engine enters a realm that is closed",
        ),
        Mutant(
            "server/registry.py",
            ("        realm.users -= 1\n"),
            "",
            "a size without engines never gives its room back",
        ),
        Mutant(
            "server/registry.py",
            ("        realm.left = self._clock()\n"),
            "",
            "a size is closed as soon as its engine leaves",
        ),
        Mutant(
            "server/registry.py",
            ("            self._discard(size)\n"),
            "",
            "the disk keeps the chunks of a size that was closed",
        ),
        Mutant(
            "server/registry.py",
            ("                room = max(0, self._budget - others) // size\n"),
            ("                room = self._budget // size\n"),
            "two sizes together take more RAM than was given",
        ),
        Mutant(
            "server/registry.py",
            ("        for growing in (False, True):\n"),
            ("        for growing in (False,):\n"),
            "room that was given back is used by nobody",
        ),
        Mutant(
            "server/registry.py",
            "        if self._sharing and slot_bytes > self._budget // parts:",
            "        if False:",
            "a size that cannot be had takes chunks from others",
        ),
        Mutant(
            "server/registry.py",
            ("        self._expected = max(1, len(sizes))\n"),
            "",
            "sizes from before are opened one over the other",
        ),
        Mutant(
            "store/directory.py",
            "(self._leaving if self._surplus > 0 else self._free).append(entry.slot)",
            "self._free.append(entry.slot)",
            "a slot that was to be given back is used again",
        ),
        Mutant(
            "store/directory.py",
            ("        self._given += slots\n"),
            ("        self._free += slots\n"),
            "a slot without memory is handed out",
        ),
        Mutant(
            "store/directory.py",
            ("            if not self._used[entry.owner]:\n                del self._used[entry.owner]\n"),
            "",
            "every tenant that ever was takes memory",
        ),
        Mutant(
            "store/eviction.py",
            ("            if not self._parts[owner]:\n                del self._parts[owner]\n"),
            "",
            "every tenant that ever was has an order of its own",
        ),
        Mutant(
            "store/eviction.py",
            ("        if len(self._once) > _MOST_OWNERS:\n"),
            ("        if False:\n"),
            "numbers of owners are kept for ever",
        ),
        Mutant(
            "store/directory.py",
            ("        self._pinned -= 1\n"),
            "",
            "the count of pinned slots only grows",
        ),
        Mutant(
            "store/directory.py",
            ("        self._filling -= entry.state is FILLING\n"),
            "",
            "the count of slots being filled only grows",
        ),
        Mutant(
            "store/directory.py",
            ("            victim = self._coldest()\n            if victim is None:\n                return False\n"),
            (
                "            victim = next(iter(self._entries.values()), None)\n"
                "            if victim is None:\n"
                "                return False\n"
            ),
            "a slot is given back under its readers",
        ),
        Mutant(
            "store/tier_index.py",
            "len(surplus) < most and len(self) > capacity",
            "len(surplus) < most and len(self.order) > capacity + 1",
            "a tier that must shrink keeps one chunk too many",
        ),
        Mutant(
            "store/store.py",
            ("                self.pool.give_back(slot)\n"),
            ("                pass\n"),
            "RAM that another size has is not given back",
        ),
        Mutant(
            "store/lower_tier.py",
            ("            self.tier.resize(capacity)\n"),
            ("            pass\n"),
            "blocks on the disk are not given back",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            ("                self._files.reserve(slot)\n"),
            ("                pass\n"),
            "blocks that were given back are never reserved again",
        ),
    ),
)
