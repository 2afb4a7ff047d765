"""What a server publishes: nothing that is not there, nothing too long, nobody else's, no tokens
kept, and at nobody's cost."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

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
            "Announced.announcing",
            "held & ~chunk.places",
            "~chunk.places",
            "what an engine tells too late is promised for ever",
        ),
        Mutant(
            "Announced.announcing",
            "held & ~chunk.places",
            "held",
            "two engines yield two events",
        ),
        Mutant(
            "Announced._stored",
            "msgspec.structs.replace(event, block_hashes=_unpack(chunk.hashes), "
            "parent_block_hash=self._ends.get(parent_half(key), event.parent_block_hash), "
            "**self._where(place))",
            "msgspec.structs.replace(event, "
            "parent_block_hash=self._ends.get(parent_half(key), event.parent_block_hash), "
            "**self._where(place))",
            "a chunk has two engines' hashes, and one of them is never withdrawn",
        ),
        Mutant(
            "Announced._stored",
            "self._ends.get(parent_half(key), event.parent_block_hash)",
            "event.parent_block_hash",
            "chunks of engines with other hash seeds have parents that nobody knows",
        ),
        Mutant(
            "Announced.announcing",
            "if self._tellers:\n    ...",
            "if False:\n    ...",
            "two models withdraw each other's blocks in turns",
        ),
        Mutant(
            "Announced.gone",
            "self._tellers.discard(number)",
            "pass",
            "after a model was replaced, its server publishes nothing any more",
        ),
        Mutant(
            "Announced._changed",
            "self._removed(chunk, change.place)",
            "pass",
            "what has left is promised for ever",
        ),
        Mutant(
            "Announced.following",
            "yield from self._withdrawing()",
            "pass",
            "when changes were lost, what has left is promised for ever",
        ),
        Mutant(
            "Announced._new",
            "2 * (own + blocks) > _MOST_BLOCKS - (self._blocks.total() - own)",
            "False",
            "one engine's hashes fill the server's memory",
        ),
        Mutant(
            "Announced.announcing",
            "if chunk is not None and (not chunk.places):\n    ...",
            "",
            "chunks that are nowhere are remembered for ever",
        ),
        Mutant(
            "Announced.without",
            "self._whose is not None and self._whose.store not in stores",
            "False",
            "the chunks of a size that was closed are promised for ever",
        ),
        Mutant(
            "Session.gone",
            "self._announced.gone(self._number)",
            "pass",
            "after a model was replaced, its server publishes nothing any more",
        ),
        Mutant(
            "Session._announce",
            "not 0 < blocks * event.block_size == len(event.token_ids)",
            "False",
            "an engine's mistake makes the whole stream unreadable",
        ),
        Mutant(
            "Session._announce",
            "message.place >= len(self._places)",
            "False",
            "a place that does not exist is an error in the server",
        ),
        Mutant(
            "Publisher._send",
            "len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES",
            "len(self._kept) > _KEPT",
            "the replay buffer fills the server's memory",
        ),
        Mutant(
            "Publisher._messages",
            "found[-1][0] + 1",
            "found[-1][0] + 2",
            "a replay has gaps",
        ),
        Mutant(
            "Publisher.publishing",
            "self._add(AllBlocksCleared())\nself._send()",
            "",
            "subscribers send prompts to a server that has ended",
        ),
        Mutant(
            "Publisher._listen",
            "not listener.local",
            "False",
            "prompts are open to every user of the host, and nobody was told",
        ),
        Mutant(
            "Heard.announce",
            "self._publishes and len(self._announced) < _MOST_ANNOUNCED",
            "self._publishes",
            "a slow server fills its engines' memory",
        ),
        Mutant(
            "Heard.announce",
            "self._publishes and len(self._announced) < _MOST_ANNOUNCED",
            "len(self._announced) < _MOST_ANNOUNCED",
            "engines lose a server that publishes nothing",
        ),
        Mutant(
            "Heard.pass_on",
            "(TypeError, ValueError, OverflowError)",
            "OverflowError",
            "a client's salt ends its engine",
        ),
        Mutant(
            "Heard.pass_on",
            "len(frame) <= wire.MAX_FRAME",
            "True",
            "a client's salt costs its engine the server",
        ),
        Mutant(
            "Announcer._stored",
            "self._store.announce(key, place, event)",
            "",
            "a server publishes nothing",
        ),
    ),
)
