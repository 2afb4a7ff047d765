"""Which KV of a model a chunk keeps, and what of it a hit needs: the geometry of vLLM's cache
groups. Pure.

vLLM puts layers that need the same tokens into one *group*. Full attention needs all tokens before
a position. A sliding window needs the last of them. Chunked local attention needs those of the
current attention chunk. A recurrent layer needs one *state*, which stands for all of them. Every
group has its own blocks.

The store knows nothing of this. It keeps *pieces*, all of one size, each under its own key:

- The KV of ``piece_tokens`` consecutive tokens in one group, by number: piece 3 begins at token
  ``3 * piece_tokens``. A chunk has ``chunk_tokens / piece_tokens`` of them in each group.
- The state of one recurrent group at the end of a chunk, with the chunk's number.
- One block of a *tail*: a window that is shorter than vLLM's longest block. Only the blocks at the
  end of a chunk are kept, which are all that a position there reads. A piece of ``piece_tokens``
  would be longer than the window, and vLLM never holds all of its blocks at a time.

So all kinds share RAM, disks and quotas, to the byte, and models differ only in the connector. A
model with one group of full attention has one piece a chunk, and the piece has the chunk's key.

A hit ends with a chunk, or where a part of one is kept as a chunk of its own
(:mod:`.scheduler_side.partial_tails`). Every *anchor* group must have all pieces of the run. The
anchors are the groups of full attention. A model without such groups has its windows as anchors,
which are then kept whole, so that the store can tell how much of a prompt is there. Of the other
groups only the pieces behind some ends are kept: see :meth:`Geometry.is_kept`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey, PieceMask, piece_keys
from kvtier.core.errors import LayoutError

_KEEP_TOKENS = 2_048
"""Distance in tokens (rounded up to whole chunks) of hits' ends within a prompt. Shared prefixes
may end anywhere. Windows and states at every chunk would take more room than all else."""
_ENDS_PART = 0.3
"""Room for the pieces behind ends within a prompt, as a part of the anchors' room. Ends lie further
apart where each takes more."""
_ANSWER_CHUNKS = 4
"""Distance, in chunks, of an answer's ends that a model with tails keeps, and number of ends before
the last known chunk at which it looks for a hit."""
_LAST_ENDS = 2
"""Last ends of a prompt that are kept: its last chunk often has the question in it. Beside some
drafts vLLM has a state only at the end before the last."""
_MOST_PIECES = 16
_MOST_ENDS = 8


class Kind(Enum):
    FULL = "full attention"
    WINDOW = "sliding window"
    LOCAL = "chunked local attention"
    STATE = "recurrent state"
    TAIL = "short window"


_FULL, _WINDOW, _STATE, _TAIL = Kind.FULL, Kind.WINDOW, Kind.STATE, Kind.TAIL
"""Kinds that each lookup compares: Python 3.11 takes 90 ns to find a member by its name."""


@dataclass(frozen=True, slots=True)
class Group:
    """Kept cache group. ``span``: tokens of the window, tail or attention chunk, else 0."""

    number: int
    kind: Kind
    block_tokens: int
    span: int = 0

    @property
    def is_at_ends(self) -> bool:
        """Whether pieces are single blocks at the ends of chunks, and not stretches of tokens."""
        return self.kind is _STATE or self.kind is _TAIL

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """Return the most blocks of a request, if steps in flight compute ``in_flight`` tokens."""
        if self.kind is _FULL:
            return -(-tokens // self.block_tokens)
        return _in_window(tokens, self.span + in_flight, self.block_tokens)

    def first_needed(self, end: int) -> int:
        """Return the first token whose KV the position ``end`` needs."""
        if self.kind in (_WINDOW, _TAIL):
            return max(0, end - (self.span - 1))
        if self.kind is Kind.LOCAL:
            return end // self.span * self.span
        return 0


@dataclass(frozen=True, slots=True)
class Uncached:
    """Group of which vLLM caches no prefixes: a window that is computed again behind a hit, or a
    ring. ``span``: tokens of the window. ``blocks``: of each request, where that is fixed."""

    block_tokens: int
    span: int = 0
    blocks: int | None = None

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        if self.blocks is not None:
            return self.blocks
        return _in_window(tokens, self.span + in_flight, self.block_tokens)


def _in_window(tokens: int, most: int, block_tokens: int) -> int:
    return -(-min(tokens, most) // block_tokens) + 1


class Piece(NamedTuple):
    """Unit of one group that a slot holds. ``number`` counts pieces of a group; for STATE the chunk
    at whose end it is; for TAIL the blocks of all tails, see :meth:`Geometry.parts`."""

    group: Group
    number: int


class Run(NamedTuple):
    """Keys of a hit, in the order in which the store is asked for them."""

    keys: list[ChunkKey]
    start: int
    """Number of leading keys that the engine has by itself, named only so that they stay hot."""
    computed: int
    """Tokens that the request has without the hit."""
    end: int
    """Tokens that the request has with all of the hit."""

    @property
    def wanted(self) -> list[ChunkKey]:
        return self.keys[self.start :]

    @property
    def length(self) -> int:
        return len(self.keys) - self.start


@dataclass(frozen=True)
class Geometry:
    """Cache groups of one model. ``uncached`` ones take blocks and are not kept.

    Raises LayoutError where chunks are not whole blocks of every group, and for a tail that is
    longer than a chunk."""

    groups: tuple[Group, ...]
    chunk_tokens: int
    uncached: tuple[Uncached, ...] = ()

    def __post_init__(self) -> None:
        for group in self.groups:
            if self.chunk_tokens % group.block_tokens:
                raise LayoutError(
                    f"chunk_tokens={self.chunk_tokens} is not a multiple of {group.block_tokens}, "
                    f"the block size of a cache group ({group.kind.value}); leave chunk_tokens "
                    "out, or give a multiple"
                )
            if group.kind is _TAIL and group.span - 1 > self.chunk_tokens:
                raise LayoutError(
                    f"chunk_tokens={self.chunk_tokens} is shorter than a window of {group.span} "
                    "tokens; leave chunk_tokens out, or give a longer chunk"
                )

    # ---- sizes -----------------------------------------------------------------------------------

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """Return the most blocks of a request, in groups that are not kept too."""
        every: tuple[Group | Uncached, ...] = (*self.groups, *self.uncached)
        return sum(group.most_blocks(tokens, in_flight) for group in every)

    @cached_property
    def block_tokens(self) -> int:
        """Unit of full attention's hits: with one, every group has whole blocks."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def piece_tokens(self) -> int:
        """Tokens of a piece: few, so that a window, or a state of one block, wastes little."""
        blocks = self.chunk_tokens // self.block_tokens
        shortest = min(
            (group.span - 1 for group in self.groups if group.kind is Kind.WINDOW),
            default=self.chunk_tokens,
        )
        if self.has_state:
            shortest = 1
        fits = [
            count
            for count in range(1, min(blocks, _MOST_PIECES) + 1)
            if not blocks % count and self.chunk_tokens // count >= shortest
        ]
        return self.chunk_tokens // max(fits, default=1)

    @cached_property
    def pieces_per_chunk(self) -> int:
        return self.chunk_tokens // self.piece_tokens

    @cached_property
    def trunk_pieces(self) -> int:
        """Number of the anchors' pieces in a chunk."""
        return self.pieces_per_chunk * len(self.anchors)

    @cached_property
    def _stretch_blocks(self) -> dict[int, int]:
        """Blocks of a piece by the group's number, where pieces are stretches of tokens."""
        stretches = (group for group in self.groups if not group.is_at_ends)
        return {group.number: self.piece_tokens // group.block_tokens for group in stretches}

    def blocks_per_piece(self, group: Group) -> int:
        return self._stretch_blocks.get(group.number, 1)

    def parts(self, group: Group) -> int:
        """Return a chunk's number of kept pieces. TAIL: blocks of the last ``span - 1`` tokens."""
        if group.kind is _STATE:
            return 1
        if group.kind is _TAIL:
            return -(-(group.span - 1) // group.block_tokens)
        return self.pieces_per_chunk

    def blocks(self, piece: Piece) -> slice:
        """Return the places of the piece's blocks in its group's table."""
        group, number = piece
        count = self._stretch_blocks.get(group.number)
        if count is not None:
            return slice(number * count, (number + 1) * count)
        parts = self.parts(group)
        chunk, part = divmod(number, parts)
        end = (chunk + 1) * self.chunk_tokens // group.block_tokens - parts + part + 1
        return slice(end - 1, end)

    @cached_property
    def anchors(self) -> tuple[Group, ...]:
        """Groups of which every piece is kept."""
        full = tuple(group for group in self.groups if group.kind is Kind.FULL)
        return full or tuple(group for group in self.groups if not group.is_at_ends)

    @cached_property
    def others(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group not in self.anchors)

    @cached_property
    def has_state(self) -> bool:
        return any(group.kind is Kind.STATE for group in self.groups)

    @cached_property
    def has_tail(self) -> bool:
        return any(group.kind is _TAIL for group in self.groups)

    @cached_property
    def has_ends(self) -> bool:
        return self.has_state or self.has_tail

    @cached_property
    def is_simple(self) -> bool:
        """Whether full attention is the one group: pieces are chunks, hits end with any block."""
        return len(self.groups) == 1 and self.groups[0].kind is Kind.FULL

    @cached_property
    def is_gradual(self) -> bool:
        """Whether all groups are full attention: every leading part of a run can be used."""
        return all(group.kind is Kind.FULL for group in self.groups)

    # ---- names -----------------------------------------------------------------------------------

    @cached_property
    def _masks(self) -> dict[tuple[int, int], PieceMask | None]:
        """Mask of the key by group and place in the chunk. The first anchor's last piece has the
        chunk's own key, so code that knows only chunks can find it."""
        masks: dict[tuple[int, int], PieceMask | None] = {
            (group.number, part): PieceMask(f"{group.number} {part}")
            for group in self.groups
            for part in range(self.parts(group))
        }
        return masks | {(self.anchors[0].number, self.pieces_per_chunk - 1): None}

    def key(self, piece: Piece, keys: Sequence[ChunkKey]) -> ChunkKey:
        group, number = piece
        chunk, part = divmod(number, self.parts(group))
        mask = self._masks[group.number, part]
        return keys[chunk] if mask is None else mask.key(keys[chunk])

    def begins_before(self, piece: Piece, end: int) -> bool:
        """Return whether a hit of ``end`` tokens, even within a chunk, has some of ``piece``."""
        return piece.group.is_at_ends or piece.number * self.piece_tokens < end

    # ---- runs ------------------------------------------------------------------------------------

    def first(self, computed: int) -> int:
        return computed // self.piece_tokens

    @cached_property
    def _trunk(self) -> list[Piece]:
        """Pieces of the longest trunk that was asked for yet."""
        return []

    def trunk(self, first: int, chunks: int) -> list[Piece]:
        """Return the anchors' pieces of ``chunks`` chunks, from piece number ``first`` on."""
        known, wide = self._trunk, len(self.anchors)
        for number in range(len(known) // wide, chunks * self.pieces_per_chunk):
            known.extend(Piece(group, number) for group in self.anchors)
        return known[first * wide : chunks * self.pieces_per_chunk * wide]

    def trunk_keys(self, keys: Sequence[ChunkKey], chunks: int) -> list[ChunkKey]:
        found = list(keys[:chunks])
        if not self._masked:
            return found
        trunk, count = found * (len(self._masked) + 1), len(found)
        named = piece_keys([*self._masked.values()], found)
        for number, column in enumerate(self._masked):
            trunk[column :: len(self._masked) + 1] = named[number * count : (number + 1) * count]
        trunk[self._unmasked :: len(self._masked) + 1] = found
        return trunk

    @cached_property
    def _unmasked(self) -> int:
        """Place of the chunk's own key among the anchors' keys of a chunk."""
        return (self.pieces_per_chunk - 1) * len(self.anchors)

    @cached_property
    def _masked(self) -> dict[int, PieceMask]:
        masks = [
            self._masks[group.number, part]
            for part in range(self.pieces_per_chunk)
            for group in self.anchors
        ]
        return {place: mask for place, mask in enumerate(masks) if mask is not None}

    def tokens(self, first: int, pieces: int) -> int:
        """Return the tokens up to the end of ``pieces`` trunk pieces from number ``first`` on."""
        return (first + pieces // len(self.anchors)) * self.piece_tokens

    def behind(self, end: int, computed: int = 0) -> list[Piece]:
        """Return the pieces of groups beside the anchors for a hit of ``end`` tokens, a multiple of
        ``chunk_tokens``. The request has ``computed`` tokens by itself."""
        return self._pieces(self.others, end, computed)

    def behind_keys(self, keys: Sequence[ChunkKey], end: int, computed: int = 0) -> list[ChunkKey]:
        found: list[ChunkKey] = []
        for groups, masks in self._alike:
            numbers = self._needed(groups[0], end, computed)
            if masks:
                found += piece_keys(masks, keys[numbers.start : numbers.stop])
            else:
                pieces = (Piece(group, number) for group in groups for number in numbers)
                found += [self.key(piece, keys) for piece in pieces]
        return found

    @cached_property
    def _alike(self) -> list[tuple[list[Group], list[PieceMask]]]:
        """Neighbouring groups beside the anchors that need the same tokens, with their masks where
        a group has one piece of a chunk."""
        found = list[tuple[list[Group], list[PieceMask]]]()
        for _, alike in groupby(
            self.others, key=lambda group: (group.kind, group.span, group.block_tokens)
        ):
            groups, masks = list(alike), list[PieceMask]()
            if self.parts(groups[0]) == 1:
                masks = [mask for group in groups if (mask := self._masks[group.number, 0])]
            found.append((groups, masks))
        return found

    def _needed(self, group: Group, end: int, computed: int) -> range:
        if group.kind is _STATE:
            return range(end // self.chunk_tokens - 1, end // self.chunk_tokens)
        begin = max(group.first_needed(end), computed)
        if group.kind is _TAIL:
            stop = end // self.chunk_tokens * self.parts(group)
            return range(stop - -(-(end - begin) // group.block_tokens), stop)
        return range(begin // self.piece_tokens, end // self.piece_tokens if begin < end else 0)

    @cached_property
    def _made(self) -> dict[int, list[Piece]]:
        return {group.number: [] for group in self.groups}

    def _pieces(self, groups: Sequence[Group], end: int, computed: int) -> list[Piece]:
        found: list[Piece] = []
        for group in groups:
            numbers, made = self._needed(group, end, computed), self._made[group.number]
            made.extend(Piece(group, number) for number in range(len(made), numbers.stop))
            found += made[numbers.start : numbers.stop]
        return found

    def run(self, keys: Sequence[ChunkKey], computed: int, end: int) -> Run:
        """Return the run for a hit of ``end`` tokens of a request that has ``computed`` of them."""
        start = self.first(computed) * len(self.anchors)
        if self.is_gradual:
            return Run(self.trunk_keys(keys, -(-end // self.chunk_tokens)), start, computed, end)
        if self.anchors[0].kind is _FULL:
            named = self.trunk_keys(keys, end // self.chunk_tokens)
            named += self.behind_keys(keys, end, computed)
            return Run(named, start, computed, end)
        pieces = self._pieces(self.groups, end, computed)
        begin = min(piece.number for piece in pieces if piece.group in self.anchors)
        lead = [Piece(group, number) for number in range(begin) for group in self.anchors]
        named = [self.key(piece, keys) for piece in (*lead, *pieces)]
        return Run(named, len(lead), computed, end)

    def pieces(self, run: Run) -> list[Piece]:
        if self.anchors[0].kind is not Kind.FULL:
            return self._pieces(self.groups, run.end, run.computed)
        keys = len(run.keys)
        chunks = keys // self.trunk_pieces if self.is_gradual else -(-run.end // self.chunk_tokens)
        trunk = self.trunk(self.first(run.computed), chunks)
        return trunk + self.behind(chunks * self.chunk_tokens, run.computed)

    # ---- ends ------------------------------------------------------------------------------------

    def last_end(self, tokens: int) -> int:
        """Return the longest possible hit: it ends with a block (full attention) or a chunk, and
        one token at least is computed."""
        step = self.block_tokens if self.is_gradual else self.chunk_tokens
        return (tokens - 1) // step * step

    @cached_property
    def keep_tokens(self) -> int:
        """Distance of kept ends within a prompt, a multiple of chunks and attention chunks."""
        spans = [group.span for group in self.groups if group.kind is Kind.LOCAL]
        unit = math.lcm(self.chunk_tokens, *spans)
        longest = max((group.span for group in self.others), default=0)
        behind = len(self.behind(-(-max(longest, 1) // unit) * unit))
        trunk = len(self.anchors) * self.pieces_per_chunk
        room = math.ceil(behind / trunk / _ENDS_PART) * self.chunk_tokens
        return -(-max(_KEEP_TOKENS, room) // unit) * unit

    def is_kept(self, end: int, prompt_tokens: int, branches: Sequence[int] = ()) -> bool:
        """Return whether the pieces behind this end are worth their room: the last end of a prompt
        (the last two with states or tails), every end of an answer (one in four with tails), where
        other prompts branch off, and every :attr:`keep_tokens` (with tails not near the last)."""
        size = self.chunk_tokens
        last = (prompt_tokens - 1) // size * size
        is_near = self.has_tail and 0 < last - end < self.keep_tokens
        if not end % self.keep_tokens and not is_near:
            return True
        if end in {branch // size * size for branch in branches}:
            return True
        if self.has_tail and end > last:
            return not end % (_ANSWER_CHUNKS * size)
        return end >= last or (self.has_ends and end > last - _LAST_ENDS * size)

    def is_state_kept(
        self, end: int, begin: int, prompt_tokens: int, branches: Sequence[int] = ()
    ) -> bool:
        """Return whether to keep the state of a step from ``begin`` to ``end``. Within a prompt:
        the first at or behind each :attr:`keep_tokens`, because vLLM has states where steps end."""
        apart = self.keep_tokens
        return end // apart > begin // apart or self.is_kept(end, prompt_tokens, branches)

    def ends(self, most: int, known: int, computed: int) -> list[int]:
        """Return ends of hits after ``computed`` tokens, the longest first: ``most``, ``known`` and
        some chunks before, then kept ends in a prompt. Those of states may be any."""
        step, size, last = self.keep_tokens, self.chunk_tokens, min(known, most)
        kept = range((last - 1) // step * step, 0, -step)
        near = range(last - size, 0, -size)
        count = _MOST_ENDS if self.has_state else _ANSWER_CHUNKS if self.has_tail else 0
        found = [most, last, *near[:count], *kept[:_MOST_ENDS]]
        return [end for end in dict.fromkeys(found) if end > computed][:_MOST_ENDS]


class SpanMove(NamedTuple):
    slot: int
    first: int
    tokens: int
    begin: int
    """Position in the prompt. ``first`` is the one in the slot."""
    distance: int


class InPlaceRun(NamedTuple):
    """Tokens ``begin`` to ``end`` of a prompt, which are computed in place.

    Those before ``moved`` lie in a hole. The others, at least one, are a section's first tokens:
    what was moved there must equal what the run computes."""

    begin: int
    moved: int
    end: int
    tokens: Sequence[int] = ()
    """The tokens themselves, for the workers."""
