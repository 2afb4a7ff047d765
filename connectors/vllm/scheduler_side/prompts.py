"""What the scheduler's half remembers of each live request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.connectors.vllm.groups import Geometry, Piece
from kvtier.connectors.vllm.hint_words import Said
from kvtier.connectors.vllm.scheduler_side.claim import RequestClaim
from kvtier.connectors.vllm.scheduler_side.progress import RequestProgress
from kvtier.connectors.vllm.scheduler_side.requests import RequestNames
from kvtier.core.chunk import ChunkLayout, KeyChain


@dataclass(slots=True)
class Prompt:
    """One live request: what it is. What waits for it is its claim."""

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
    lasts: bool = True
    """Another start of the engine would name its chunks alike."""
    left_alone: bool = False
    """It gets no keys any more, so it is neither loaded nor saved."""
    is_hidden: bool = False
    """No other request finds vLLM's blocks of it."""
    claim: RequestClaim = field(default_factory=RequestClaim)
    progress: RequestProgress = field(default_factory=RequestProgress)
    notes: dict[object, Any] = field(default_factory=dict)
    """What extensions remember of it, each under itself."""

    def name(self, layout: ChunkLayout, names: RequestNames) -> bool:
        """Make the chain of keys, if there is none for what the request is now.

        A request changes when its streaming session goes on: vLLM takes back the token that it
        sampled last, and adds tokens and media. Returns whether a chain was made.
        """
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
        self.progress.renamed()
        return True

    @property
    def waits_for_names(self) -> bool:
        """Whether the files that name it are still being read."""
        return self.shape is None and not self.left_alone

    @property
    def branches(self) -> tuple[int, ...]:
        """Where it branches off from other prompts, in tokens: as vLLM sees it, and as the store
        does."""
        return getattr(self.request, "shared_prefix_boundary", 0), self.claim.branch

    def leave_alone(self) -> None:
        """Load and save nothing of it from now on."""
        self.chain, self.left_alone = None, True

    def hide(self) -> None:
        """No other request can find vLLM's blocks of it from now on."""
        self.is_hidden = True


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
