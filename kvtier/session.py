"""Session: what one engine that has the pool mapped may do: a question in, an answer out. No sockets, no loop.

A session owns the leases it asked for; :meth:`Session.end` ends what is left of them. Whoever drives it decides when
that is safe (:mod:`kvtier.server`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier import wire
from kvtier.errors import StateError
from kvtier.lease import LoadLease, SaveLease
from kvtier.store import Store

_MAX_LEASES = 16_384
"""Open leases of one session: several for every request an engine can have waiting."""
_MAX_SHARE = 0.75
"""Part of the pool's slots that one session's leases may hold before it gets no more."""


class Session:
    """One engine's, over one Store shared with others. ``owner``: whose chunks these are. Not thread-safe."""

    def __init__(self, store: Store, owner: int) -> None:
        self._store = store
        self._owner = owner
        self._leases: dict[int, tuple[SaveLease | LoadLease, int]] = {}
        self._slots = 0
        self._numbers = 0
        self._most_slots = max(1, int(store.pool.slots * _MAX_SHARE))
        self._answers: dict[type, Callable[[Any], wire.Answer | None]] = {
            wire.Match: self._match,
            wire.Save: self._save,
            wire.Load: self._load,
            wire.Poll: self._poll,
            wire.Stats: self._stats,
            wire.Check: self._check,
            wire.Commit: self._commit,
            wire.End: self._end,
            wire.Forget: self._forget,
            wire.Clear: self._clear,
            wire.Decline: self._decline,
        }

    @property
    def leases(self) -> int:
        """How many leases are open."""
        return len(self._leases)

    def answer(self, question: wire.Question) -> wire.Answer | None:
        """Do what is asked; microseconds, memory only. Raises WireError for what no correct client asks."""
        return self._answers[type(question)](question)

    def end(self) -> None:
        """Nobody reads or writes the slots any more: end every lease."""
        for lease, _ in self._leases.values():
            lease.close()
        self._leases.clear()
        self._slots = 0

    # ---- questions -----------------------------------------------------------------------------------------------

    def _match(self, question: wire.Match) -> wire.Answer:
        outlook = self._store.forecast(wire.split(question.keys))
        return wire.Extent(question.id, list(outlook.steps), outlook.asking, outlook.why)

    def _save(self, question: wire.Save) -> wire.Answer:
        keys = wire.split(question.keys)
        places = {key: index for index, key in enumerate(keys)}
        if len(places) < len(keys):
            raise wire.WireError("a run to save names a chunk twice")
        if self._is_full():
            return wire.Slots(question.id, 0, [], [])
        lease = self._store.save(keys, self._owner)
        number = self._keep(lease, len(lease.entries))
        return wire.Slots(question.id, number, [places[key] for key in lease.keys], lease.slots)

    def _load(self, question: wire.Load) -> wire.Answer:
        keys = wire.split(question.keys)
        if self._is_full():
            return wire.Claim(question.id, 0, 0, [], b"")
        lease = self._store.load(keys, question.start, self._owner, question.most)
        ready, coming = lease.poll()
        return self._claim(question.id, self._keep(lease, ready + coming), lease, 0, coming)

    def _poll(self, question: wire.Poll) -> wire.Answer:
        lease = self._leased(question.lease)
        if not isinstance(lease, LoadLease):
            raise wire.WireError(f"poll of lease {question.lease}, which is a save")
        ready, coming = lease.poll()
        if question.known > ready:
            raise wire.WireError(f"poll of lease {question.lease} beyond what is ready")
        return self._claim(question.id, question.lease, lease, question.known, coming)

    def _stats(self, question: wire.Stats) -> wire.Answer:
        return wire.Counted(question.id, self._store.stats())

    def _check(self, question: wire.Check) -> wire.Answer:
        try:
            self._store.check(question.idle)
        except StateError as error:
            return wire.Done(question.id, str(error)[:4000])
        return wire.Done(question.id)

    def _commit(self, message: wire.Commit) -> None:
        lease = self._leased(message.lease)
        if not isinstance(lease, SaveLease):
            raise wire.WireError(f"commit of lease {message.lease}, which is a load")
        self._drop(message.lease)
        lease.commit()

    def _end(self, message: wire.End) -> None:
        lease = self._leased(message.lease)
        self._drop(message.lease)
        lease.close()

    def _forget(self, message: wire.Forget) -> None:
        self._store.forget(wire.split(message.keys), self._owner)

    def _decline(self, message: wire.Decline) -> None:
        self._store.decline(wire.split(message.keys), message.reason)

    def _clear(self, message: wire.Clear) -> None:
        self._store.clear(self._owner)

    # ---- leases --------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return len(self._leases) >= _MAX_LEASES or self._slots >= self._most_slots

    def _keep(self, lease: SaveLease | LoadLease, slots: int) -> int:
        """The lease's number; 0 for one that is empty, which ends here."""
        if not slots:
            lease.close()
            return 0
        self._numbers = self._numbers % (2**32 - 1) + 1
        self._leases[self._numbers] = lease, slots
        self._slots += slots
        return self._numbers

    def _leased(self, number: int) -> SaveLease | LoadLease:
        if number not in self._leases:
            raise wire.WireError(f"lease {number} is not open")
        return self._leases[number][0]

    def _drop(self, number: int) -> None:
        _, slots = self._leases.pop(number)
        self._slots -= slots

    @staticmethod
    def _claim(id_: int, number: int, lease: LoadLease, known: int, coming: int) -> wire.Claim:
        origins = lease.origins[known : lease.ready]
        sources = bytes(0 if origin is None else origin + 1 for origin in origins)
        return wire.Claim(id_, number, coming, lease.slots[known:], sources)


def places(store: Store) -> list[str]:
    """What ``Claim.sources`` refer to."""
    return ["ram", *(tier.name for tier in store.tiers)]


def capacity(store: Store) -> int:
    """Chunks that RAM and all tiers hold together."""
    return store.pool.slots + sum(tier.capacity for tier in store.tiers)
