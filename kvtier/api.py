"""KVStore: the one interface of the cache, and the types that go through it. A connector knows
nothing else of the cache.

Three classes are a KVStore. :class:`kvtier.store.store.Store` lies in the engine's own process.
:class:`kvtier.client.client.Client` speaks to a server on the same host, which has the Store.
:class:`kvtier.client.hosts.Hosts` is one for an engine over several hosts, each with a server.
:func:`kvtier.assemble.assemble` makes the one that is configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import (
    ANONYMOUS,
    NO_LOOKUP,
    Asker,
    Asking,
    Change,
    Ended,
    LookupResult,
    Progress,
    Served,
)
from kvtier.core.pool import Pool
from kvtier.core.report import SizeClassStatus
from kvtier.eviction.hints import Hint
from kvtier.load_policy.latency import Pace
from kvtier.protocol.wire import Reason
from kvtier.store.lease import LoadLease, SaveLease

__all__ = [
    "ANONYMOUS",
    "NO_LOOKUP",
    "Asker",
    "Asking",
    "Ended",
    "Hint",
    "KVStore",
    "LoadLease",
    "LookupResult",
    "Progress",
    "Reason",
    "SaveLease",
]


class Watched(Protocol):
    """Changes of a KVStore's chunks. For one thread."""

    @property
    def place_names(self) -> list[str]:
        """Names of the places: RAM, then the lower tiers, fastest first. A change has the index."""

    @property
    def has_changes(self) -> bool: ...

    def changes(self) -> list[Change] | None:
        """Take the chunks that came and left since the last call, in order. A chunk that comes to
        RAM comes again to every tier that holds it. None if some changes were lost."""

    def places(self, keys: Sequence[ChunkKey]) -> list[list[int]]:
        """Return, for each chunk, the places that it can be served from now. Without effect."""

    def announce(self, key: ChunkKey, place: int, event: Mapping[str, Any]) -> None:
        """Tell the server that the engine announced a chunk in a place, with these fields of vLLM's
        ``BlockStored``, so that it may publish them too."""


