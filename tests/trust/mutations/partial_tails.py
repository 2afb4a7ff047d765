"""Hits that end within a block: what is kept of a tail, what it is called, and what a hit has."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "keys": (*PYTEST, "tests/unit/core/test_chunk.py", "-k", "parts"),
        "rules": (*PYTEST, "tests/unit/connectors/test_vllm_partial_tails.py"),
        "known": (
            *PYTEST,
            "tests/unit/store/test_store_lookup.py",
            "tests/unit/client/test_hosts.py",
        ),
        "engines": (*PYTEST, "tests/trust/engine/ported/test_partial_tails.py"),
    },
    mutants=(
        Mutant(
            "PartialTails.pieces",
            "own[number][chunk] = block",
            "own[number][chunk] = tables[number][-1]",
            "the state of a tail is that of the tokens behind it",
        ),
        Mutant(
            "PartialTails.hit",
            "self._geometry.run(named, begin, (chunk + 1) * size)._replace(end=end)",
            "self._geometry.run(named, begin, (chunk + 1) * size)._replace(end=end + self._unit)",
            "a hit is promised that ends behind its state",
        ),
        Mutant(
            "partial_tails.hit_unit",
            "not proven or not geometry.has_state or vllm_config.speculative_config is not None",
            "not proven or not geometry.has_state",
            "beside drafts states are kept of ends that are not theirs",
        ),
        Mutant(
            "PartialTails._stored",
            "chunk not in found.ends",
            "True",
            "each step looks at all ends of every prompt that waits",
        ),
        Mutant(
            "lookup.is_known",
            "entry.origin is not None",
            "True",
            "a tail that is being saved counts as kept",
        ),
        Mutant(
            "Hosts.known",
            "all(each)",
            "any(each)",
            "a tail is looked for of which a host has nothing",
        ),
        Mutant(
            "KeyChain.within",
            "_PART_DOMAIN + before[:_DIGEST_BYTES]",
            "_PART_DOMAIN",
            "a tail stands for that of any other prompt that ends so",
        ),
        Mutant(
            "KeyChain.within",
            "(self._per_chunk or {}).get(chunk, b'')",
            "b''",
            "a tail has another image's KV",
        ),
        Mutant(
            "Claims._rows",
            "(min(hits.known, most), max(found, default=claim.begin))",
            "()",
            "a conversation's next turn has no hit within a block",
        ),
    ),
)
