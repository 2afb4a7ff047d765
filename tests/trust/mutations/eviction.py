"""What leaves last, and what traces say of hints."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "kept": (*PYTEST, "tests/unit/eviction/test_kept.py"),
        "returns": (*PYTEST, "tests/unit/eviction/test_returns.py"),
        "planned": (*PYTEST, "tests/unit/eviction/test_planned.py"),
        "saved": (*PYTEST, "tests/unit/eviction/test_saved_compute.py"),
        "hints": (*PYTEST, "tests/unit/eviction/test_hints.py"),
        "curve": (*PYTEST, "tests/unit/eviction/test_what_if.py"),
        "traces": (*PYTEST, "tests/unit/bench/traces/test_simulate.py", "-k", "kept or recorded"),
        "replay": (
            *PYTEST,
            "tests/integration/test_record_replay.py",
            "-k",
            "kept_for_a_time",
        ),
    },
    (
        Mutant(
            "eviction/hints.py",
            'json.dumps([salt or "", session])',
            '((salt or "") + session)',
            "a tenant ends another one's session",
        ),
        Mutant(
            "eviction/what_if.py",
            "            self._counts[number] += bisect_left(before, self._cuts[number])\n",
            "            self._counts[number] += bisect_left(before, 0)\n",
            "the curve has more hits than an LRU of that size has",
        ),
        Mutant(
            "eviction/what_if.py",
            "accumulate(found, min, initial=lowest)",
            "sorted([*found, lowest], reverse=True)",
            "the curve promises hits behind a hole, which no LRU has",
        ),
        Mutant(
            "eviction/what_if.py",
            "[new[cut - first] if first <= cut < end else cut for cut in self._cuts]",
            "self._cuts",
            "sizes change when chunks move together",
        ),
        Mutant(
            "eviction/kept.py",
            "        count = self.count(owner) - self.own_bound\n",
            "        count = len(self.stays) - self.bound\n",
            "one tenant keeps all that all tenants may keep",
        ),
        Mutant(
            "eviction/kept.py",
            "max(self._of, key=self.count)",
            "owner",
            "a tenant that keeps little gives way to one that keeps much",
        ),
        Mutant(
            "eviction/kept.py",
            "        return int(self._part * (self._share or 1.0) * self._room)\n",
            "        return int(self._part * self._room)\n",
            "a tenant with a quota keeps all of it, and its other prompts have no room",
        ),
        Mutant(
            "eviction/kept.py",
            "        self.stays[key] = stay._replace(until=self._now + stay.seconds)\n",
            "",
            "what is used again is kept no longer than before",
        ),
        Mutant(
            "eviction/kept.py",
            "                self.stays.move_to_end(key)\n",
            "                pass\n",
            "a few chunks that are kept long hide all whose time is over",
        ),
        Mutant(
            "eviction/returns.py",
            "                error -= 1.0\n",
            "                error -= 0.0\n",
            "nobody ever comes back, as far as is learnt",
        ),
        Mutant(
            "eviction/returns.py",
            "seen.index else _BUSY",
            "seen.index else 0.0",
            "a session whose answer is being made leaves first",
        ),
        Mutant(
            "eviction/returns.py",
            "if self._learner.prompts < _LEAST_PROMPTS:",
            "if seen is None:",
            "what is not known yet decides which session leaves",
        ),
        Mutant(
            "eviction/planned.py",
            "            if key in first:\n                del first[key]\n",
            "            pass\n",
            "what is used again leaves first all the same",
        ),
        Mutant(
            "eviction/saved_compute.py",
            "end * end - first * first",
            "chunks * chunks",
            "late chunks save no more than early ones",
        ),
        Mutant(
            "eviction/order.py",
            "        self._release([(key, self.kept.drop(key)) for key in run if key in "
            "self._stays])\n",
            "",
            "what is over is kept",
        ),
        Mutant(
            "store/directory.py",
            "        for order in self._orders:\n            order.keep(run, seconds, salt)\n",
            "        self._order.keep(run, seconds, salt)\n",
            "tiers below RAM keep nothing",
        ),
        Mutant(
            "store/directory.py",
            "            tier.order.keep_as(self.order, entry.key)\n",
            "",
            "what is kept is kept no longer once it is written below",
        ),
        Mutant(
            "store/directory.py",
            "            self.order.keep_as(self.tiers[source].order, entry.key)\n",
            "            pass\n",
            "what is kept is kept no longer once it comes back to RAM",
        ),
        Mutant(
            "assemble.py",
            "        orders = orders._replace(keep=config.keep_percent / 100)\n",
            "",
            "what tenants may keep is not what is configured",
        ),
        Mutant(
            "bench/traces/mooncake.py",
            'kept._replace(over=given.get("over") is True)',
            'hints.Hint(given.get("over") is True)',
            "a simulation keeps nothing of what was recorded as kept",
        ),
        Mutant(
            "bench/traces/replay.py",
            "        if request.hint != NOTHING:\n",
            "        if request.hint.over:\n",
            "a replay keeps nothing of what was recorded as kept",
        ),
    ),
)
