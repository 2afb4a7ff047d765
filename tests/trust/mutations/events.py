"""What routers are told of the cache: nothing too early, nothing too long, each under its name."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_EVENTS = "extensions/event_stream/announcer.py"
_WATCHES = "server/watches.py"
_HEARD = "client/heard.py"
_FORMS = "protocol/kv_events.py"
_CHANGES = "store/observers/changes.py"

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
            _CHANGES,
            "for index in self._directory.holders(key) if place == RAM_PLACE else ():",
            "for index in ():",
            "a chunk that is saved again is never published in the tier that had it before",
        ),
        Mutant(
            _EVENTS,
            "        if place in described.places:\n            described.places.discard(place)\n",
            "        if False:\n            described.places.discard(place)\n",
            "a router sends prompts to a chunk that is gone",
        ),
        Mutant(
            _EVENTS,
            '                "parent_block_hash": self._parent(request, group, begin),\n',
            '                "parent_block_hash": None,\n',
            "every chunk looks like the beginning of a prompt",
        ),
        Mutant(
            _EVENTS,
            "            self._withdraw_all()\n            self._names",
            "            self._names",
            "what was lost from a full list is promised for ever",
        ),
        Mutant(
            _EVENTS,
            "        if len(hashes) * group.block_tokens != size:\n            return None",
            "        if not hashes:\n            return None",
            "a part of a chunk stands for all of it",
        ),
        Mutant(
            _EVENTS,
            "            if described is not None and not described.places:\n"
            "                del self._described[key]",
            "            pass",
            "what failed saves described is remembered for ever",
        ),
        Mutant(
            _FORMS,
            '        return {"medium": "CPU", "locality": "LOCAL", "ownership": None}\n',
            "        pass\n",
            "RAM is announced as a disk",
        ),
        Mutant(
            _CHANGES,
            "            self._waiting, self._lost = [], True\n",
            "            pass\n",
            "changes that nobody takes fill the host's memory",
        ),
        Mutant(
            "store/tier_index.py",
            "        if key in self.order:\n            self._drop(key, Left.FORGOTTEN)\n",
            "        self._drop(key, Left.FORGOTTEN)\n",
            "a chunk that a tier never had is withdrawn from it",
        ),
        Mutant(
            "store/directory.py",
            "            tell(RAM_PLACE, entry.key, Left.EVICTED)\n",
            "            pass\n",
            "a chunk that left RAM is told to be there",
        ),
        Mutant(
            "store/directory.py",
            "                tell(RAM_PLACE, key, Left.FORGOTTEN)\n",
            "                pass\n",
            "a chunk that was dropped from RAM is told to be there",
        ),
        Mutant(
            "store/directory.py",
            "            tell(RAM_PLACE, entry.key)\n",
            "            pass\n",
            "no chunk in RAM is ever announced",
        ),
        Mutant(
            _FORMS,
            '        return {"medium": "STORAGE", "locality": "REMOTE", "ownership": name}\n',
            "        pass\n",
            "what other hosts reach too looks like this host's",
        ),
        Mutant(
            _EVENTS,
            "            if not self._described[key].places:\n                del",
            "            if False:\n                del",
            "what is nowhere is described for ever",
        ),
        Mutant(
            _WATCHES,
            "        if bits is None:\n            return\n",
            "        bits = bits or 0\n",
            "another tenant's keys travel",
        ),
        Mutant(
            _WATCHES,
            "            if self._named.get(key) == 0:\n",
            "            if key in self._named:\n",
            "a chunk that left one place is never withdrawn from another",
        ),
        Mutant(
            _WATCHES,
            "        if len(self._waiting) >= _MOST_WAITING:\n            self.lose()\n",
            "        if False:\n            self.lose()\n",
            "an engine that does not ask fills the server's memory",
        ),
        Mutant(
            _WATCHES,
            "            for watch in self._all:\n                watch.lose()\n",
            "            pass\n",
            "sessions are not told that the Store lost changes",
        ),
        Mutant(
            _WATCHES,
            "            self._watched.end()\n",
            "            pass\n",
            "a server notes changes for engines that are gone",
        ),
        Mutant(
            _WATCHES,
            "self._named.get(key, 0) | bits\n",
            "0\n",
            "what another engine saved is found and never withdrawn",
        ),
        Mutant(
            "server/session.py",
            "            self._watch.name(lease.keys)\n",
            "            pass\n",
            "what an engine saved is not announced",
        ),
        Mutant(
            "server/session.py",
            "            self._watch.unname(lease.keys)\n",
            "            pass\n",
            "saves that ended without a chunk are remembered for ever",
        ),
        Mutant(
            "server/connection.py",
            "        self._session.gone()\n",
            "",
            "a server notes changes for an engine whose workers linger",
        ),
        Mutant(
            "protocol/answers.py",
            "    if len(changed.keys) != KEY_BYTES * len(changed.what):\n",
            "    if False:\n",
            "changes without keys stop an engine",
        ),
        Mutant(
            "protocol/answers.py",
            "    if max(changed.what, default=0) >= 2 * max(places, 1):\n",
            "    if False:\n",
            "a place that does not exist stops an engine",
        ),
        Mutant(
            "protocol/answers.py",
            "    if max(placed.places, default=0) >> places:\n",
            "    if False:\n",
            "a place that does not exist is announced",
        ),
        Mutant(
            _HEARD,
            "        self._waiting, self._lost = [], True\n        self.is_asked",
            "        self.is_asked",
            "what a lost server held is promised for ever",
        ),
        Mutant(
            _HEARD,
            "        if changed.lost:\n",
            "        if False:\n",
            "an engine that was too slow announces what is gone",
        ),
        Mutant(
            _HEARD,
            "        return self._lost or bool(self._waiting) or patient\n",
            "        return self._lost or bool(self._waiting)\n",
            "the last save of an engine that rests is not announced",
        ),
        Mutant(
            _HEARD,
            "        if not self.is_asked:\n            raise",
            "        if False:\n            raise",
            "a server may send changes without end",
        ),
        Mutant(
            "client/client.py",
            "                        self._heard.begin(attachment)\n"
            '            logger.warning("attached',
            '                        pass\n            logger.warning("attached',
            "after a server's restart nothing is announced",
        ),
    ),
)
