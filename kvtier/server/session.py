"""Session: what an engine may do that has the server's pool mapped. A question goes in, an answer
comes out. There are no sockets here, and no loop.

A session owns the leases it asked for. The connection that drives it decides when it is safe to end
those that are left (:mod:`kvtier.server.connection`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.lookup import Asker, Ended, Served
from kvtier.core.steps import Steps, pieces
from kvtier.eviction.hints import Hint, without_salt
from kvtier.protocol import wire
from kvtier.protocol.kv_events import BlockStored
from kvtier.store.lease import LoadLease, SaveLease
from kvtier.store.observers.changes import Changes

if TYPE_CHECKING:
    from kvtier.server.registry import SizeClass

_MAX_LEASES = 16_384
"""Most leases of a session: several for every request an engine can have waiting."""
_SPLIT_KEYS = 1024
_TOLD_CHANGES = 4096
"""Most changes in one answer."""
_sessions = itertools.count(1)
Answered = Steps[wire.Answer | None]
L = TypeVar("L", SaveLease, LoadLease)


class Publication(Protocol):
    """Stream of a server's events, as sessions see it. For the server's loop."""

    def announcing(
        self, session: Session, key: ChunkKey, place: int, event: BlockStored
    ) -> Steps[None]:
        """Publish an engine's word that this chunk is in this place."""

    def gone(self, session: Session) -> None:
        """Note that a session has ended. Its announcements stay."""


