"""What a server believes of engines' event streams: nothing that is gone, nothing without its
place, and no more than it has room for."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

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
        "pieces": (*PYTEST, "tests/unit/extensions/engine_index/test_kv_event_pieces.py"),
        "doors": (*PYTEST, "tests/fault/test_hostile_doors.py"),
    },
    (
        Mutant(
            "Picture._stored",
            "group.known.get(before)",
            "group.known.get(before, b'')",
            "the middle of a prompt looks like its beginning",
        ),
        Mutant(
            "Picture._stored",
            "parent is None or not tokens or len(tokens) != size or self._is_full",
            "parent is None or self._is_full",
            "a block stands for fewer tokens than it has",
        ),
        Mutant(
            "Picture._stored",
            "parent is None or not tokens or len(tokens) != size or self._is_full",
            "parent is None or not tokens or len(tokens) != size",
            "an engine's events fill the server's memory",
        ),
        Mutant(
            "Picture._removed",
            "group.held[digest] = held & ~bit",
            "pass",
            "a block that left one tier is promised there as long as another has it",
        ),
        Mutant(
            "Picture._removed",
            "group.held.pop(digest, None)",
            "pass",
            "prompts are sent to blocks that are gone",
        ),
        Mutant(
            "Picture._removed",
            "del group.known[block]",
            "pass",
            "blocks that are gone fill the server's memory",
        ),
        Mutant(
            "Picture._removed",
            "bool(held & bit)",
            "1",
            "blocks that are removed twice count below nothing",
        ),
        Mutant(
            "Picture._stored",
            "event.kv_cache_spec_kind not in _FULL",
            "False",
            "a window looks like a whole prompt",
        ),
        Mutant(
            "Picture._stored",
            "extras[number] or ([event.lora_name] if event.lora_name else [])",
            "[] and ([event.lora_name] if event.lora_name else [])",
            "what is salted is found by every tenant's prompts",
        ),
        Mutant(
            "Picture.lookup",
            "one[tier] = min(one.get(tier, 0), found.get(tier, 0))",
            "pass",
            "a prompt of which one cache group is gone looks whole",
        ),
        Mutant(
            "Picture.lookup",
            "one.tokens = min(one.tokens, found.tokens)",
            "pass",
            "a prompt of which one cache group is gone looks whole in all tiers together",
        ),
        Mutant(
            "Picture.apply",
            "self._bits.get(_GPU, 0)",
            "0",
            "a prefix cache that was cleared is promised on",
        ),
        Mutant(
            "Picture._bit",
            "len(self._bits) >= _MOST_TIERS",
            "False",
            "an engine names tiers without end",
        ),
        Mutant(
            "Picture._group",
            "len(self._groups) >= _MOST_GROUPS",
            "False",
            "an engine names cache groups without end",
        ),
        Mutant(
            "_Follower.run",
            "was_followed or self._engine.picture.blocks",
            "False",
            "prompts are sent to an engine that is dead",
        ),
        Mutant(
            "_Follower._heard",
            "if number > self._next:\n    ...",
            "",
            "what a lost message withdrew is promised on where there is no replay endpoint",
        ),
        Mutant(
            "_Follower._replay",
            "if number > next_:\n    ...",
            "",
            "what was withdrawn before the replay buffer begins is promised on",
        ),
        Mutant(
            "_Follower._listen",
            "if quiet % _QUIET == 0:\n    ...",
            "",
            "what was withdrawn in an engine's last message is promised until the next one",
        ),
        Mutant(
            "_Follower._listen",
            "silent == _MOST_SILENT",
            "False",
            "prompts are sent to an engine whose host is gone",
        ),
        Mutant(
            "Peer._frame",
            "size > most",
            "False",
            "one message fills the server's memory",
        ),
        Mutant(
            "Peer.receive",
            "len(frames) == _MOST_FRAMES",
            "False",
            "frames without end fill the server's memory",
        ),
        Mutant(
            "follow._number",
            "len(frame) == 8 and number < _MOST_NUMBER",
            "len(frame) == 8",
            "a number that nobody can count on from ends the following",
        ),
        Mutant(
            "_Follower._replay",
            "_number(frames[-2]) if len(frames) > 1 else None",
            "_number(frames[-2])",
            "a replay of one frame ends the following",
        ),
        Mutant(
            "kv_event_pieces.decoding",
            "len(payload) <= _AT_ONCE_BYTES",
            "True",
            "a long message holds up the server's loop",
        ),
        Mutant(
            "_Follower._refuse",
            "self._engine.drop()",
            "",
            "what a message withdrew that nobody could read is promised on",
        ),
        Mutant(
            "http.beside",
            "web.AppRunner(Admin(server, port, token, around, places, history).app(), "
            "access_log=None, logger=_STRANGERS, handle_signals=False, "
            "keepalive_timeout=_IDLE_S, auto_decompress=False, lingering_time=_LINGER_S, "
            "shutdown_timeout=1.0)",
            "web.AppRunner(Admin(server, port, token, around, places, history).app(), "
            "access_log=None, logger=_STRANGERS, handle_signals=False, "
            "keepalive_timeout=_IDLE_S, lingering_time=_LINGER_S, shutdown_timeout=1.0)",
            "a stranger's body stops the server",
        ),
        Mutant(
            "admin.http",
            "_STRANGERS.addFilter(_without_quoting)",
            "",
            "the log quotes a token",
        ),
        Mutant(
            "Admin._lookup_engines",
            "asked.tokens is None or asked.extra is not None",
            "asked.tokens is None",
            "prompts of an adapter are looked up as if they had none",
        ),
        Mutant(
            "streams.parse",
            "{stream.name for stream in streams}",
            "streams",
            "two engines have one name, and a router asks the wrong one",
        ),
        Mutant(
            "streams.parse",
            "len({stream.name for stream in streams}) < len(found) or len(streams) > _MOST",
            "len({stream.name for stream in streams}) < len(found)",
            "engines without end, each with less room",
        ),
    ),
)
