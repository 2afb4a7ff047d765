"""What a server publishes: nothing that is not there, nothing too long, nobody else's, no tokens
kept, and at nobody's cost."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_ANNOUNCED = "extensions/event_stream/announced.py"
_PUBLISHING = "extensions/event_stream/publishing.py"
_HEARD = "client/heard.py"
_SESSION = "server/session.py"

ROOM = Room(
    {
        "announced": (*PYTEST, "tests/unit/extensions/event_stream/test_announced.py"),
        "publishing": (*PYTEST, "tests/unit/extensions/event_stream/test_publishing.py"),
        "wire": (*PYTEST, "tests/unit/protocol/test_wire.py"),
        "stream": (
            *PYTEST,
            "tests/integration/test_server_stream.py",
            "-k",
            "costs_no_engine or bounded or told_nothing or lookup_finds",
        ),
    },
    (
        Mutant(
            _ANNOUNCED,
            "        elif held & ~chunk.places & 1 << place:\n",
            "        elif ~chunk.places & 1 << place:\n",
            "what an engine tells too late is promised for ever",
        ),
        Mutant(
            _ANNOUNCED,
            "        elif held & ~chunk.places & 1 << place:\n",
            "        elif held & 1 << place:\n",
            "two engines yield two events",
        ),
        Mutant(
            _ANNOUNCED,
            "                block_hashes=_unpack(chunk.hashes),\n",
            "",
            "a chunk has two engines' hashes, and one of them is never withdrawn",
        ),
        Mutant(
            _ANNOUNCED,
            "self._ends.get(parent_half(key), event.parent_block_hash)",
            "event.parent_block_hash",
            "chunks of engines with other hash seeds have parents that nobody knows",
        ),
        Mutant(
            _ANNOUNCED,
            "            if self._tellers:\n",
            "            if False:\n",
            "two models withdraw each other's blocks in turns",
        ),
        Mutant(
            _ANNOUNCED,
            "        self._tellers.discard(number)\n",
            "        pass\n",
            "after a model was replaced, its server publishes nothing any more",
        ),
        Mutant(
            _ANNOUNCED,
            "        self._removed(chunk, change.place)\n",
            "        pass\n",
            "what has left is promised for ever",
        ),
        Mutant(
            _ANNOUNCED,
            "                yield from self._withdrawing()\n            elif",
            "                pass\n            elif",
            "when changes were lost, what has left is promised for ever",
        ),
        Mutant(
            _ANNOUNCED,
            "        if 2 * (own + blocks) > _MOST_BLOCKS - (self._blocks.total() - own):\n",
            "        if False:\n",
            "one engine's hashes fill the server's memory",
        ),
        Mutant(
            _ANNOUNCED,
            "        if chunk is not None and not chunk.places:\n            self._forget(key)\n",
            "",
            "chunks that are nowhere are remembered for ever",
        ),
        Mutant(
            _ANNOUNCED,
            "        if self._whose is not None and self._whose.store not in stores:\n",
            "        if False:\n",
            "the chunks of a size that was closed are promised for ever",
        ),
        Mutant(
            _SESSION,
            "            self._announced.gone(self._number)\n",
            "            pass\n",
            "after a model was replaced, its server publishes nothing any more",
        ),
        Mutant(
            _SESSION,
            "        if not 0 < blocks * event.block_size == len(event.token_ids):\n",
            "        if False:\n",
            "an engine's mistake makes the whole stream unreadable",
        ),
        Mutant(
            _SESSION,
            "        if message.place >= len(self._places):\n",
            "        if False:\n",
            "a place that does not exist is an error in the server",
        ),
        Mutant(
            _PUBLISHING,
            "        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:\n",
            "        while len(self._kept) > _KEPT:\n",
            "the replay buffer fills the server's memory",
        ),
        Mutant(
            _PUBLISHING,
            "            number = found[-1][0] + 1\n",
            "            number = found[-1][0] + 2\n",
            "a replay has gaps",
        ),
        Mutant(
            _PUBLISHING,
            "            self._add(AllBlocksCleared())\n            self._send()\n",
            "",
            "subscribers send prompts to a server that has ended",
        ),
        Mutant(
            _PUBLISHING,
            "        if not listener.local:\n",
            "        if False:\n",
            "prompts are open to every user of the host, and nobody was told",
        ),
        Mutant(
            _HEARD,
            "        if self._publishes and len(self._announced) < _MOST_ANNOUNCED:\n",
            "        if self._publishes:\n",
            "a slow server fills its engines' memory",
        ),
        Mutant(
            _HEARD,
            "        if self._publishes and len(self._announced) < _MOST_ANNOUNCED:\n",
            "        if len(self._announced) < _MOST_ANNOUNCED:\n",
            "engines lose a server that publishes nothing",
        ),
        Mutant(
            _HEARD,
            "            except (TypeError, ValueError, OverflowError):\n",
            "            except OverflowError:\n",
            "a client's salt ends its engine",
        ),
        Mutant(
            _HEARD,
            "            if len(frame) <= wire.MAX_FRAME:\n",
            "            if True:\n",
            "a client's salt costs its engine the server",
        ),
        Mutant(
            "extensions/event_stream/announcer.py",
            "        self._store.announce(key, place, event)\n",
            "",
            "a server publishes nothing",
        ),
    ),
)