class KVStore(Protocol):
    """Chunks of KV by key, in a pool of slots that the engine's workers map.

    *Units.* Sizes and counts are in chunks, and times are in seconds. A run is a sequence of keys,
    first chunk first, in which each key stands for all tokens up to its chunk's end.

    *Threads.* Every method may be called by any thread. No method waits for a tier. A Store answers
    from memory, within microseconds. A Client answers after one round trip, or after its time limit
    (``server_timeout_ms``). Only :meth:`wait`, :meth:`check` and :meth:`close` may take longer.

    *Errors.* No method raises because a tier or a server is slow, full, damaged or gone. A chunk
    that cannot be read is a miss, and a chunk that cannot be kept is forgotten. Only :meth:`check`
    raises. When a server is lost, a Client gets another pool with the next connection. Leases of
    the old pool cannot be committed any more. Their ready chunks can still be read.
    """

    @property
    def counts(self) -> Counter[str]:
        """Events since the start: a Store's chunks, see :meth:`stats`. A Client's ``unanswered``
        questions and ``lost`` connections."""

    @property
    def pool(self) -> Pool | None:
        """Pool of the slots; None while there is no connection to the server."""

    @property
    def most_held(self) -> int:
        """Most slots that this engine's leases may have together. A Client knows what its server
        said at the last :meth:`lookup`, because other engines have slots of the same pool."""

    @property
    def paces(self) -> Mapping[str, Pace]:
        """Pace of each of this process's own tiers, by name. Empty if a server has the tiers."""

    # ---- what a scheduler asks -------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupResult:
        """Return how much of this run :meth:`load` would get, and when.

        Without effect. Nothing is known when a server does not answer.
        """

    def known(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return for each chunk whether it is in RAM, or in a lower tier that need not be asked.

        Without effect. None is known when a server does not answer.
        """
        ...

    def save(self, keys: Sequence[ChunkKey]) -> SaveLease:
        """Reserve slots for the chunks of a run that are not in RAM.

        ``keys`` is the whole run so far. The lease names the chunks that got a slot. They are fewer
        where there is no room. The owner of the lease fills the slots, then commits it.
        """

    def load(
        self,
        keys: Sequence[ChunkKey],
        start: int = 0,
        *,
        most: int | None = None,
        asker: Asker = ANONYMOUS,
    ) -> LoadLease:
        """Pin the chunks of ``keys[start:]`` up to the first missing one, and fetch them into RAM.

        The lease pins each chunk from now on, or from its arrival, until the lease is closed. Poll
        it, copy what is ready, and close it.

        Args:
            keys: a prompt's run, from its first chunk on.
            start: how many leading chunks the engine has by itself.
            most: how many chunks are claimed at most, or None for all.
            asker: what is known of the request.
        """

    def load_ready(
        self, keys: Sequence[ChunkKey], start: int = 0, *, asker: Asker = ANONYMOUS
    ) -> LoadLease | None:
        """Do :meth:`load` for ``keys[start:]`` if all of it is in RAM now, in one walk over the run
        instead of a :meth:`lookup` and a :meth:`load`. All of it is ready before the first poll.

        Returns None, without any effect, if a chunk is not in RAM, or the answer would take too
        long: for a run of more than 2,048 chunks, and for every run if a server knows.
        """
        ...

    def load_unknown(
        self, keys: Sequence[ChunkKey], start: int = 0, *, asker: Asker = ANONYMOUS
    ) -> tuple[LookupResult, LoadLease] | None:
        """Do :meth:`lookup` and :meth:`load` of ``keys[start:]`` in one, if none of it is known.

        Returns None, without any effect, if a chunk is known, or a shared tier may know more, or
        the answer would take too long, see :meth:`load_ready`.
        """
        ...

    def decline(self, keys: Sequence[ChunkKey], reason: Reason) -> None:
        """Note that the engine computes available chunks instead of loading them.

        They are counted under ``reason``. Now and then one of these chunks is read in the
        background, so that a tier that has become fast is noticed.
        """

    def served(self, served: Served) -> None:
        """Count a prompt that got its blocks, in tokens: those that it asked for, those from each
        place, and those that it would have got if nothing had ever left for want of room."""

    def ended(self, ended: Ended) -> None:
        """Record the end of a request that gave its number, if prompts are recorded."""

    def hint(self, keys: Sequence[ChunkKey], hint: Hint, session: str = "") -> None:
        """Pass on what the client knows of a run's future.

        An empty run stands for the last prompt of ``session``. The hint takes effect in the
        background, after the prompts that came before it. It may be dropped.
        """

    # ---- removing --------------------------------------------------------------------------------

    def invalidate(self, keys: Sequence[ChunkKey]) -> None:
        """Drop these chunks from RAM and all tiers: they are bad, or must not be served any more.

        A Client drops only chunks of its own namespace, and chunks without an owner only where no
        other server writes.
        """

    def invalidate_all(self) -> None:
        """Drop every chunk from RAM and all tiers, except chunks that are just being filled.

        A Client drops only chunks of its own namespace, and chunks without an owner only where no
        other server writes.
        """

    # ---- the rest --------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Wait until a chunk has arrived in RAM since the last wait, at most ``timeout_s``.

        Only one thread may wait. A Client may return earlier.
        """

    def check(self, idle: bool = False) -> None:
        """Compare the whole index with its rules. For tests and for doctor.

        ``idle``: nothing is in progress, so no slot may be pinned or filling, and no tier may have
        queued or running work. Raises StateError when a rule is broken, or when a server gives no
        answer within ten seconds.
        """

    def stats(self) -> dict[str, int]:
        """Count chunks by place and state now, and events since the start, by name.

        A Client returns the whole server's, and its own :attr:`counts`.
        """

    def status(self) -> SizeClassStatus | None:
        """Return :meth:`stats` as typed data, with times, for metrics. A Client returns None: the
        server has metrics of its own."""

    def watch(self) -> Watched:
        """Note every change in the places from now on. A server reports only chunks that this
        client names after this call."""

    def close(self, timeout_s: float = 5.0) -> bool:
        """Finish queued writes for up to ``timeout_s``, then let go of tiers, pool and server.

        Returns False when something was dropped or hangs. The second call has no effect. The leases
        of a Client that are open end when no process of the engine has the pool mapped any more.
        """
