"""What a server believes of engines' event streams: nothing that is gone, nothing without its
place, and no more than it has room for."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_PICTURE = "extensions/engine_index/picture.py"
_FOLLOW = "extensions/engine_index/follow.py"
_ZMTP = "server/zmtp.py"

ROOM = Room(
    {
        "pictures": (
            *PYTEST,
            "tests/unit/extensions/engine_index/test_engine_pictures.py",
            "-k",
            "not own_messages",
        ),
        "keys": (*PYTEST, "tests/unit/config/test_streams.py"),
        "streams": (*PYTEST, "tests/integration/test_engine_streams.py"),
        "pieces": (*PYTEST, "tests/unit/protocol/test_kv_event_pieces.py"),
        "doors": (*PYTEST, "tests/fault/test_hostile_doors.py"),
    },
    (
        Mutant(
            _PICTURE,
            "group.known.get(before)\n",
            'group.known.get(before, b"")\n',
            "the middle of a prompt looks like its beginning",
        ),
        Mutant(
            _PICTURE,
            " or not tokens or len(tokens) != size or",
            " or",
            "a block stands for fewer tokens than it has",
        ),
        Mutant(
            _PICTURE,
            " or self._is_full:",
            ":",
            "an engine's events fill the server's memory",
        ),
        Mutant(
            _PICTURE,
            "                group.held[digest] = held & ~bit\n",
            "                pass\n",
            "a block that left one tier is promised there as long as another has it",
        ),
        Mutant(
            _PICTURE,
            "                group.held.pop(digest, None)\n",
            "                pass\n",
            "prompts are sent to blocks that are gone",
        ),
        Mutant(
            _PICTURE,
            "                del group.known[block]\n",
            "                pass\n",
            "blocks that are gone fill the server's memory",
        ),
        Mutant(
            _PICTURE,
            "-= bool(held & bit)\n",
            "-= 1\n",
            "blocks that are removed twice count below nothing",
        ),
        Mutant(
            _PICTURE,
            "        if event.kv_cache_spec_kind not in _FULL:\n",
            "        if False:\n",
            "a window looks like a whole prompt",
        ),
        Mutant(
            _PICTURE,
            "                own = extras[number] or",
            "                own = [] and",
            "what is salted is found by every tenant's prompts",
        ),
        Mutant(
            _PICTURE,
            "                    one[tier] = min(one.get(tier, 0), found.get(tier, 0))\n",
            "                    pass\n",
            "a prompt of which one cache group is gone looks whole",
        ),
        Mutant(
            _PICTURE,
            "                one.tokens = min(one.tokens, found.tokens)\n",
            "                pass\n",
            "a prompt of which one cache group is gone looks whole in all tiers together",
        ),
        Mutant(
            _PICTURE,
            "                bit = self._bits.get(_GPU, 0)\n",
            "                bit = 0\n",
            "a prefix cache that was cleared is promised on",
        ),
        Mutant(
            _PICTURE,
            " and len(self._bits) >= _MOST_TIERS:",
            " and False:",
            "an engine names tiers without end",
        ),
        Mutant(
            _PICTURE,
            " and len(self._groups) >= _MOST_GROUPS:",
            " and False:",
            "an engine names cache groups without end",
        ),
        Mutant(
            _FOLLOW,
            "            if was_followed or self._engine.picture.blocks:\n",
            "            if False:\n",
            "prompts are sent to an engine that is dead",
        ),
        Mutant(
            _FOLLOW,
            "            if number > self._next:\n                self._engine.drop()\n",
            "",
            "what a lost message withdrew is promised on where there is no replay endpoint",
        ),
        Mutant(
            _FOLLOW,
            "                if number > next_:\n                    self._engine.drop()\n",
            "",
            "what was withdrawn before the replay buffer begins is promised on",
        ),
        Mutant(
            _FOLLOW,
            "                if quiet % _QUIET == 0:\n                    await self._catch_up()\n",
            "",
            "what was withdrawn in an engine's last message is promised until the next one",
        ),
        Mutant(
            _FOLLOW,
            "                if silent == _MOST_SILENT:\n",
            "                if False:\n",
            "prompts are sent to an engine whose host is gone",
        ),
        Mutant(
            _ZMTP,
            "            if size > most:\n",
            "            if False:\n",
            "one message fills the server's memory",
        ),
        Mutant(
            _ZMTP,
            "                if len(frames) == _MOST_FRAMES:\n",
            "                if False:\n",
            "frames without end fill the server's memory",
        ),
        Mutant(
            _FOLLOW,
            "len(frame) == 8 and number < _MOST_NUMBER",
            "len(frame) == 8",
            "a number that nobody can count on from ends the following",
        ),
        Mutant(
            _FOLLOW,
            "(number := _number(frames[-2]) if len(frames) > 1 else None)",
            "(number := _number(frames[-2]))",
            "a replay of one frame ends the following",
        ),
        Mutant(
            "protocol/kv_event_pieces.py",
            "    if len(payload) <= _AT_ONCE_BYTES:\n",
            "    if True:\n",
            "a long message holds up the server's loop",
        ),
        Mutant(
            _FOLLOW,
            '        self._engine.counts["refused"] += 1\n        self._engine.drop()\n',
            '        self._engine.counts["refused"] += 1\n',
            "what a message withdrew that nobody could read is promised on",
        ),
        Mutant(
            "admin/http.py",
            "        auto_decompress=False,  # else strangers have gigabytes unpacked\n",
            "",
            "a stranger's body stops the server",
        ),
        Mutant(
            "admin/http.py",
            "_STRANGERS.addFilter(_without_quoting)\n",
            "",
            "the log quotes a token",
        ),
        Mutant(
            "admin/http.py",
            "        if asked.tokens is None or asked.extra is not None:\n",
            "        if asked.tokens is None:\n",
            "prompts of an adapter are looked up as if they had none",
        ),
        Mutant(
            "config/streams.py",
            "len({stream.name for stream in streams}) < len(found)",
            "len(streams) < len(found)",
            "two engines have one name, and a router asks the wrong one",
        ),
        Mutant(
            "config/streams.py",
            " or len(streams) > _MOST:",
            ":",
            "engines without end, each with less room",
        ),
    ),
)