class Session:
    """Session of one engine, over one Store that others use too. Not thread-safe.

    ``owner``: whose chunks the engine saves and may drop. ``client``: whose share of the slots it
    is part of, or "" for a share of its own. ``mapped``: whether some process of the engine maps
    the pool now, and can have filled what is to be committed. ``chunk_bytes``: how much of a slot
    its chunks take, or 0 for all."""

    def __init__(
        self,
        size_class: SizeClass,
        owner: int,
        announced: Publication | None = None,
        client: str = "",
        mapped: Callable[[], bool] = lambda: True,
        chunk_bytes: int = 0,
    ) -> None:
        self._mapped = mapped
        self._chunk_bytes = chunk_bytes or size_class.store.pool.slot_bytes
        self.store, self.owner, self.number = size_class.store, owner, next(_sessions)
        shares = size_class.shares
        self._share = shares.join_stream(client) if client else shares.join()
        self._pace = size_class.pace
        self._watch: Changes | None = None
        self._places = {name: place for place, name in enumerate(self.store.place_names)}
        self._announced = announced
        self._saves: dict[int, SaveLease] = {}
        self._loads: dict[int, LoadLease] = {}
        self._held: dict[int, int] = {}
        """Slots counted for each open lease, by the lease's number."""
        self._numbers = 0
        self._works: dict[type, Callable[[Any], Answered]] = {
            wire.LookupCall: self._lookup,
            wire.KnownCall: self._known,
            wire.Save: self._save,
            wire.LoadCall: self._load,
            wire.Poll: self._poll,
            wire.StatsCall: self._stats,
            wire.Check: self._check,
            wire.Commit: self._commit,
            wire.End: self._end,
            wire.Invalidate: self._invalidate,
            wire.InvalidateAllCall: self._invalidate_all,
            wire.Decline: self._decline,
            wire.HintCall: self._hint,
            wire.ServedCall: self._served,
            wire.EndedCall: self._ended,
            wire.Where: self._where,
            wire.Hear: self._hear,
            wire.Announce: self._announce,
        }

    @property
    def leases(self) -> int:
        return len(self._held)

    def begin(self, question: wire.Question) -> Answered:
        """Answer a question in pieces, each shorter than a millisecond, to be done to the end
        before the next question. Raises WireError for a question that no correct client asks."""
        return self._works[type(question)](question)

    def gone(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._announced is not None:
            self._announced.gone(self)

    def ending(self) -> Steps[None]:
        """End every lease. No process may still read or write a slot."""
        while self._held:
            yield from self._drop(next(iter(self._held))).closing()
            yield 0.0
        self._share.leave()

    # ---- questions -------------------------------------------------------------------------------

    def _lookup(self, question: wire.LookupCall) -> Answered:
        keys = yield from _split(question.keys)
        result = yield from self.store.lookup.steps(keys, self.owner)
        most = self._share.held + self._share.left
        return wire.LookupReply(question.id, list(result.steps), result.asking, result.why, most)

    def _known(self, question: wire.KnownCall) -> Answered:
        keys = yield from _split(question.keys)
        known = yield from self.store.known.steps(keys)
        return wire.Known(question.id, bytes(known))

    def _save(self, question: wire.Save) -> Answered:
        keys = yield from _split(question.keys)
        places = {key: index for index, key in enumerate(keys)}
        if len(places) < len(keys):
            raise wire.WireError("a run to save names a chunk twice")
        most = self._left()
        if not most:
            return wire.Slots(question.id, 0, [], [])
        with self._taken(most):
            lease = yield from self.store.save.steps(keys, self.owner, most)
        if self._watch is not None:
            self._watch.name(lease.keys)
        number = yield from self._keep(self._saves, lease, len(lease.slots))
        yield from lease.clear_behind(self._chunk_bytes)
        found = [places[key] for key in lease.keys]
        return wire.Slots(question.id, number, found, lease.slots, self._renewed(lease.slots))

    def _load(self, question: wire.LoadCall) -> Answered:
        keys = yield from _split(question.keys)
        most = self._left()
        if not most:
            return wire.Claim(question.id, 0, 0, [], b"")
        with self._taken(most):
            lease = yield from self.store.load.steps(
                keys,
                question.start,
                self.owner,
                min(most, question.most),
                Asker(
                    owners_session(self.owner, question.session),
                    question.tokens,
                    question.again,
                    question.request and self._request(question.request),
                    self.owner,
                ),
            )
        ready, coming = lease.poll()
        slots = len(lease.keys) if lease.asking else ready + coming
        number = yield from self._keep(self._loads, lease, slots)
        return self._claim(question.id, number, lease, 0, coming)

    def _poll(self, question: wire.Poll) -> Answered:
        yield from ()  # in one piece
        lease = self._opened(self._loads, question.lease)
        ready, coming = lease.poll()
        if question.known > ready:
            raise wire.WireError(f"poll of lease {question.lease} beyond what is ready")
        if not lease.asking:
            self._book(question.lease, ready + coming)
        return self._claim(question.id, question.lease, lease, question.known, coming)

    def _stats(self, question: wire.StatsCall) -> Answered:
        yield from ()  # in one piece
        return wire.Counted(question.id, self.store.stats())

    def _check(self, question: wire.Check) -> Answered:
        trouble = yield from self.store.checking(question.idle)
        return wire.Done(question.id, trouble[:4000])

    def _commit(self, message: wire.Commit) -> Answered:
        lease = self._opened(self._saves, message.lease)
        self._drop(message.lease)
        yield from lease.committing() if self._mapped() else lease.closing()
        return None

    def _end(self, message: wire.End) -> Answered:
        fills = message.lease in self._saves
        lease = self._drop(message.lease)
        yield from lease.closing()
        if fills and self._watch is not None:
            self._watch.unname(lease.keys)
        return None

    def _invalidate(self, message: wire.Invalidate) -> Answered:
        keys = yield from _split(message.keys)
        yield from self.store.invalidate.steps(keys, self.owner)
        return None

    def _decline(self, message: wire.Decline) -> Answered:
        keys = yield from _split(message.keys)
        self.store.decline(keys, message.reason)
        return None

    def _hint(self, message: wire.HintCall) -> Answered:
        keys = yield from _split(message.keys)
        session, salt = without_salt(message.session)
        hint = Hint(message.over, message.keep_s, salt)
        self.store.hint(keys, hint, owners_session(self.owner, session))
        return None

    def _served(self, message: wire.ServedCall) -> Answered:
        if len(message.hits) > len(self._places) or sum(message.hits) > message.asked:
            raise wire.WireError("more hits than were asked for, or from places that are not there")
        rest = yield from _split(message.keys)
        hits = dict(zip(self._places, message.hits, strict=False))
        self.store.served(Served(message.asked, hits, rest, message.chunk_tokens, message.end))
        return None

    def _ended(self, message: wire.EndedCall) -> Answered:
        yield from ()  # in one piece
        self.store.ended(Ended(self._request(message.request), message.tokens, message.stop))
        return None

    def _request(self, number: int) -> int:
        """Make a request's number unique among those of all engines."""
        return self.number << 32 | number

    def _invalidate_all(self, message: wire.InvalidateAllCall) -> Answered:
        keys = yield from self._pace.looking(self.store.every_key)
        yield from self.store.invalidate.steps(keys, self.owner)
        return None

    # ---- changes ---------------------------------------------------------------------------------

    def _hear(self, message: wire.Hear) -> Answered:
        yield from ()  # in one piece
        if self._watch is None:
            self._watch = self.store.watch(named_only=True)
        changes = self._watch.changes(_TOLD_CHANGES)
        if changes is None:
            return wire.Changed(b"", b"", self._watch.has_changes, lost=True)
        keys = wire.joined([change.key for change in changes])
        what = bytes(2 * change.place + change.there for change in changes)
        return wire.Changed(keys, what, self._watch.has_changes)

    def _where(self, question: wire.Where) -> Answered:
        keys = yield from _split(question.keys)
        if self._watch is None:
            raise wire.WireError("Where before the first Hear")
        bits: list[int] = []
        for part in pieces(keys):
            found = self._watch.find(part)
            bits += found
            if len(found) < len(part):
                break
            yield 0.0
        return wire.Placed(question.id, bits)

    def _announce(self, message: wire.Announce) -> Answered:
        if self._announced is None:
            raise wire.WireError("Announce to a server that publishes nothing")
        event, blocks = message.event, len(message.event.block_hashes)
        if not 0 < blocks * event.block_size == len(event.token_ids):
            raise wire.WireError(f"{len(event.token_ids)} tokens of {blocks} blocks")
        if event.extra_keys is not None and len(event.extra_keys) != blocks:
            raise wire.WireError("extra keys of other blocks")
        if message.place >= len(self._places):
            raise wire.WireError(f"a chunk in place {message.place} of {len(self._places)}")
        yield from self._announced.announcing(self, ChunkKey(message.key), message.place, event)
        return None

    # ---- leases ----------------------------------------------------------------------------------

    def _left(self) -> int:
        return self._share.left if len(self._held) < _MAX_LEASES else 0

    @contextmanager
    def _taken(self, count: int) -> Iterator[None]:
        """Count slots as held while a lease is made: others are served in between."""
        self._share.held += count
        try:
            yield
        finally:
            self._share.held -= count

    def _keep(self, leases: dict[int, L], lease: L, slots: int) -> Steps[int]:
        """Keep a lease and return its number. A lease without slots ends here, as number 0."""
        if not slots:
            yield from lease.closing()
            return 0
        self._numbers = self._numbers % (2**32 - 1) + 1
        leases[self._numbers] = lease
        self._book(self._numbers, slots)
        return self._numbers

    def _book(self, number: int, slots: int) -> None:
        before = self._held.get(number, 0)
        self._held[number] = slots
        self._share.held += slots - before

    def _opened(self, leases: dict[int, L], number: int) -> L:
        """Return an open lease. Raises WireError for a number that is not one of ``leases``."""
        if number not in leases:
            why = "of the other kind" if number in self._held else "not open"
            raise wire.WireError(f"lease {number} is {why}")
        return leases[number]

    def _drop(self, number: int) -> SaveLease | LoadLease:
        """Remove a lease, which the caller ends. Raises WireError when it is not open."""
        if number not in self._held:
            raise wire.WireError(f"lease {number} is not open")
        self._book(number, 0)
        del self._held[number]
        return self._saves.pop(number, None) or self._loads.pop(number)

    def _claim(
        self, id_: int, number: int, lease: LoadLease, known: int, coming: int
    ) -> wire.Claim:
        sources = bytes(self._places[source] for source in lease.sources[known:])
        slots = lease.slots[known:]
        return wire.Claim(id_, number, coming, slots, sources, self._renewed(slots))

    def _renewed(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Return these slots' renewals: engines may have locked pages that the slots had before."""
        renewals = self.store.sharing.renewals
        return [(slot, renewals[slot]) for slot in slots if slot in renewals] if renewals else []


def _split(blob: bytes) -> Steps[list[ChunkKey]]:
    if len(blob) <= _SPLIT_KEYS * KEY_BYTES:
        return wire.split(blob)
    keys: list[ChunkKey] = []
    for part in pieces(blob, _SPLIT_KEYS * KEY_BYTES):
        keys += wire.split(bytes(part))
        yield 0.0
    return keys


def owners_session(owner: int, session: str) -> str:
    """Name a session so that two owners' sessions of one name differ."""
    return f"{owner} {session}" if session else ""
