"""Cache groups: what is kept of each, and where a hit may end, as the simulated engines see it."""

from __future__ import annotations

from tests.trust.mutations.room import Mutant, Room

_GROUPS, _TABLES, _CLAIMS = (
    "connectors/vllm/groups.py",
    "connectors/vllm/tables.py",
    "connectors/vllm/scheduler_side/claims.py",
)
_SAVES = "connectors/vllm/scheduler_side/saves.py"
_SCHEDULER, _WORKER = (
    "connectors/vllm/scheduler_side/scheduler.py",
    "connectors/vllm/worker_side/worker.py",
)
_V1 = ("-m", "tests.trust.engine", "--steps", "400", "--every", "2")
"""Every second cell is one for V2."""

ROOM = Room(
    {
        "rules": ("-m", "pytest", "-q", "-x", "tests/unit/connectors/test_vllm_groups.py"),
        "saves": ("-m", "pytest", "-q", "-x", "tests/unit/connectors/test_vllm_saves.py"),
        "claims": ("-m", "pytest", "-q", "-x", "tests/unit/connectors/test_vllm_claims.py"),
        "windows": (*_V1, "--only", "window"),
        "states": (*_V1, "--only", "states"),
        "drafts": ("-m", "tests.trust.engine", "--steps", "2000", "--only", "states, drafts"),
        "tails": (*_V1, "--only", "tails"),
        "cells": ("-m", "tests.trust.engine", "--steps", "400", "--every", "3"),
    },
    mutants=(
        Mutant(
            _CLAIMS,
            '        if self._next == request_id:\n            self._next = ""\n',
            "",
            "whoever waited for blocks stays first for ever, and nobody else is granted a load",
        ),
        Mutant(
            _CLAIMS,
            "        claim.until = min(claim.until, until)\n",
            "",
            "each shorter hit that is tried begins a new deadline",
        ),
        Mutant(
            _GROUPS,
            "return max(0, end - (self.span - 1))",
            "return max(0, end - (self.span - 1) + 16)",
            "a window is loaded one block short",
        ),
        Mutant(
            _TABLES,
            "first = max(begin, start, group.first_needed(end)) // block\n",
            "first = -(-max(begin, start, group.first_needed(end)) // block)\n",
            "the block in which a window begins is not loaded",
        ),
        Mutant(
            _GROUPS,
            "            return end // self.span * self.span\n",
            "            return (end - 1) // self.span * self.span + 16\n",
            "an attention chunk is loaded without its first block",
        ),
        Mutant(
            _GROUPS,
            "return tuple(group for group in self.groups if group not in self.anchors)",
            "return tuple(group for group in self.groups if group not in self.anchors)[:1]",
            "the last group is missing in a hit",
        ),
        Mutant(
            _GROUPS,
            "            return range(end // self.chunk_tokens - 1, end // self.chunk_tokens)\n",
            "            last = max(1, end // self.chunk_tokens - 1)\n"
            "            return range(last - 1, last)\n",
            "a hit is given the state of the chunk before",
        ),
        Mutant(
            _GROUPS,
            "// group.block_tokens - parts + part\n",
            "// group.block_tokens - parts + part + 1\n",
            "a state is saved from the block after it",
        ),
        Mutant(
            _SAVES,
            "            if blocks_of(self._geometry, piece, tables) != [block]:\n                "
            "continue\n",
            "",
            "a state is saved from where its block was",
        ),
        Mutant(
            _SAVES,
            "            if group is None or not tokens or tokens % size:\n",
            "            if group is None or not tokens:\n",
            "a state inside a chunk is saved as that of its end",
        ),
        Mutant(
            _TABLES,
            "    return blocks if len(blocks) == count and NULL_BLOCK not in blocks else None\n",
            "    return blocks if len(blocks) == count else None\n",
            "the null block is saved",
        ),
        Mutant(
            _WORKER,
            "            if NULL_BLOCK in blocks:\n",
            "            if False:\n",
            "a worker copies the null block",
        ),
        Mutant(
            _GROUPS,
            "            for part in range(self.parts(group))\n        }\n",
            "            for part in range(self.parts(group))\n        }\n"
            '        masks = dict.fromkeys(masks, PieceMask("0"))\n',
            "all groups have the same keys",
        ),
        Mutant(
            "core/chunk.py",
            'b"".join(each.any_but_first * keys for each in masks)',
            'b"".join(masks[0].any_but_first * keys for _ in masks)',
            "groups that are named together have the same keys",
        ),
        Mutant(
            _GROUPS,
            "return -(-(group.span - 1) // group.block_tokens)",
            "return max(1, (group.span - 1) // group.block_tokens)",
            "a tail is kept without its first block",
        ),
        Mutant(
            _GROUPS,
            "range(stop - -(-(end - begin) // group.block_tokens), stop)",
            "range(stop - (end - begin) // group.block_tokens, stop)",
            "a tail is loaded without its first block",
        ),
        Mutant(
            _GROUPS,
            "        return piece.group.is_at_ends or piece.number * self.piece_tokens < end\n",
            "        return piece.number * self.piece_tokens < end\n",
            "blocks of a tail are counted as pieces are",
        ),
        Mutant(
            "connectors/vllm/layout.py",
            "        is_tail = is_beside and group.span <= longest\n",
            "        is_tail = is_beside\n",
            "a long window is kept as a tail, of which no chunk has room",
        ),
        Mutant(
            _SCHEDULER,
            "early = set(told) if output.scheduled_spec_decode_tokens.get(request_id) else set()",
            "early: set[State] = set()",
            "a state is saved before the step has chosen among drafts",
        ),
        Mutant(
            _CLAIMS,
            "            if ready == claim.run.length:\n",
            "            if ready >= claim.run.length - 1:\n",
            "a hit is promised without its last piece",
        ),
        Mutant(
            _CLAIMS,
            "                return claim.run.end\n",
            "                return claim.run.end + self._geometry.chunk_tokens\n",
            "more is promised than is there",
        ),
        Mutant(
            _SCHEDULER,
            "        if not geometry.is_gradual and end != prompt.claim.run.end:\n",
            "        if False:\n",
            "a hit that vLLM takes in part is loaded as if it were whole",
        ),
        Mutant(
            _CLAIMS,
            "if together > self._most or",
            "if together < 0 or",
            "requests that wait hold blocks that none of them can do without",
        ),
        Mutant(
            _CLAIMS,
            "self._next = self._next or request.request_id\n",
            "pass\n",
            "whoever needs many blocks is overtaken without end",
        ),
        Mutant(
            "connectors/vllm/layout.py",
            "        owners.append((blocks * sum(sizes[:part]), writes))\n",
            "        owners.append((0, writes))\n",
            "ranks write over one another",
        ),
    ),
)
