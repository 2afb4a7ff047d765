"""What the scheduler's half keeps of each live request, and of each job that workers have not all confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.chunk import ChunkKey, KeyChain
from kvtier.lease import LoadLease, SaveLease
from kvtier.shared_leases import SharedLoad, SharedSave


@dataclass(slots=True)
class Prompt:
    """One live request."""

    request: Any
    chain: KeyChain | None
    """None: this request is not cached."""
    extras: tuple[bytes, ...] = ()
    """Of its first chunk, see :data:`kvtier.reasons.EXTRAS`."""
    shape: tuple[int, int] = (0, 0)
    """Tokens and media of the prompt that the keys are made of."""
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    """Chunks that were offered to the store, from the first on."""
    retried: bool = False
    """A failed save was offered again."""
    lease: LoadLease | SharedLoad | None = None
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


@dataclass(slots=True)
class Pending:
    """A job that workers have not all confirmed."""

    lease: LoadLease | SaveLease | SharedLoad | SharedSave
    request_id: str
    keys: Sequence[ChunkKey]
    done: int = 0
    failed: int = 0
