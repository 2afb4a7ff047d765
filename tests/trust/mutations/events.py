"""What routers are told of the cache: nothing too early, nothing too long, each under its name."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "changes": (*PYTEST, "tests/unit/store/test_changes.py"),
        "watches": (*PYTEST, "tests/unit/server/test_watches.py"),
        "answers": (*PYTEST, "tests/unit/protocol/test_answers.py"),
        "unit": (*PYTEST, "tests/unit/extensions/event_stream/test_vllm_events.py"),
        "server": (*PYTEST, "tests/integration/test_server_events.py"),
        "machine": (*PYTEST, "tests/property/test_store_machine.py"),
    },
    (
        Mutant(
            "Changes.came",
            "self._directory.holders(key) if place == RAM_PLACE else ()",
            "()",
            "a chunk that is saved again is never published in the tier that had it before",
        ),
        Mutant(
            "Announcer._change",
            "place in described.places",
            "False",
            "a router sends prompts to a chunk that is gone",
        ),
        Mutant(
            "Announcer._describe",
            "self._parent(request, group, begin)",
            "None",
            "every chunk looks like the beginning of a prompt",
        ),
        Mutant(
            "Announcer.events",
            "self._withdraw_all()",
            "",
            "what was lost from a full list is promised for ever",
        ),
        Mutant(
            "Announcer._describe",
            "len(hashes) * group.block_tokens != size",
            "not hashes",
            "a part of a chunk stands for all of it",
        ),
        Mutant(
            "Announcer.ended",
            "if described is not None and (not described.places):\n    del self._described[key]",
            "pass",
            "what failed saves described is remembered for ever",
        ),
        Mutant(
            "kv_events.where",
            "return {'medium': 'CPU', 'locality': 'LOCAL', 'ownership': None}",
            "pass",
            "RAM is announced as a disk",
        ),
        Mutant(
            "Changes._note",
            "self._waiting, self._lost = ([], True)",
            "pass",
            "changes that nobody takes fill the host's memory",
        ),
        Mutant(
            "TierIndex.leave",
            "if key in self.order:\n    ...",
            "...",
            "a chunk that a tier never had is withdrawn from it",
        ),
        Mutant(
            "Directory._evict",
            "tell(RAM_PLACE, key, Left.EVICTED)",
            "pass",
            "a chunk that left RAM is told to be there",
        ),
        Mutant(
            "Directory.invalidate",
            "tell(RAM_PLACE, key, Left.FORGOTTEN)",
            "pass",
            "a chunk that was dropped from RAM is told to be there",
        ),
        Mutant(
            "Directory.filled_run",
            "tell(RAM_PLACE, key)",
            "pass",
            "no chunk in RAM is ever announced",
        ),
        Mutant(
            "kv_events.where",
            "return {'medium': 'STORAGE', 'locality': 'REMOTE', 'ownership': name}",
            "pass",
            "what other hosts reach too looks like this host's",
        ),
        Mutant(
            "Announcer.events",
            "not self._described[key].places",
            "False",
            "what is nowhere is described for ever",
        ),
        Mutant(
            "Watch.note",
            "if bits is None:\n    return",
            "bits = bits or 0",
            "another tenant's keys travel",
        ),
        Mutant(
            "Watch.unname",
            "self._named.get(key) == 0",
            "key in self._named",
            "a chunk that left one place is never withdrawn from another",
        ),
        Mutant(
            "Watch.note",
            "len(self._waiting) >= _MOST_WAITING",
            "False",
            "an engine that does not ask fills the server's memory",
        ),
        Mutant(
            "Watches.give_out",
            "for watch in self._all:\n    watch.lose()",
            "pass",
            "sessions are not told that the Store lost changes",
        ),
        Mutant(
            "Watches.leave",
            "self._watched.end()",
            "pass",
            "a server notes changes for engines that are gone",
        ),
        Mutant(
            "Watch.find",
            "self._named.get(key, 0) | bits",
            "0",
            "what another engine saved is found and never withdrawn",
        ),
        Mutant(
            "Session._save",
            "self._watch.name(lease.keys)",
            "pass",
            "what an engine saved is not announced",
        ),
        Mutant(
            "Session._end",
            "self._watch.unname(lease.keys)",
            "pass",
            "saves that ended without a chunk are remembered for ever",
        ),
        Mutant(
            "Connection._retire",
            "self._session.gone()",
            "",
            "a server notes changes for an engine whose workers linger",
        ),
        Mutant(
            "answers.check_changed",
            "len(changed.keys) != KEY_BYTES * len(changed.what)",
            "False",
            "changes without keys stop an engine",
        ),
        Mutant(
            "answers.check_changed",
            "max(changed.what, default=0) >= 2 * max(places, 1)",
            "False",
            "a place that does not exist stops an engine",
        ),
        Mutant(
            "answers.check_placed",
            "max(placed.places, default=0) >> places",
            "False",
            "a place that does not exist is announced",
        ),
        Mutant(
            "Heard.lose",
            "self._waiting, self._lost = ([], True)",
            "",
            "what a lost server held is promised for ever",
        ),
        Mutant(
            "Heard._told",
            "if changed.lost:\n    ...",
            "if False:\n    ...",
            "an engine that was too slow announces what is gone",
        ),
        Mutant(
            "Heard.has_changes",
            "self._lost or bool(self._waiting) or patient",
            "self._lost or bool(self._waiting)",
            "the last save of an engine that rests is not announced",
        ),
        Mutant(
            "Heard._told",
            "not self.is_asked",
            "False",
            "a server may send changes without end",
        ),
        Mutant(
            "Client._reconnect",
            "self._heard.begin(attachment)",
            "pass",
            "after a server's restart nothing is announced",
        ),
    ),
)
