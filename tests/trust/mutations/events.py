"""What routers are told of the cache: nothing too early, nothing too long, each under its name."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_EVENTS = "connectors/vllm/scheduler_side/events.py"

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/connectors/test_vllm_events.py"),
        "changes": (*PYTEST, "tests/unit/store/test_changes.py"),
        "machine": (*PYTEST, "tests/property/test_store_machine.py"),
    },
    (
        Mutant(
            _EVENTS,
            "        if place in described.places:\n            described.places.discard(place)\n",
            "        if False:\n            described.places.discard(place)\n",
            "a router sends prompts to a chunk that is gone",
        ),
        Mutant(
            _EVENTS,
            '            "parent_block_hash": described.parent,\n',
            '            "parent_block_hash": None,\n',
            "every chunk looks like the beginning of a prompt",
        ),
        Mutant(
            _EVENTS,
            "        if changes is None:\n            self._withdraw_all()\n",
            "",
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
            _EVENTS,
            '            return {"medium": "CPU", "locality": "LOCAL", "ownership": None}\n',
            "            pass\n",
            "RAM is announced as a disk",
        ),
        Mutant(
            "store/changes.py",
            "            self._waiting, self._lost = [], True\n",
            "            pass\n",
            "changes that nobody takes fill the host's memory",
        ),
        Mutant(
            "store/tier_index.py",
            "        if self.changes is not None and key in self.order:",
            "        if self.changes is not None:",
            "a chunk that a tier never had is withdrawn from it",
        ),
        Mutant(
            "store/directory.py",
            "                self._changes.note(RAM_PLACE, entry.key, there=False)\n",
            "                pass\n",
            "a chunk that left RAM is told to be there",
        ),
        Mutant(
            "store/directory.py",
            "            self._changes.note(RAM_PLACE, entry.key, there=True)\n",
            "            pass\n",
            "no chunk in RAM is ever announced",
        ),
    ),
)
