"""What one client may do: its leases, what it may hold at once, and how long it is worked on."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/server/test_session.py", "tests/unit/server/test_shares.py"),
    },
    (
        Mutant(
            "Session._opened",
            "number not in leases",
            "False",
            "an unknown lease number is a bug of the server and not of the client",
        ),
        Mutant(
            "Session._drop",
            "number not in self._held",
            "False",
            "the end of an unknown lease is a bug of the server and not of the client",
        ),
        Mutant(
            "Session._renewed",
            "[(slot, renewals[slot]) for slot in slots if slot in renewals] if renewals else []",
            "[(slot, renewals[slot]) for slot in slots if slot in renewals] if not slots else []",
            "an engine is not told that its slots have other memory",
        ),
        Mutant(
            "Session._lookup",
            "self._share.held + self._share.left",
            "self._store.pool.slots",
            "an engine believes that a server's whole pool is its own",
        ),
        Mutant(
            "Session._save",
            "len(places) < len(keys)",
            "False",
            "a save that names a chunk twice is believed",
        ),
        Mutant(
            "Session._poll",
            "question.known > ready",
            "False",
            "a client that claims to know more than there is gets a wrong part of its slots",
        ),
        Mutant(
            "Session._commit",
            "self._opened(self._saves, message.lease)",
            "self._opened(self._saves | self._loads, message.lease)",
            "a load can be committed",
        ),
        Mutant(
            "Session._save",
            "self._store.save.steps(keys, self._owner, most)",
            "self._store.save.steps(keys, self._owner)",
            "one save takes every slot of the pool",
        ),
        Mutant(
            "Session._load",
            "min(most, question.most)",
            "question.most",
            "loads pin as many slots as they name",
        ),
        Mutant(
            "Session._load",
            "len(lease.keys) if lease.asking else ready + coming",
            "ready + coming",
            "what a shared tier still brings is not counted",
        ),
        Mutant(
            "Session._book",
            "slots - before",
            "slots",
            "what a lease gave back counts for ever",
        ),
        Mutant(
            "Session._drop",
            "self._book(number, 0)",
            "",
            "ended leases count as held for ever",
        ),
        Mutant(
            "Session._left",
            "self._share.left if len(self._held) < _MAX_LEASES else 0",
            "self._share.left",
            "the number of leases has no bound",
        ),
        Mutant(
            "Session._taken",
            "self._share.held -= count",
            "pass",
            "every save makes the client's part smaller",
        ),
        Mutant(
            "Session.ending",
            "self._share.leave()",
            "",
            "engines that are gone keep a part of the pool",
        ),
        Mutant(
            "Session._invalidate",
            "self._store.invalidate.steps(keys, self._owner)",
            "self._store.invalidate.steps(keys)",
            "a tenant forgets another tenant's chunks",
        ),
        Mutant(
            "Session._invalidate_all",
            "self._store.invalidate.steps(keys, self._owner)",
            "self._store.invalidate.steps(keys)",
            "a tenant clears everybody's chunks",
        ),
        Mutant(
            "ScanLimiter.looking",
            "yield left",
            "break",
            "looks at all chunks follow each other without a pause",
        ),
        Mutant(
            "ScanLimiter.looking",
            "self._after = now + _REST * (now - begun)",
            "",
            "a look at all chunks is not followed by a pause",
        ),
        Mutant(
            "Session.ending",
            "while self._held:\n    ...",
            "if self._held:\n    ...",
            "only one lease of a dead engine ends",
        ),
        Mutant(
            "server.shares",
            "_REST = 99",
            "_REST = 1",
            "looks at all chunks take half of the time",
        ),
        Mutant(
            "Share.left",
            "sum((one.held for one in self._shares))",
            "self.held",
            "what others hold does not count",
        ),
        Mutant(
            "Share.left",
            "free - reserve",
            "free",
            "nothing is left for the next engine",
        ),
        Mutant(
            "Share.left",
            "min(own - self.held, free)",
            "0",
            "an engine that holds nothing gets nothing of the reserve",
        ),
        Mutant(
            "Store.save",
            "absent[:wanted - len(entries)]",
            "absent",
            "a save reserves more than it may",
        ),
        Mutant(
            "Store.save",
            "missing - len(entries)",
            "0",
            "saves that found no room are not counted",
        ),
        Mutant(
            "Store.save",
            "self.counts['save_refused']",
            "self.counts['saved']",
            "saves that found no room count as saved",
        ),
        Mutant(
            "core.steps",
            "AT_ONCE = 128",
            "AT_ONCE = 1 << 20",
            "one message holds the lock and the loop for as long as it names chunks",
        ),
        Mutant(
            "lookup.lookup_run",
            "at % _AT_ONCE == _AT_ONCE - 1",
            "False",
            "a lookup of a long prompt holds the lock all the time",
        ),
    ),
)
