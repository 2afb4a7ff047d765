"""Hits that end within a block: what is kept of a tail, what it is called, and what a hit has."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_TAILS = "connectors/vllm/scheduler_side/partial_tails.py"
_CHUNK = "core/chunk.py"
_CLAIMS = "connectors/vllm/scheduler_side/claims.py"

ROOM = Room(
    {
        "keys": (*PYTEST, "tests/unit/core/test_chunk.py", "-k", "parts"),
        "rules": (*PYTEST, "tests/unit/connectors/test_vllm_partial_tails.py"),
        "engines": (*PYTEST, "tests/trust/engine/ported/test_partial_tails.py"),
    },
    mutants=(
        Mutant(
            _TAILS,
            "                own[number][chunk] = block\n",
            "                own[number][chunk] = tables[number][-1]\n",
            "the state of a tail is that of the tokens behind it",
        ),
        Mutant(
            _TAILS,
            "(chunk + 1) * size)._replace(end=end)",
            "(chunk + 1) * size)._replace(end=end + self._unit)",
            "a hit is promised that ends behind its state",
        ),
        Mutant(
            _TAILS,
            " or vllm_config.speculative_config is not None:",
            ":",
            "beside drafts states are kept of ends that are not theirs",
        ),
        Mutant(
            _TAILS,
            "        if chunk not in found.ends:\n",
            "        if True:\n",
            "each step looks at all ends of every prompt that waits",
        ),
        Mutant(
            _CHUNK,
            "        head = _PART_DOMAIN + before[:_DIGEST_BYTES] + struct",
            "        head = _PART_DOMAIN + struct",
            "a tail stands for that of any other prompt that ends so",
        ),
        Mutant(
            _CHUNK,
            '        more = (self._per_chunk or {}).get(chunk, b"")\n        head',
            '        more = b""\n        head',
            "a tail has another image's KV",
        ),
        Mutant(
            _CLAIMS,
            "for tokens in (min(hits.known, most), max(found, default=claim.begin)):\n",
            "for tokens in ():\n",
            "a conversation's next turn has no hit within a block",
        ),
    ),
)
