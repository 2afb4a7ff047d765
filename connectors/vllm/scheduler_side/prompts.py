"""Prompts: the memory of the scheduler's half of each live request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier.api import LoadLease
from kvtier.connectors.vllm.groups import Geometry, Piece, Run
from kvtier.connectors.vllm.hints import Said
from kvtier.connectors.vllm.scheduler_side.requests import RequestNames
from kvtier.core.chunk import ChunkKey, ChunkLayout, KeyChain
from kvtier.core.lookup import RAM


@dataclass(slots=True)
class TriedEnds:
    """Ends of whole runs, which begin where vLLM's own blocks end, that were tried."""

    missing: set[int] = field(default_factory=set)
    """Ends of runs that turned out to be incomplete."""
    ready_only: bool = False
    """Whether only what is in RAM is taken, after the deadline."""
    seen: tuple[int, int, bool, int, bool] | None = None
    """Answer of the store when no whole run was worth loading."""


@dataclass(slots=True)
class RequestClaim:
    lease: LoadLease | None = None
    run: Run | None = None
    """Run of the lease."""
    begin: int = 0
    """Tokens that vLLM had by itself at the last lookup."""
    store_was_asked: bool = False
    """Whether a run of the request was loaded before."""
    was_looked_up: bool = False
    """Whether the store was asked since the request got blocks."""
    asked_first: bool = True
    """Whether vLLM asked for it before all others at the last lookup."""
    known_pieces: int = 0
    """Number of the run's pieces that the store knew of at the last lookup."""
    taken_pieces: int = 0
    """Number of the known pieces that are to be loaded."""
    why: str = ""
    """Miss reason of the next piece at the last lookup."""
    branch: int = 0
    """Tokens that the store's anchors had at the last lookup, where no hit ended there. The next
    prompt that shares them shall find an end."""
    declined: dict[str, int] = field(default_factory=dict)
    """Number of pieces that could be had and are not taken, by reason."""
    in_blocks: int = 0
    """Slots of a load in parts, which has blocks."""
    deadline: float = 0.0
    """Time after which nothing is waited for, in seconds of the load policy's clock."""
    arrived_pieces: int = 0
    """Number of the lease's pieces that had arrived at the last look."""
    next_piece_by: float = 0.0
    """Time by which the next piece must arrive."""
    brought: dict[ChunkKey, str] = field(default_factory=dict)
    """Tier from which each piece came that closed leases had brought."""
    tried: TriedEnds = field(default_factory=TriedEnds)

    @property
    def held(self) -> int:
        """Number of slots that are claimed."""
        return self.in_blocks + (len(self.lease.keys) if self.lease is not None else 0)

    def take(self) -> tuple[LoadLease | None, bool]:
        """Hand the lease over to the caller. Also returns whether the store was asked since the
        last blocks."""
        found = self.lease, self.was_looked_up
        self.lease, self.was_looked_up = None, False
        return found

    def drop(self) -> None:
        if self.lease is not None:
            self.let_go(self.lease)
            self.lease = None

    def let_go(self, lease: LoadLease) -> None:
        """Close a lease, and remember what it has brought: the next one finds that in RAM."""
        lease.poll()  # what has come since the last look was brought as well
        brought = zip(lease.keys, self.places(lease), strict=False)
        self.brought |= {key: place for key, place in brought if place != RAM}
        lease.close()

    def places(self, lease: LoadLease) -> list[str]:
        """Return the tier that each ready piece of a lease came from for this request."""
        if not self.brought:
            return lease.sources
        return [
            self.brought.get(key, place) if place == RAM else place
            for key, place in zip(lease.keys, lease.sources, strict=False)
        ]


