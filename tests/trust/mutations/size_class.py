"""Chunk sizes that share one budget, and whose chunks are whose."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "rule": (*PYTEST, "tests/unit/server/test_balance.py", "tests/unit/store/test_ages.py"),
        "unit": (
            *PYTEST,
            "tests/unit/server/test_size_class.py",
            "tests/unit/cli/test_stores.py",
            "tests/unit/store/test_directory.py",
        ),
        "tiers": (
            *PYTEST,
            "tests/contract/test_nvme_tier.py",
            "tests/unit/store/test_store_writing.py",
            "-k",
            "lent or restart or budget",
        ),
    },
    (
        Mutant(
            "server/registry.py",
            ("        if len(self.owners) > _MAX_OWNERS:\n"),
            ("        if False:\n"),
            "names of tenants fill the memory",
        ),
        Mutant(
            "server/registry.py",
            "        if slot_bytes > _MAX_SLOT_BYTES:\n",
            "        if False:\n",
            "a greeting with chunks of a TiB opens a store",
        ),
        Mutant(
            "server/registry.py",
            "        self.owners[name] = Owner(number, engine)\n",
            "        self.owners.setdefault(name, Owner(number, engine))\n",
            "a model is shown by the name that an engine before called it",
        ),
        Mutant(
            "server/registry.py",
            ("        self.owners.move_to_end(name)\n"),
            "",
            "a tenant who is here all the time is forgotten",
        ),
        Mutant(
            "server/registry.py",
            ("            self.owners.popitem(last=False)\n"),
            ("            self.owners.popitem()\n"),
            "the newest tenant is forgotten",
        ),
        Mutant(
            "server/registry.py",
            ("        if len(kept) >= _MOST_SIZES:\n"),
            ("        if False:\n"),
            "sizes of chunks have no bound",
        ),
        Mutant(
            "server/registry.py",
            "            if size != self._kept and not one.users",
            "            if not one.users",
            "the configured size is closed",
        ),
        Mutant(
            "server/registry.py",
            "            if size != self._kept and not one.users",
            "            if size != self._kept",
            "a size is closed under its engines",
        ),
        Mutant(
            "server/registry.py",
            "now - one.left >= _IDLE_S\n",
            "now - one.left >= 0 * _IDLE_S\n",
            "a greeting with another size costs a warm tier whose engines are just away",
        ),
        Mutant(
            "server/registry.py",
            "        if client and own >= _MOST_OF_ONE:\n",
            "        if False:\n",
            "one client takes all sizes that there are",
        ),
        Mutant(
            "store/quota.py",
            "        self.part = self._of(room)\n        self._beyond",
            "        self.whole = self.part = self._of(room)\n        self._beyond",
            "with quotas a size with one busy tenant never gets room",
        ),
        Mutant(
            "store/quota.py",
            "            if self._count(one) > self.part:\n",
            "            if False:\n",
            "who took what was free pushes out who has less than his quota",
        ),
        Mutant(
            "store/quota.py",
            "        if owner != NOBODY and self._count(owner) >= self.part:\n",
            "        if False:\n",
            "a tenant that floods its size pushes out the others there",
        ),
        Mutant(
            "server/registry.py",
            ("        if size_class not in self.open.values():\n"),
            ("        if False:\n"),
            "an engine enters a size class that is closed",
        ),
        Mutant(
            "server/registry.py",
            ("        size_class.users -= 1\n"),
            "",
            "a size without engines never gives its room back",
        ),
        Mutant(
            "server/registry.py",
            ("        size_class.left = self._clock()\n"),
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
            "                    left = max(0, self._places[place] - taken - own.fixed) // "
            "own.unit\n",
            "                    left = max(0, self._places[place] - own.fixed) // own.unit\n",
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
            "            if too_large:\n",
            "            if False:\n",
            "a size that cannot be had takes chunks from others",
        ),
        Mutant(
            "server/registry.py",
            ("        self._expected = len(sizes)\n"),
            "",
            "the first size from before reserves the blocks of the others",
        ),
        Mutant(
            "store/slots.py",
            "(self._leaving if kept > self.limit else self.free).append(slot)",
            "self.free.append(slot)",
            "a slot that was to be given back is used again",
        ),
        Mutant(
            "store/slots.py",
            ("        self._given += slots\n"),
            ("        self.free += slots\n"),
            "a slot without memory is handed out",
        ),
        Mutant(
            "store/directory.py",
            (
                "            if not self._used[entry.owner]:\n                del "
                "self._used[entry.owner]\n"
            ),
            "",
            "every tenant that ever was takes memory",
        ),
        Mutant(
            "eviction/order.py",
            ("            if not self._parts[owner]:\n                del self._parts[owner]\n"),
            "",
            "every tenant that ever was has an order of its own",
        ),
        Mutant(
            "eviction/order.py",
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
            (
                "            victim = self._coldest()\n            if victim is None:\n            "
                "    return False\n"
            ),
            (
                "            victim = next(iter(self._entries.values()), None)\n"
                "            if victim is None:\n"
                "                return False\n"
            ),
            "a slot is given back under its readers",
        ),
        Mutant(
            "store/tier_index.py",
            "            and len(self) > self.capacity\n",
            "            and len(self.order) > self.capacity + 1\n",
            "a tier that must shrink keeps one chunk too many",
        ),
        Mutant(
            "store/sharing.py",
            ("                self._pool.give_back(slot)\n"),
            ("                pass\n"),
            "RAM that another size has is not given back",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "        self._reserved = self.tier.resize(capacity)\n",
            "        self._reserved = capacity\n",
            "blocks on the disk are not given back",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            "                self._files.reserve(run[0], len(run))\n",
            "                pass\n",
            "blocks that were given back are never reserved again",
        ),
        Mutant(
            "server/balance.py",
            "    return self.fixed + max(self.unit, place // _LEAST_PART)",
            "    return self.fixed",
            "a size that is idle has nothing left when its engines come back",
        ),
        Mutant(
            "server/balance.py",
            "        if sum(held.values()) <= place:\n            return {size: max(room, level)",
            "        if sum(held.values()) <= place:\n            return {size: max(0, level)",
            "a size that comes takes chunks although there is free room",
        ),
        Mutant(
            "server/balance.py",
            "            return {size: max(room, level) for size, room in held.items()}",
            "            return held",
            "what is free is nobody's",
        ),
        Mutant(
            "server/balance.py",
            "        return {size: max(least[size], min(room, level)) for size, room in "
            "held.items()}",
            "        return {size: room for size, room in held.items()}",
            "a size that comes makes the sum larger than the place",
        ),
        Mutant(
            "server/balance.py",
            "    if sum(least.values()) > place:\n        least = dict.fromkeys(sides, 0)\n",
            "",
            "where not even the least is there, more is given than there is",
        ),
        Mutant(
            "server/balance.py",
            "    left = min(place // _TURN_PART, _TURN_BYTES)\n",
            "    left = place\n",
            "a load takes everything in one turn",
        ),
        Mutant(
            "server/balance.py",
            "            left -= given\n",
            "",
            "each of several sizes moves as much as a turn allows",
        ),
        Mutant(
            "server/balance.py",
            "            rooms[giver] -= given\n",
            "",
            "bytes are given that nobody gave",
        ),
        Mutant(
            "server/balance.py",
            "    bound = _RATIO * (sides[taker].age or 0) + _MARGIN\n",
            "    bound = sides[taker].age or 0\n",
            "two sizes under equal pressure take chunks from each other",
        ),
        Mutant(
            "server/balance.py",
            "        if side.age is not None and side.age > bound\n",
            "        if side.age is not None\n",
            "hot chunks leave for cold ones",
        ),
        Mutant(
            "server/balance.py",
            "sorted(cold, key=lambda size: ages[size], reverse=True)",
            "sorted(cold, key=lambda size: ages[size])",
            "of two sizes the one with the hotter chunks gives",
        ),
        Mutant(
            "server/balance.py",
            "        lacking = min(left, 2 * side.wanted - max(0, rooms[taker] - side.used))",
            "        lacking = min(left, 2 * side.wanted)",
            "a size whose room is on its way takes it again and again",
        ),
        Mutant(
            "store/observers/ages.py",
            "        elif not self._turn:\n            self._floor = turn\n",
            "",
            "chunks from before count as the coldest of all",
        ),
        Mutant(
            "store/observers/ages.py",
            "        if not turn:\n            self._used.clear()\n        elif",
            "        if not turn:\n            pass\n        elif",
            "ages of another counting are believed",
        ),
        Mutant(
            "store/observers/ages.py",
            "        while len(used) > _MOST:\n",
            "        while False:\n",
            "ages of chunks fill the memory",
        ),
        Mutant(
            "store/observers/ages.py",
            "                used.move_to_end(key)\n",
            "",
            "the age of a chunk that is used again is lost first",
        ),
        Mutant(
            "store/observers/ages.py",
            "            self._floor = used.popitem(last=False)[1]\n",
            "            used.popitem(last=False)\n",
            "a chunk whose age was dropped is older than it is",
        ),
        Mutant(
            "store/directory.py",
            "            order.used(run)\n        for tell in self.observers.used:\n"
            "            tell(run)\n",
            "            order.used(run)\n",
            "nobody knows which size has the coldest chunk",
        ),
        Mutant(
            "store/directory.py",
            "            self.crowded[0] += not spent\n",
            "",
            "a size that evicts what it needs gets no room",
        ),
        Mutant(
            "store/directory.py",
            "        self.crowded[1 + index] += len(tier) >= tier.capacity and not "
            "tier.quota.spent(entry.owner)\n",
            "",
            "a size gets no room on the disk",
        ),
        Mutant(
            "store/sharing.py",
            "            self._spare.end_populating()\n",
            "",
            "memory that is given back comes back at once",
        ),
        Mutant(
            "store/sharing.py",
            "                self._spare.populate(slot)\n",
            "                pass\n",
            "the first save into memory that a size was given is slow",
        ),
        Mutant(
            "store/sharing.py",
            "            for lower in self._lower:\n                lower.lend()\n",
            "",
            "a size that is opened beside others takes the whole disk",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "            self.chunks.limit(min(capacity, self._reserved), 0)\n",
            "            self.chunks.limit(capacity, 0)\n",
            "a size says that it has room on a disk that is full",
        ),
        Mutant(
            "store/lower/write_budget.py",
            "            self._level += more\n",
            "            self._level = self._most\n",
            "each size that comes may write a burst",
        ),
        Mutant(
            "tiers/nvme/files.py",
            "os.ftruncate if self._lent else _allocate",
            "_allocate",
            "a second size reserves the whole disk again",
        ),
        Mutant(
            "tiers/nvme/files.py",
            "            self.give_back(slot, count)\n            raise\n",
            "            raise\n",
            "a disk that is full stays full of blocks that nobody uses",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            "            self.resize(len(self._places))\n",
            "            pass\n",
            "after a restart free slots keep their blocks",
        ),
        Mutant(
            "server/registry.py",
            "            self._parts[place] = shift(self._places[place], self._sides(place, "
            "rooms))\n",
            "            pass\n",
            "room never follows the load",
        ),
        Mutant(
            "server/registry.py",
            "        self._turn = self._turn + 1 if len(self._sharing) > 1 else 0\n",
            "        self._turn = 1 if len(self._sharing) > 1 else 0\n",
            "no chunk ever gets older",
        ),
        Mutant(
            "server/registry.py",
            "                    if limits[place] == own.limit and own.occupied <= own.limit:\n",
            "                    if limits[place] == own.limit:\n",
            "slots that were held are never given back",
        ),
        Mutant(
            "server/registry.py",
            "                    rooms[size] = size_class.store.sharing.rooms(self._turn)\n",
            "                    pass\n",
            "who gets counts on what was not given back yet",
        ),
    ),
)
