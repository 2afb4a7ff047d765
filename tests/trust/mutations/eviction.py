"""What leaves last, and what traces say of hints."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "kept": (*PYTEST, "tests/unit/eviction/test_kept.py"),
        "saved": (*PYTEST, "tests/unit/eviction/test_saved_compute.py"),
        "hints": (*PYTEST, "tests/unit/eviction/test_hints.py"),
        "exclusive": (*PYTEST, "tests/unit/eviction/test_exclusive.py"),
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
            "hints.session_name",
            "json.dumps([salt or '', session])",
            "(salt or '') + session",
            "a tenant ends another one's session",
        ),
        Mutant(
            "Directory.spill_begun",
            "self.order.keeps(key)",
            "False",
            "a chunk whose copy left early is not written again, and is lost",
        ),
        Mutant(
            "Exclusive.coldest",
            "self._may_leave >= 1",
            "True",
            "every chunk that RAM keeps is written again and again",
        ),
        Mutant(
            "Exclusive._has_room_for_one_more",
            "len(self._alone) < self._may_be_alone",
            "True",
            "where writes come late, most of what RAM keeps is lost",
        ),
        Mutant(
            "Exclusive.coldest",
            "next(reversed(twice))",
            "next(iter(twice))",
            "what leaves RAM soon leaves below first",
        ),
        Mutant(
            "Exclusive._left_ram",
            "key in alone",
            "False",
            "a disk that may not be written loses what RAM kept, again and again",
        ),
        Mutant(
            "Exclusive.cool",
            "self._alone.pop(key, None)",
            "None",
            "what is over counts as lost",
        ),
        Mutant(
            "Exclusive._has_room_for_one_more",
            "key in self._ram",
            "True",
            "after a purge no copy leaves early for ever",
        ),
        Mutant(
            "Curve._use",
            "self._cuts[number]",
            "0",
            "the curve has more hits than an LRU of that size has",
        ),
        Mutant(
            "Curve._look",
            "accumulate(found, min, initial=lowest)",
            "sorted([*found, lowest], reverse=True)",
            "the curve promises hits behind a hole, which no LRU has",
        ),
        Mutant(
            "Curve._move_together",
            "[new[cut - first] if first <= cut < end else cut for cut in self._cuts]",
            "self._cuts",
            "sizes change when chunks move together",
        ),
        Mutant(
            "Kept._surplus",
            "self.count(owner) - self.own_bound",
            "len(self.stays) - self.bound",
            "one tenant keeps all that all tenants may keep",
        ),
        Mutant(
            "Kept._surplus",
            "max(self._of, key=self.count)",
            "owner",
            "a tenant that keeps little gives way to one that keeps much",
        ),
        Mutant(
            "Kept.own_bound",
            "self._part * (self._share or 1.0)",
            "self._part",
            "a tenant with a quota keeps all of it, and its other prompts have no room",
        ),
        Mutant(
            "Kept.use",
            "self.stays[key] = stay._replace(until=self._now + stay.seconds)",
            "",
            "what is used again is kept no longer than before",
        ),
        Mutant(
            "Kept.tick",
            "self.stays.move_to_end(key)",
            "pass",
            "a few chunks that are kept long hide all whose time is over",
        ),
        Mutant(
            "SavedCompute.of",
            "end * end - first * first",
            "chunks * chunks",
            "late chunks save no more than early ones",
        ),
        Mutant(
            "Owned.cool",
            "self._release([(key, self.kept.drop(key)) for key in run if key in self._stays])",
            "",
            "what is over is kept",
        ),
        Mutant(
            "Directory.keep",
            "for order in self._orders:\n    order.keep(run, seconds, salt)",
            "self._order.keep(run, seconds, salt)",
            "tiers below RAM keep nothing",
        ),
        Mutant(
            "Directory.spill_ended",
            "tier.order.keep_as(self.order, entry.key)",
            "",
            "what is kept is kept no longer once it is written below",
        ),
        Mutant(
            "Directory.filled",
            "self.order.keep_as(self.tiers[source].order, entry.key)",
            "pass",
            "what is kept is kept no longer once it comes back to RAM",
        ),
        Mutant(
            "assemble.assemble_store",
            "orders = orders._replace(keep=config.keep_percent / 100)",
            "",
            "what tenants may keep is not what is configured",
        ),
        Mutant(
            "mooncake._request",
            "kept._replace(over=given.get('over') is True)",
            "hints.Hint(given.get('over') is True)",
            "a simulation keeps nothing of what was recorded as kept",
        ),
        Mutant(
            "Replay._request",
            "request.hint != NO_HINT",
            "request.hint.over",
            "a replay keeps nothing of what was recorded as kept",
        ),
    ),
)
