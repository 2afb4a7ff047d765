"""What the scheduler's half keeps of each live request, and of each job that workers have not all confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.client.leases import SharedLoad, SharedSave
from kvtier.connectors.vllm.requests import Adapters, first_extras, media_extra, request_extra
from kvtier.core.chunk import ChunkKey, ChunkLayout, KeyChain
from kvtier.store.lease import LoadLease, SaveLease


@dataclass(slots=True)
class Prompt:
    """One live request."""

    request: Any
    chain: KeyChain | None
    """None: this request is not cached."""
    extras: tuple[bytes, ...] = ()
    """Of its first chunk, see :data:`kvtier.store.miss_reasons.EXTRAS`."""
    shape: tuple[int, int] | None = None
    """Tokens and media of the prompt that the keys are made of; None: they are not made yet."""
    left_alone: bool = False
    """It gets no keys any more."""
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    """Chunks that were offered to the store, from the first on."""
    retried: bool = False
    """A failed save was offered again."""
    load_failed: bool = False
    """It is promised nothing any more."""
    lease: LoadLease | SharedLoad | None = None
    first: bool = True
    """vLLM asked for it before all others at the last look."""
    start: int = -1
    """First chunk of the run that was decided on."""
    known: int = 0
    """Chunks of that run that the store knew of at the last look."""
    taken: int = 0
    """Of them, those that were claimed."""
    why: str = ""
    """Why the run ends where it does, as of the last look."""
    declined: dict[str, int] = field(default_factory=dict)
    """Chunks of the run that could be had and are not taken."""
    until: float = 0.0
    """When no chunk is waited for any more."""
    begin: int = 0
    """Tokens vLLM had by itself at the last look."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of the last load, by place."""

    def name(self, layout: ChunkLayout, adapters: Adapters) -> bool:
        """Make the keys' chain where there is none yet, or where the request is no longer what it was made of: a
        streaming session goes on, vLLM has taken back the token it sampled last, and added tokens and media. Returns
        whether it did."""
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


def by_place(sources: Sequence[str], layout: ChunkLayout, first: int, count: int) -> dict[str, int]:
    """Tokens by place, for ``count`` blocks from block ``first`` of the first chunk on. ``sources``: each chunk's."""
    tokens: dict[str, int] = {}
    per_chunk, block = layout.blocks_per_chunk, layout.block_tokens
    for index, place in enumerate(sources):
        begin, end = index * per_chunk, (index + 1) * per_chunk
        inside = min(end, first + count) - max(begin, first)
        tokens[place] = tokens.get(place, 0) + inside * block
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
