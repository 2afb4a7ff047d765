"""What the scheduler's half keeps of each live request, and of each job that workers have not all
confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.client.leases import SharedLoad, SharedSave
from kvtier.connectors.vllm.asked import Asked
from kvtier.connectors.vllm.groups import Geometry, Piece, Run
from kvtier.connectors.vllm.hint_words import Said
from kvtier.connectors.vllm.requests import Adapters, first_extras, media_extra, request_extra
from kvtier.core.chunk import ChunkKey, ChunkLayout, KeyChain
from kvtier.store.lease import LoadLease, SaveLease


@dataclass(slots=True)
class Prompt:
    """One live request."""

    request: Any
    chain: KeyChain | None
    """None: this request is not cached."""
    said: Said = field(default_factory=Said)
    """Of its future."""
    extras: tuple[bytes, ...] = ()
    """Of its first chunk, see :data:`kvtier.store.miss_reasons.EXTRAS`."""
    shape: tuple[int, int] | None = None
    """Tokens and media of the prompt that the keys are made of; None: they are not made yet."""
    left_alone: bool = False
    """It gets no keys any more."""
    began: bool = False
    """A step has computed for it."""
    states: list[tuple[int, int, int]] = field(default_factory=list)
    """``(group, block, tokens)`` of recurrent states that lie in blocks of their own and are not
    saved yet."""
    saved: int = 0
    """Chunks of which everything was offered to the store, from the first on."""
    retried: bool = False
    """A failed save was offered again."""
    load_failed: bool = False
    """It is promised nothing any more."""
    lease: LoadLease | SharedLoad | None = None
    lease_begin: int = -1
    """:attr:`begin` when the lease was taken."""
    run: Run | None = None
    """What the lease is of."""
    missing: set[int] = field(default_factory=set)
    """Ends of whole runs that turned out not to be there."""
    ready_only: bool = False
    """Its deadline has passed: nothing is waited for any more."""
    seen: tuple[int, int, bool, int, bool] | None = None
    """What the store said of whole runs when none was worth it."""
    looked: bool = False
    """The store was asked for it since it got blocks."""
    first: bool = True
    """vLLM asked for it before all others at the last look."""
    known: int = 0
    """Pieces of that run that the store knew of at the last look."""
    taken: int = 0
    """Of them, those that are to be had."""
    why: str = ""
    """Why the run ends where it does, as of the last look."""
    declined: dict[str, int] = field(default_factory=dict)
    """Pieces of the run that could be had and are not taken."""
    until: float = 0.0
    """When nothing is waited for any more."""
    begin: int = 0
    """Tokens vLLM had by itself at the last look."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of the last load, by place."""
    spans: Asked | None = None
    """It asks for documents from other prompts."""
    blended: bool = False
    """Its blocks have KV from another place: nothing of it is saved any more."""

    def name(self, layout: ChunkLayout, adapters: Adapters) -> bool:
        """Make the keys' chain where there is none yet, or where the request is no longer what it
        was made of: a streaming session goes on, vLLM has taken back the token it sampled last, and
        added tokens and media. Returns whether it did."""
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
        """Nothing is served and nothing is kept of it from now on."""
        self.chain, self.left_alone = None, True

    def drop(self) -> None:
        """Let go of what was claimed."""
        if self.spans is not None:
            self.spans.drop()
        if self.lease is not None:
            self.lease.close()
            self.lease = None


def by_place(
    geometry: Geometry, sources: Mapping[Piece, str], begin: int, end: int
) -> dict[str, int]:
    """Tokens ``begin`` to ``end`` by the place that the first of the anchors had them from; what it
    does not need (before a window) counts to the first piece that it does. ``sources``: each loaded
    piece's."""
    tokens: dict[str, int] = {}
    size, at = geometry.piece_tokens, begin
    for piece in sorted(one for one in sources if one.group is geometry.anchors[0]):
        until = min((piece.number + 1) * size, end)
        tokens[sources[piece]] = tokens.get(sources[piece], 0) + until - at
        at = until
    return tokens


@dataclass(slots=True)
class Pending:
    """A job that workers have not all confirmed."""

    lease: LoadLease | SaveLease | SharedLoad | SharedSave
    request_id: str
    keys: Sequence[ChunkKey]
    tokens: int = 0
    """Of a load."""
    done: int = 0
    failed: int = 0