@dataclass(slots=True)
class RequestProgress:
    began: bool = False
    saved: int = 0
    """Number of leading chunks that were offered to the store with all their pieces."""
    loaded: int = 0
    """Number of leading chunks in the blocks that it begins with which the store has given."""
    states: list[tuple[int, int, int]] = field(default_factory=list)
    """``(group, block, tokens)`` of recurrent states in blocks of their own that are not saved
    yet."""
    retried: bool = False
    """Whether saves failed once, and were offered again."""
    blended: bool = False
    """Whether blocks have KV from another place, so that nothing is saved any more."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of the last load by place. Empty if they are computed."""
    load_failed: bool = False
    """Whether nothing is promised any more, after a load that failed."""

    def moved(self) -> None:
        """Forget what was offered: the request has other blocks now, to be offered anew, but for
        what is in them from the store."""
        self.saved, self.loaded, self.states = self.loaded, 0, []

    def retry(self) -> None:
        if not self.retried:
            self.saved, self.retried = 0, True


@dataclass(slots=True)
class Prompt:
    """State of one live request."""

    request: Any
    chain: KeyChain | None
    """Maker of the keys of its chunks. None if the request is not cached."""
    number: int = 0
    said: Said = field(default_factory=Said)
    """Hints of the request."""
    extras: tuple[bytes, ...] = ()
    """Parts of the first chunk's key: see :data:`kvtier.store.reports.miss_reasons.EXTRAS`."""
    shape: tuple[int, int] | None = None
    """Number of tokens, and of media, of the prompt when the keys were made. None before that."""
    lasts: bool = True
    """Whether another start of the engine would name its chunks alike."""
    is_plain: bool = True
    """Whether its tokens alone name its chunks."""
    left_alone: bool = False
    """Whether it is neither loaded nor saved any more."""
    is_hidden: bool = False
    """Whether no other request finds vLLM's blocks of it."""
    claim: RequestClaim = field(default_factory=RequestClaim)
    progress: RequestProgress = field(default_factory=RequestProgress)
    notes: dict[object, Any] = field(default_factory=dict)
    """Extension -> what it keeps about the request."""

    def name(self, layout: ChunkLayout, names: RequestNames) -> bool:
        """Make the chain of keys, unless there is one for what the request is now. Returns whether
        it did. A request changes when its streaming session goes on: vLLM takes back the token that
        it sampled last, and adds tokens and media."""
        request = self.request
        shape = request.num_prompt_tokens, len(request.mm_features or ())
        if self.left_alone or shape == self.shape:
            return False
        named = names.of(request, layout.chunk_tokens)
        if named is None:
            self.chain = self.shape = None
            return False
        self.chain = None if named.whole is None else layout.chain(named.whole, named.media)
        self.extras, self.lasts, self.shape = named.first, named.lasts, shape
        self.is_plain = not (named.whole or named.media)
        self.progress.saved = self.progress.loaded = 0
        return True

    @property
    def waits_for_names(self) -> bool:
        return self.shape is None and not self.left_alone

    @property
    def branches(self) -> tuple[int, ...]:
        """Numbers of tokens after which it branches off from other prompts, for vLLM and for the
        store."""
        return getattr(self.request, "shared_prefix_boundary", 0), self.claim.branch

    def leave_alone(self) -> None:
        self.chain, self.left_alone = None, True


def by_place(
    geometry: Geometry, sources: Iterable[tuple[Piece, str]], begin: int, end: int
) -> dict[str, int]:
    """Return the number of tokens from ``begin`` to ``end`` by place, for the first of the
    anchors, whose pieces come in ascending order. Tokens before a window are not needed. They count
    for the first piece that is needed."""
    tokens = dict[str, int]()
    size, at, anchor = geometry.piece_tokens, begin, geometry.anchors[0]
    found = [(piece.number, place) for piece, place in sources if piece.group is anchor]
    if len({place for _, place in found}) == 1:
        found = found[-1:]
    for number, place in found:
        until = min((number + 1) * size, end)
        tokens[place] = tokens.get(place, 0) + until - at
        at = until
    return tokens
