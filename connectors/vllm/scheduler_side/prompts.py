"""The scheduler's half's memory of each live request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier.api import LoadLease
from kvtier.connectors.vllm.groups import Geometry, Piece, Run
from kvtier.connectors.vllm.hint_words import Said
from kvtier.connectors.vllm.scheduler_side.requests import RequestNames
from kvtier.core.chunk import ChunkKey, ChunkLayout, KeyChain
from kvtier.core.lookup import RAM


@dataclass(slots=True)
class TriedEnds:
    """Of whole runs that begin where vLLM's own blocks end."""

    missing: set[int] = field(default_factory=set)
    """Ends of runs that turned out to be incomplete."""
    ready_only: bool = False
    """After the deadline only what is in RAM is taken."""
    seen: tuple[int, int, bool, int, bool] | None = None
    """The store's answer when no whole run was worth loading."""


@dataclass(slots=True)
class RequestClaim:
    lease: LoadLease | None = None
    run: Run | None = None
    """Of the lease."""
    begin: int = 0
    """Tokens that vLLM had by itself at the last lookup."""
    store_was_asked: bool = False
    """A run of it was loaded before."""
    was_looked_up: bool = False
    """The store was asked since the request got blocks."""
    asked_first: bool = True
    """vLLM asked for it before all others at the last lookup."""
    known_pieces: int = 0
    """Pieces of the run that the store knew of at the last lookup."""
    taken_pieces: int = 0
    """Pieces of these that are to be loaded."""
    why: str = ""
    """Miss reason of the next piece at the last lookup."""
    branch: int = 0
    """Tokens that the store's anchors had at the last lookup, where no hit ended there. The next
    prompt that shares them shall find an end."""
    declined: dict[str, int] = field(default_factory=dict)
    """Pieces that could be had and are not taken, by reason."""
    in_blocks: int = 0
    """Slots of a load in parts, which has blocks."""
    deadline: float = 0.0
    """Nothing is waited for after this, in seconds of the load policy's clock."""
    arrived_pieces: int = 0
    """Pieces of the lease at the last look."""
    next_piece_by: float = 0.0
    """The next piece must arrive before this."""
    brought: dict[ChunkKey, str] = field(default_factory=dict)
    """Tiers from which leases that were let go had brought pieces."""
    tried: TriedEnds = field(default_factory=TriedEnds)

    @property
    def held(self) -> int:
        """Slots that are claimed."""
        return self.in_blocks + (len(self.lease.keys) if self.lease is not None else 0)

    def take(self) -> tuple[LoadLease | None, bool]:
        """The lease goes over to the caller. Also returns whether the store was asked since the
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
        """The tier that each ready piece of a lease came from for this request."""
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
    """Leading chunks that were offered to the store with all their pieces."""
    states: list[tuple[int, int, int]] = field(default_factory=list)
    """``(group, block, tokens)`` of recurrent states in blocks of their own that are not saved
    yet."""
    retried: bool = False
    """Saves failed once, and were offered again."""
    blended: bool = False
    """Blocks have KV from another place, so nothing is saved any more."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of the last load by place. Empty: they are computed."""
    load_failed: bool = False
    """Nothing is promised any more."""

    def moved(self) -> None:
        """The request has other blocks than before, so all that they get is offered."""
        self.saved, self.states = 0, []

    def retry(self) -> None:
        if not self.retried:
            self.saved, self.retried = 0, True


@dataclass(slots=True)
class Prompt:
    """One live request."""

    request: Any
    chain: KeyChain | None
    """Makes the keys of its chunks. None: this request is not cached."""
    number: int = 0
    said: Said = field(default_factory=Said)
    """Hints."""
    extras: tuple[bytes, ...] = ()
    """See :data:`kvtier.store.reports.miss_reasons.EXTRAS`."""
    shape: tuple[int, int] | None = None
    """Tokens and media of the prompt when the keys were made. None: they are not made yet."""
    lasts: bool = True
    """Another start of the engine would name its chunks alike."""
    is_plain: bool = True
    """Its tokens alone name its chunks."""
    left_alone: bool = False
    """Neither loaded nor saved any more."""
    is_hidden: bool = False
    """No other request finds vLLM's blocks of it."""
    claim: RequestClaim = field(default_factory=RequestClaim)
    progress: RequestProgress = field(default_factory=RequestProgress)
    notes: dict[object, Any] = field(default_factory=dict)
    """By extension."""

    def name(self, layout: ChunkLayout, names: RequestNames) -> bool:
        """Make the chain of keys, if there is none for what the request is now, and return
        whether. A request changes when its streaming session goes on: vLLM takes back the token
        that it sampled last, and adds tokens and media."""
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
        self.progress.saved = 0
        return True

    @property
    def waits_for_names(self) -> bool:
        return self.shape is None and not self.left_alone

    @property
    def branches(self) -> tuple[int, ...]:
        """Tokens at which it branches off from other prompts, as vLLM sees it, and as the store
        does."""
        return getattr(self.request, "shared_prefix_boundary", 0), self.claim.branch

    def leave_alone(self) -> None:
        self.chain, self.left_alone = None, True


def by_place(
    geometry: Geometry, sources: Iterable[tuple[Piece, str]], begin: int, end: int
) -> dict[str, int]:
    """Tokens ``begin`` to ``end`` by the place that they came from, for the first of the
    anchors, whose pieces come in ascending order. Tokens before a window are not needed. They count
    for the first piece that is needed."""
    tokens = dict[str, int]()
    size, at, anchor = geometry.piece_tokens, begin, geometry.anchors[0]
    for piece, place in sources:
        if piece.group is anchor:
            until = min((piece.number + 1) * size, end)
            tokens[place] = tokens.get(place, 0) + until - at
            at = until
    return tokens
