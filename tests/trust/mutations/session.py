"""What one client may do: its leases, what it may hold at once, and how long it is worked on."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/server/test_session.py", "tests/unit/server/test_shares.py"),
    },
    (
        Mutant(
            "server/session.py",
            ("        if number not in leases:\n"),
            ("        if False:\n"),
            "an unknown lease number is a bug of the server and not of the client",
        ),
        Mutant(
            "server/session.py",
            ("        if number not in self._held:\n"),
            ("        if False:\n"),
            "the end of an unknown lease is a bug of the server and not of the client",
        ),
        Mutant(
            "server/session.py",
            (" for slot in slots if slot in renewals] if renewals else []\n"),
            (" for slot in slots if slot in renewals] if not slots else []\n"),
            "an engine is not told that its slots have other memory",
        ),
        Mutant(
            "server/session.py",
            ("        most = self._share.held + self._share.left\n"),
            ("        most = self._store.pool.slots\n"),
            "an engine believes that a server's whole pool is its own",
        ),
        Mutant(
            "server/session.py",
            ("        if len(places) < len(keys):\n"),
            ("        if False:\n"),
            "a save that names a chunk twice is believed",
        ),
        Mutant(
            "server/session.py",
            ("        if question.known > ready:\n"),
            ("        if False:\n"),
            "a client that claims to know more than there is gets a wrong part of its slots",
        ),
        Mutant(
            "server/session.py",
            "self._opened(self._saves, message.lease)",
            "self._opened(self._saves | self._loads, message.lease)",
            "a load can be committed",
        ),
        Mutant(
            "server/session.py",
            "self._store.save.steps(keys, self._owner, most)",
            "self._store.save.steps(keys, self._owner)",
            "one save takes every slot of the pool",
        ),
        Mutant(
            "server/session.py",
            "                min(most, question.most),\n",
            "                question.most,\n",
            "loads pin as many slots as they name",
        ),
        Mutant(
            "server/session.py",
            "len(lease.keys) if lease.asking else ready + coming\n",
            "ready + coming\n",
            "what a shared tier still brings is not counted",
        ),
        Mutant(
            "server/session.py",
            ("        self._share.held += slots - before\n"),
            ("        self._share.held += slots\n"),
            "what a lease gave back counts for ever",
        ),
        Mutant(
            "server/session.py",
            ("        self._book(number, 0)\n"),
            "",
            "ended leases count as held for ever",
        ),
        Mutant(
            "server/session.py",
            "return self._share.left if len(self._held) < _MAX_LEASES else 0",
            "return self._share.left",
            "the number of leases has no bound",
        ),
        Mutant(
            "server/session.py",
            ("            self._share.held -= count\n"),
            ("            pass\n"),
            "every save makes the client's part smaller",
        ),
        Mutant(
            "server/session.py",
            ("        self._share.leave()\n"),
            "",
            "engines that are gone keep a part of the pool",
        ),
        Mutant(
            "server/session.py",
            (
                "        yield from self._store.invalidate.steps(keys, self._owner)\n"
                "        return None\n\n    def _decline"
            ),
            (
                "        yield from self._store.invalidate.steps(keys)\n"
                "        return None\n\n    def _decline"
            ),
            "a tenant forgets another tenant's chunks",
        ),
        Mutant(
            "server/session.py",
            (
                "        yield from self._store.invalidate.steps(keys, self._owner)\n"
                "        return None\n\n    # ---- changes"
            ),
            (
                "        yield from self._store.invalidate.steps(keys)\n"
                "        return None\n\n    # ---- changes"
            ),
            "a tenant clears everybody's chunks",
        ),
        Mutant(
            "server/shares.py",
            ("            yield left\n"),
            ("            break\n"),
            "looks at all chunks follow each other without a pause",
        ),
        Mutant(
            "server/shares.py",
            ("        self._after = now + _REST * (now - begun)\n"),
            "",
            "a look at all chunks is not followed by a pause",
        ),
        Mutant(
            "server/session.py",
            ("        while self._held:\n"),
            ("        if self._held:\n"),
            "only one lease of a dead engine ends",
        ),
        Mutant(
            "server/shares.py",
            ("_REST = 99\n"),
            ("_REST = 1\n"),
            "looks at all chunks take half of the time",
        ),
        Mutant(
            "server/shares.py",
            ("        free = slots - sum(one.held for one in self._shares)\n"),
            ("        free = slots - self.held\n"),
            "what others hold does not count",
        ),
        Mutant(
            "server/shares.py",
            "free - reserve, min",
            "free, min",
            "nothing is left for the next engine",
        ),
        Mutant(
            "server/shares.py",
            "min(own - self.held, free))",
            "0)",
            "an engine that holds nothing gets nothing of the reserve",
        ),
        Mutant(
            "store/store.py",
            ("                    for key in absent[: wanted - len(entries)]:\n"),
            ("                    for key in absent:\n"),
            "a save reserves more than it may",
        ),
        Mutant(
            "store/store.py",
            ('            self.counts["save_refused"] += missing - len(entries)\n'),
            ('            self.counts["save_refused"] += 0\n'),
            "saves that found no room are not counted",
        ),
        Mutant(
            "store/store.py",
            (
                "            raise\n        with self._lock:\n            "
                'self.counts["save_refused"]'
            ),
            ('            raise\n        with self._lock:\n            self.counts["saved"]'),
            "saves that found no room count as saved",
        ),
        Mutant(
            "core/steps.py",
            ("AT_ONCE = 128\n"),
            ("AT_ONCE = 1 << 20\n"),
            "one message holds the lock and the loop for as long as it names chunks",
        ),
        Mutant(
            "store/lookup.py",
            ("        if at % _AT_ONCE == _AT_ONCE - 1:\n            yield 0.0\n"),
            ("        if False:\n            yield 0.0\n"),
            "a lookup of a long prompt holds the lock all the time",
        ),
    ),
)
