"""What the scheduler's half remembers of each live request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.api import LoadLease
from kvtier.connectors.vllm.groups import Geometry, Piece, Run
from kvtier.connectors.vllm.hint_words import Said
from kvtier.connectors.vllm.scheduler_side.requests import (
    Adapters,
    first_extras,
    media_extra,
    request_extra,
)
from kvtier.core.chunk import ChunkLayout, KeyChain


@dataclass(slots=True)
class Prompt:
    """One live request."""

    request: Any
    chain: KeyChain | None
    """Makes the keys of its chunks. None: this request is not cached."""
    number: int = 0
    """Its own among the engine's requests."""
    said: Said = field(default_factory=Said)
    """What it has said of its future."""
    extras: tuple[bytes, ...] = ()
    """What its first chunk's key is made of beside tokens, see
    :data:`kvtier.store.reports.miss_reasons.EXTRAS`."""
    shape: tuple[int, int] | None = None
    """How many tokens and media the prompt had when the keys were made. None: they are not made
    yet."""
    left_alone: bool = False
    """It gets no keys any more, so it is neither loaded nor saved."""
    began: bool = False
    """A step has computed for it."""
    states: list[tuple[int, int, int]] = field(default_factory=list)
    """``(group, block, tokens)`` of recurrent states that have blocks of their own and are not
    saved yet."""
    saved: int = 0
    """How many leading chunks were offered to the store with all their pieces."""
    retried: bool = False
    """Its saves failed once, and were offered again."""
    load_failed: bool = False
    """A load of it failed, so it is promised nothing any more."""
    lease: LoadLease | None = None
    """What is claimed for it."""
    run: Run | None = None
    """The run that the lease is a claim on."""
    missing: set[int] = field(default_factory=set)
    """Ends of whole runs that turned out to be incomplete."""
    ready_only: bool = False
    """Its deadline has passed, so it takes only what is in RAM."""
    asked: bool = False
    """The store was asked for a run of it."""
    seen: tuple[int, int, bool, int, bool] | None = None
    """What the store said when no whole run was worth loading."""
    looked: bool = False
    """The store was asked since the request got blocks."""
    first: bool = True
    """vLLM asked for it before all others at the last lookup."""
    known: int = 0
    """How many pieces of that run the store knew of at the last lookup."""
    taken: int = 0
    """How many of these pieces are to be loaded."""
    why: str = ""
    """Why the store knew of no more pieces at the last lookup."""
    declined: dict[str, int] = field(default_factory=dict)
    """How many pieces of the run could be had and are not taken, by reason."""
    until: float = 0.0
    """When it stops waiting for what is coming, in seconds of the load policy's clock."""
    begin: int = 0
    """How many tokens vLLM had by itself at the last lookup."""
    sources: dict[str, int] = field(default_factory=dict)
    """How many tokens of the last load came from each place."""
    is_hidden: bool = False
    """No other request finds vLLM's blocks of it."""
    blended: bool = False
    """Its blocks have KV from another place: nothing of it is saved any more."""
    notes: dict[object, Any] = field(default_factory=dict)
    """What extensions remember of it, each under itself."""

    def name(self, layout: ChunkLayout, adapters: Adapters) -> bool:
        """Make the chain of keys, if there is none for what the request is now.

        A request changes when its streaming session goes on: vLLM takes back the token that it
        sampled last, and adds tokens and media. Returns whether a chain was made.
        """
        request = self.request
        shape = request.num_prompt_tokens, len(request.mm_features or ())
        if self.left_alone or shape == self.shape:
            return False
        extra = request_extra(request, adapters)
        media = media_extra(request, layout.chunk_tokens)
        self.chain = None if extra is None else layout.chain(extra, media)
        self.extras = first_extras(request, adapters, media)
        self.shape, self.saved = shape, 0
        return True

    def leave_alone(self) -> None:
        """Load and save nothing of it from now on."""
        self.chain, self.left_alone = None, True

    def hide(self) -> None:
        """No other request can find vLLM's blocks of it from now on."""
        self.is_hidden = True

    def blend(self, sources: dict[str, int]) -> None:
        """It has loaded tokens of other prompts: nothing of it is saved from now on."""
        self.blended, self.sources = True, sources

    def fail_load(self) -> None:
        """A load of it failed: it is promised nothing from now on."""
        self.load_failed = True

    def drop(self) -> None:
        """Let go of what was claimed."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None


def by_place(
    geometry: Geometry, sources: Mapping[Piece, str], begin: int, end: int
) -> dict[str, int]:
    """How many of the tokens ``begin`` to ``end`` came from each place, for the first of the
    anchors.

    Tokens before a window are not needed. They count for the first piece that is needed.
    ``sources`` has the place of each loaded piece.
    """
    tokens = Counter[str]()
    size, at = geometry.piece_tokens, begin
    for piece in sorted(one for one in sources if one.group is geometry.anchors[0]):
        until = min((piece.number + 1) * size, end)
        tokens[sources[piece]] += until - at
        at = until
    return tokens
