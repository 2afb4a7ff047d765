"""Block tables: a request's blocks in each cache group, and which of them a job moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.connectors.vllm.groups import Geometry, Piece
from kvtier.connectors.vllm.metadata import Move

NULL_BLOCK = 0
"""Block of vLLM for tokens that a group does not need any more."""
Tables = Sequence[Sequence[int]]
State = tuple[int, int, int]
"""``(group, block, tokens)`` of a recurrent state that has a block of its own."""


class BlockTables:
    """Tables of one step. vLLM makes the lists of new requests itself, and others when they are
    asked for. Before 0.32 it tells only what was added, and one group of full attention is kept,
    whose table grows at its end."""

    def __init__(self) -> None:
        self._told: Any = None
        self._new: dict[str, Tables] = {}
        self._grown: dict[str, list[int]] = {}

    def begin(self, output: Any) -> None:
        told = getattr(output, "kv_connector_block_state", None)
        if hasattr(told, "get_block_ids"):
            self._told = told
            if output.scheduled_new_reqs:
                self._new = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
            return
        for new in output.scheduled_new_reqs:
            self._grown[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._grown[name] = []
            self._grown.setdefault(name, []).extend(ids[0] if ids else [])

    def end(self) -> None:
        self._told = None
        self._new.clear()

    def of(self, request_id: str) -> Tables | None:
        if self._told is None:
            grown = self._grown.get(request_id)
            return None if grown is None else (grown,)
        return self._new.get(request_id) or self._told.get_block_ids(request_id)

    def states(self, request_id: str) -> list[State]:
        """Return states left by this step or an older one, in blocks of their own."""
        told = None if self._told is None else self._told.boundary_state_offloads.get(request_id)
        return list(told or ())

    def forget(self, request_id: str) -> None:
        self._grown.pop(request_id, None)


def blocks_of(geometry: Geometry, piece: Piece, tables: Tables) -> list[int] | None:
    places = geometry.blocks(piece)
    blocks = list(tables[piece.group.number][places])
    is_whole = len(blocks) == places.stop - places.start and NULL_BLOCK not in blocks
    return blocks if is_whole else None


def saving(geometry: Geometry, pieces: Iterable[tuple[Piece, int, Tables]]) -> list[Move]:
    """Return the moves of a save of whole pieces, each with its slot."""
    moves: dict[int, Move] = {}
    for piece, slot, tables in pieces:
        number = piece.group.number
        move = moves.get(number)
        if move is None:
            move = moves[number] = Move(geometry.groups.index(piece.group), [], [])
        move.slots.append(slot)
        move.blocks.extend(tables[number][geometry.blocks(piece)])
    return [*moves.values()]


def loading(
    geometry: Geometry, pieces: Iterable[tuple[Piece, int]], tables: Tables, begin: int, end: int
) -> list[Move]:
    """Return the moves of a load into the blocks that tokens ``begin`` to ``end`` need. Pieces of a
    group come in ascending order, each with its slot."""
    own, moves = dict[int, list[tuple[Piece, int]]](), []
    for one in pieces:
        own.setdefault(one[0].group.number, []).append(one)
    for place, group in enumerate(geometry.groups):
        if not (parts := own.get(group.number)):
            continue
        slots, block = [slot for _, slot in parts], group.block_tokens
        if group.is_at_ends:
            at = [geometry.blocks(piece).start for piece, _ in parts]
            moves.append(Move(place, slots, [tables[group.number][block] for block in at]))
            continue
        start = parts[0][0].number * geometry.piece_tokens
        first = max(begin, start, group.first_needed(end)) // block
        blocks = list(tables[group.number][first : -(-end // block)])
        moves.append(Move(place, slots, blocks, first - start // block))
    return moves
