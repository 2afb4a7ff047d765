"""Cache groups: what is kept of each, and where a hit may end, as the simulated engines see it."""

from __future__ import annotations

from tests.trust.mutations.room import Mutant, Room

_GROUPS, _TABLES, _CLAIMS = (
    "connectors/vllm/groups.py",
    "connectors/vllm/tables.py",
    "connectors/vllm/scheduler_side/claims.py",
)
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
            "Granted.gone",
            "if self._next == request_id:\n    ...",
            "",
            "whoever waited for blocks stays first for ever, and nobody else is granted a load",
        ),
        Mutant(
            "Claims._take_whole",
            "claim.until = min(claim.until, until)",
            "",
            "each shorter hit that is tried begins a new deadline",
        ),
        Mutant(
            "Group.first_needed",
            "end - (self.span - 1)",
            "end - (self.span - 1) + 16",
            "a window is loaded one block short",
        ),
        Mutant(
            "tables.loading",
            "max(begin, start, group.first_needed(end)) // block",
            "-(-max(begin, start, group.first_needed(end)) // block)",
            "the block in which a window begins is not loaded",
        ),
        Mutant(
            "Group.first_needed",
            "end // self.span * self.span",
            "(end - 1) // self.span * self.span + 16",
            "an attention chunk is loaded without its first block",
        ),
        Mutant(
            "Geometry.others",
            "tuple((group for group in self.groups if group not in self.anchors))",
            "tuple((group for group in self.groups if group not in self.anchors))[:1]",
            "the last group is missing in a hit",
        ),
        Mutant(
            "Geometry._needed",
            "return range(end // self.chunk_tokens - 1, end // self.chunk_tokens)",
            "last = max(1, end // self.chunk_tokens - 1)\nreturn range(last - 1, last)",
            "a hit is given the state of the chunk before",
        ),
        Mutant(
            "Geometry.first_block",
            "(chunk + 1) * self.chunk_tokens // group.block_tokens - parts + part",
            "(chunk + 1) * self.chunk_tokens // group.block_tokens - parts + part + 1",
            "a state is saved from the block after it",
        ),
        Mutant(
            "Saves._states",
            "if blocks_of(self._geometry, piece, tables) != [block]:\n    ...",
            "",
            "a state is saved from where its block was",
        ),
        Mutant(
            "Saves._states",
            "group is None or not tokens or tokens % size",
            "group is None or not tokens",
            "a state inside a chunk is saved as that of its end",
        ),
        Mutant(
            "tables.blocks_of",
            "len(blocks) == count and NULL_BLOCK not in blocks",
            "len(blocks) == count",
            "the null block is saved",
        ),
        Mutant(
            "WorkerHalf._copies",
            "NULL_BLOCK in blocks",
            "False",
            "a worker copies the null block",
        ),
        Mutant(
            "Geometry._masks",
            "return masks | {(self.anchors[0].number, self.pieces_per_chunk - 1): None}",
            "masks = dict.fromkeys(masks, PieceMask('0'))\n"
            "return masks | {(self.anchors[0].number, self.pieces_per_chunk - 1): None}",
            "all groups have the same keys",
        ),
        Mutant(
            "chunk._mask_of",
            "(each.any_but_first * keys for each in masks)",
            "(masks[0].any_but_first * keys for _ in masks)",
            "groups that are named together have the same keys",
        ),
        Mutant(
            "Geometry.parts",
            "-(-(group.span - 1) // group.block_tokens)",
            "max(1, (group.span - 1) // group.block_tokens)",
            "a tail is kept without its first block",
        ),
        Mutant(
            "Geometry._needed",
            "-(-(end - begin) // group.block_tokens)",
            "(end - begin) // group.block_tokens",
            "a tail is loaded without its first block",
        ),
        Mutant(
            "Geometry.begins_before",
            "piece.group.is_at_ends or piece.number * self.piece_tokens < end",
            "piece.number * self.piece_tokens < end",
            "blocks of a tail are counted as pieces are",
        ),
        Mutant(
            "_with_tails.kind",
            "is_beside and group.span <= longest",
            "is_beside",
            "a long window is kept as a tail, of which no chunk has room",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "early = set(told) if output.scheduled_spec_decode_tokens.get(request_id) else set()",
            "early: set[State] = set()",
            "a state is saved before the step has chosen among drafts",
        ),
        Mutant(
            "Claims._promise_whole",
            "ready == claim.run.length",
            "ready >= claim.run.length - 1",
            "a hit is promised without its last piece",
        ),
        Mutant(
            "Claims._promise_whole",
            "return claim.run.end",
            "return claim.run.end + self._geometry.chunk_tokens",
            "more is promised than is there",
        ),
        Mutant(
            "SchedulerHalf.allocated",
            "not geometry.is_gradual and end != prompt.claim.run.end",
            "False",
            "a hit that vLLM takes in part is loaded as if it were whole",
        ),
        Mutant(
            "Granted.fits",
            "together > self._most",
            "together < 0",
            "requests that wait hold blocks that none of them can do without",
        ),
        Mutant(
            "Geometry.most_blocks",
            "(*self.groups, *self.uncached)",
            "self.groups",
            "replayed windows take blocks that nobody counted, and requests that wait hold them",
        ),
        Mutant(
            "Granted.fits",
            "self._next = self._next or request.request_id",
            "pass",
            "whoever needs many blocks is overtaken without end",
        ),
        Mutant(
            "layout._placed",
            "blocks * sum(sizes[:part])",
            "0",
            "ranks write over one another",
        ),
    ),
)
