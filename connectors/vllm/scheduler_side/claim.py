"""What a waiting request has claimed of the store. :mod:`.claims` decides it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.api import LoadLease
from kvtier.connectors.vllm.groups import Run
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Progress
from kvtier.core.places import RAM
from kvtier.core.steps import Steps


@dataclass(slots=True)
class TriedEnds:
    """What was learnt of whole runs that begin where vLLM's own blocks end."""

    missing: set[int] = field(default_factory=set)
    """Ends of runs that turned out to be incomplete."""
    ready_only: bool = False
    """The deadline has passed, so only what is in RAM is taken."""
    seen: tuple[int, int, bool, int, bool] | None = None
    """What the store said when no whole run was worth loading."""


@dataclass(slots=True)
class RequestClaim:
    """What waits for one request."""

    lease: LoadLease | None = None
    """What is claimed for it."""
    run: Run | None = None
    """The run that the lease is a claim on."""
    begin: int = 0
    """How many tokens vLLM had by itself at the last lookup."""
    asked: bool = False
    """The store was asked for a run of it."""
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
    branch: int = 0
    """How many tokens of it the store's anchors had at the last lookup, where no hit ended there.
    The next prompt that shares them shall find an end."""
    declined: dict[str, int] = field(default_factory=dict)
    """How many pieces of the run could be had and are not taken, by reason."""
    in_blocks: int = 0
    """How many slots it has while a load whose blocks it has goes on."""
    until: float = 0.0
    """When it stops waiting for what is coming, in seconds of the load policy's clock."""
    arrived: int = 0
    """How many pieces of the lease had arrived at the last look."""
    stalls: float = 0.0
    """When the next one must have arrived."""
    brought: dict[ChunkKey, str] = field(default_factory=dict)
    """Pieces that leases which were let go had brought for it, and from which tier."""
    tried: TriedEnds = field(default_factory=TriedEnds)

    @property
    def held(self) -> int:
        """How many slots are claimed for it."""
        return self.in_blocks + (len(self.lease.keys) if self.lease is not None else 0)

    def take(self) -> tuple[LoadLease | None, bool]:
        """The request gets blocks: its lease goes over to the caller. Also returns whether the
        store was asked since the last blocks."""
        found = self.lease, self.looked
        self.lease, self.looked = None, False
        return found

    def drop(self) -> None:
        """Let go of what was claimed."""
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
        """From where each ready piece of a lease came for this request."""
        return [
            self.brought.get(key, place) if place == RAM else place
            for key, place in zip(lease.keys, lease.sources, strict=False)
        ]


def divided(lease: LoadLease, pieces: int, size: int) -> list[LoadLease]:
    """Leases of ``size`` chunks each, in place of one of so many that nobody uses any more. Its
    slots are let go with the last of them."""
    begins = range(0, pieces, size)
    keeper, keys = _Divided(lease, len(begins)), lease.keys[:pieces]
    return [LoadLease(keeper, lease.pool, keys[at : at + size], at) for at in begins]


class _Divided:
    """Keeps the parts of a lease. What is ``held`` of each is the place of its first chunk."""

    def __init__(self, whole: LoadLease, parts: int) -> None:
        self._whole = whole
        self._open = parts
        """How many have not ended."""

    def poll_load(self, part: LoadLease) -> Steps[Progress]:
        """See :class:`kvtier.store.lease.Keeper`."""
        begin, end = part.held, part.held + len(part.keys)
        ready, coming = self._whole.ready, 0
        if ready < end:
            ready, coming = yield from self._whole.polling()
        part.slots, part.sources = self._whole.slots[begin:end], self._whole.sources[begin:end]
        return Progress(part.ready, max(0, min(ready + coming, end) - max(ready, begin)))

    def end_load(self, part: LoadLease) -> Steps[None]:
        """See :class:`kvtier.store.lease.Keeper`."""
        self._open -= 1
        if not self._open:
            yield from self._whole.closing()

    def end_save(self, lease: object, *, commit: bool) -> Steps[None]:
        """No save is divided."""
        raise NotImplementedError
