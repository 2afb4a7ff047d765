"""Client: a KVStore whose chunks a server has, on this host or on that of other workers of the
engine. KV bytes stay in the shared pool.

While a server is dead, slow or not there yet, calls are misses at once. The connection comes back
in the background, with another pool. When an answer does not come in time, the call is a miss, and
so are further calls, without waiting, until it comes. A server that owes an answer for ten seconds
is given up. So is a server that answers what was not asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.client.attachment import Attachment, FarPool, SharedPool
from kvtier.client.connect import ServerAccess, enter
from kvtier.client.heard import (
    Heard,
    check_claim,
    check_known,
    check_lookup,
    check_number,
    check_placed,
    check_slots,
)
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import KVTierError, StateError, TierError
from kvtier.core.lanes import Lane
from kvtier.core.lookup import (
    ANONYMOUS,
    NO_LOOKUP,
    Asker,
    Asking,
    Ended,
    LookupResult,
    Progress,
    Served,
)
from kvtier.core.report import SizeClassStatus
from kvtier.core.steps import Steps, in_pieces, pieces, whole
from kvtier.eviction.hints import LONGEST_KEEP_S, Hint, with_salt
from kvtier.load_policy.latency import Pace
from kvtier.protocol import wire
from kvtier.store.lease import LoadLease, SaveLease
from kvtier.tiers.breaker import Breaker

logger = logging.getLogger("kvtier.client")

_GIVE_UP_S = 10.0
_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_NURSE_S = 0.02
_MOST_TOKENS = 2**32 - 1
A = TypeVar("A", bound=wire.Message)


@dataclass(slots=True)
class _Held:
    attachment: Attachment
    number: int
    """Number of the lease at the server."""
    coming: int = 0
    """Chunks of a load that were coming at the last answer."""


class AtServer:
    """Methods of a KVStore that have no answer if the Store is a server's."""

    @property
    def paces(self) -> dict[str, Pace]:
        return {}

    def load_ready(
        self, keys: Sequence[ChunkKey], start: int = 0, *, asker: Asker = ANONYMOUS
    ) -> LoadLease | None:
        return None

    def load_unknown(
        self, keys: Sequence[ChunkKey], start: int = 0, *, asker: Asker = ANONYMOUS
    ) -> tuple[LookupResult, LoadLease] | None:
        return None

    def status(self) -> SizeClassStatus | None:
        return None


class Client(AtServer):
    """A :class:`~kvtier.api.KVStore` at a server. One lock is held for a round trip.

    A method in pieces sends its question in the first one, so that a thread can ask several servers
    at once (:mod:`kvtier.client.hosts`). That thread does all pieces: the lock is its own.

    Raises ConfigError when the server is there and refuses us. When it is not there, the engine
    starts without it. ``timeout_s``: longest time of an answer. ``lane``: for the background."""

    def __init__(
        self, access: ServerAccess, timeout_s: float = 0.1, lane: Lane | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        """``unanswered`` questions and ``lost`` connections since the start."""
        self._access = access
        self._timeout_s = timeout_s
        self._lane = lane or Lane("client", 1, urgent_bound=1, bound=4)
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._number = 0
        self._attachment: Attachment | None = None
        self._heard: Heard | None = None
        try:
            self._attachment = Attachment(enter(access))
        except TierError as error:
            logger.warning("%s; until it is there, the engine runs without", error)
            self._lane.submit(self._reconnect, urgent=True)
        except BaseException:
            self._lane.close(0.0)
            raise

    @property
    def pool(self) -> SharedPool | FarPool | None:
        attachment = self._attachment
        return attachment.pool if attachment is not None else None

    @property
    def most_held(self) -> int:
        attachment = self._attachment
        return attachment.most_held if attachment is not None else 0

    @property
    def server(self) -> bytes:
        """Name of the server's present start, empty without a connection."""
        attachment = self._attachment
        return attachment.server if attachment is not None else b""

    # ---- KVStore ---------------------------------------------------------------------------------

    @in_pieces
    def lookup(self, keys: Sequence[ChunkKey]) -> Steps[LookupResult]:
        with self._lock:
            answer = yield from self._about(keys, wire.LookupReply, wire.LookupCall, check_lookup)
            if answer is not None and self._attachment is not None:
                self._attachment.most_held = answer.most_held
        if answer is None:
            return NO_LOOKUP
        return LookupResult(
            answer.steps, Asking(*answer.asking) if answer.asking is not None else None, answer.why
        )

    @in_pieces
    def known(self, keys: Sequence[ChunkKey]) -> Steps[list[bool]]:
        with self._lock:
            answer = yield from self._about(keys, wire.Known, wire.KnownCall, check_known)
        found = [] if answer is None else [bool(each) for each in answer.each]
        return found + [False] * (len(keys) - len(found))

    def decline(self, keys: Sequence[ChunkKey], reason: wire.Reason) -> None:
        self._tell(wire.Decline(wire.joined(keys[: wire.MAX_KEYS]), reason))

    def served(self, served: Served) -> None:
        attachment = self._attachment
        if attachment is not None:
            hits = [served.hits.get(place, 0) for place in attachment.places]
            rest = wire.joined(served.rest[: wire.MAX_KEYS])
            message = wire.ServedCall(served.asked, hits, rest, served.chunk_tokens, served.end)
            self._tell(message, attachment)

    def ended(self, ended: Ended) -> None:
        tokens = min(ended.tokens, _MOST_TOKENS)
        self._tell(wire.EndedCall(ended.request, tokens, ended.stop))

    def hint(self, keys: Sequence[ChunkKey], hint: Hint, session: str = "") -> None:
        asked = wire.joined(keys[: wire.MAX_KEYS])
        keep_s = min(hint.keep_s, LONGEST_KEEP_S)
        self._tell(wire.HintCall(asked, hint.over, keep_s, with_salt(session, hint.salt)))

    @in_pieces
    def save(self, keys: Sequence[ChunkKey]) -> Steps[SaveLease]:
        with self._lock:
            answer = yield from self._about(keys, wire.Slots, wire.Save, check_slots)
            held = self._hold(answer)
            pool = self.pool
        if answer is None or held is None:
            return SaveLease(self, None if answer is None else pool, keys)
        held.attachment.pool.hear(answer.renewed)
        lease = SaveLease(self, held.attachment.pool, keys, held)
        lease.keys, lease.slots = [keys[place] for place in answer.places], answer.slots
        return lease

    @in_pieces
    def load(
        self,
        keys: Sequence[ChunkKey],
        start: int = 0,
        *,
        most: int | None = None,
        asker: Asker = ANONYMOUS,
    ) -> Steps[LoadLease]:
        asked, most = keys[: wire.MAX_KEYS], wire.MAX_KEYS if most is None else most
        claimed = asked[start:][:most]
        with self._lock:
            told, check = _told(asker), _claims(len(claimed))
            answer = yield from self._asking(
                wire.Claim, wire.LoadCall, wire.joined(asked), start, most, *told, check=check
            )
            held = self._hold(answer)
        if answer is None or held is None:
            return LoadLease(self, None, claimed)
        lease = LoadLease(self, held.attachment.pool, claimed, held)
        _learn(lease, held, answer)
        return lease

    def check(self, idle: bool = False) -> None:
        answer = whole(self._asking(wire.Done, wire.Check, idle, timeout_s=_GIVE_UP_S))
        if answer is None:
            raise StateError("the server gave no answer to check")
        if answer.trouble:
            raise StateError(answer.trouble)

    def watch(self) -> Heard:
        with self._lock:
            if self._heard is None:
                self._heard = Heard(self._hear, self._where)
                if self._attachment is not None:
                    with self._minding(self._attachment) as attachment:
                        self._heard.begin(attachment)
            return self._heard

    def _hear(self) -> None:
        """Read the changes that have come, and ask for the next ones."""
        with self._lock:
            attachment, heard = self._attachment, self._heard
            if attachment is None or heard is None or attachment.awaited is not None:
                return
            with self._minding(attachment):
                if heard.is_asked and attachment.take(0.0) is not None:
                    raise wire.WireError("an answer to no question")
                if heard.is_due:
                    heard.ask(attachment)
                heard.pass_on(attachment)

    def _where(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        answer = whole(self._about(keys, wire.Placed, wire.Where, check_placed))
        return answer.places if answer is not None else ()

    def close(self, timeout_s: float = 5.0) -> bool:
        self._ending.set()
        with self._lock:
            attachment, self._attachment = self._attachment, None
            if attachment is not None:
                attachment.close()
        return self._lane.close(timeout_s)

    def invalidate(self, keys: Sequence[ChunkKey]) -> None:
        for part in pieces(keys, wire.MAX_KEYS) if keys else ():
            self._tell(wire.Invalidate(wire.joined(part)))

    def invalidate_all(self) -> None:
        self._tell(wire.InvalidateAllCall())

    def wait(self, timeout_s: float) -> None:
        bound = min(timeout_s, self._timeout_s / 2)
        answer = whole(self._asking(wire.Done, wire.Wait, round(bound * 1000)))
        if answer is None:
            self._ending.wait(bound)

    def stats(self) -> dict[str, int]:
        answer = whole(self._asking(wire.Counted, wire.StatsCall))
        return {**(answer.values if answer is not None else {}), **self.counts}

    # ---- for leases ------------------------------------------------------------------------------

    def end_save(self, lease: SaveLease, *, commit: bool) -> Steps[None]:
        return self._end(lease.held, wire.Commit if commit else wire.End)

    def poll_load(self, lease: LoadLease) -> Steps[Progress]:
        """Return a load's progress. The server is asked only while chunks are coming."""
        held: _Held | None = lease.held
        if held is None:
            return Progress(0, 0)
        if held.coming:
            answer, check = None, _claims(len(lease.keys) - lease.ready)
            with self._lock:
                if held.attachment is self._attachment:
                    asked = held.number, lease.ready
                    answer = yield from self._asking(wire.Claim, wire.Poll, *asked, check=check)
            if answer is not None:
                _learn(lease, held, answer)
            elif held.attachment.lost:
                held.coming = 0
        return Progress(lease.ready, held.coming)

    def end_load(self, lease: LoadLease) -> Steps[None]:
        return self._end(lease.held, wire.End)

    def _hold(self, answer: wire.Slots | wire.Claim | None) -> _Held | None:
        """Note the lease that the server made, under the lock. None if it has no slots."""
        attachment = self._attachment
        if answer is None or attachment is None or not answer.lease:
            return None
        attachment.leases.add(answer.lease)
        return _Held(attachment, answer.lease)

    def _end(self, held: _Held | None, kind: type[wire.Commit | wire.End]) -> Steps[None]:
        """Send a lease's last message, after which its attachment may be closed."""
        yield from ()  # in one piece
        if held is not None:
            with self._lock:
                self._tell(kind(held.number), held.attachment)
                held.attachment.release(held.number)

    def _tell(self, message: wire.Message, attachment: Attachment | None = None) -> None:
        """Send a message that needs no answer over ``attachment``, or the present one."""
        with self._lock:
            attachment = attachment or self._attachment
            if attachment is None or attachment.lost:
                return
            with self._minding(attachment):
                attachment.put(message)
                if self._heard is not None:
                    self._heard.did()
                if not attachment.settled:
                    self._nurse_soon(attachment)

    # ---- questions -------------------------------------------------------------------------------

    def _about(
        self,
        keys: Sequence[ChunkKey],
        kind: type[A],
        question: Callable[..., wire.Message],
        check: Callable[[A, int, Attachment], None],
    ) -> Steps[A | None]:
        """Ask about these chunks by :meth:`_asking`. ``check`` is told how many there are."""
        asked = keys[: wire.MAX_KEYS]
        return self._asking(
            kind, question, wire.joined(asked), check=lambda one, at: check(one, len(asked), at)
        )

    def _asking(
        self,
        kind: type[A],
        question: Callable[..., wire.Message],
        *fields: Any,
        check: Callable[[A, Attachment], None] = lambda _, at: None,
        timeout_s: float = 0.0,
    ) -> Steps[A | None]:
        """Ask in pieces: the question has been sent after the first one. None if no answer came in
        time. ``check`` raises WireError for an answer that this question cannot have."""
        with self._lock:
            attachment = self._attachment
            if attachment is None:
                return None
            self._number = self._number % (2**32 - 1) + 1
            with self._minding(attachment):
                if attachment.awaited is None or self._caught_up(attachment):
                    asked = question(self._number, *fields)
                    attachment.put(asked)
                    until = time.monotonic() + (timeout_s or self._timeout_s)
                    yield 0.0
                    answer = attachment.take(until - time.monotonic())
                    if answer is not None:
                        check_number(answer, self._number)
                        if not isinstance(answer, kind):
                            raise wire.WireError(
                                f"{type(answer).__name__} for a {type(asked).__name__}"
                            )
                        check(answer, attachment)
                        return answer
                    attachment.awaited, attachment.overdue_since = asked, time.monotonic()
                    self._nurse_soon(attachment)
            self.counts["unanswered"] += 1
            return None

    def _caught_up(self, attachment: Attachment) -> bool:
        """Read the overdue answer; False if it has not come. Its lease is given back, unused."""
        answer = attachment.take(0.0)
        if answer is not None:
            check_number(answer, attachment.awaited.id)
            unwanted = isinstance(attachment.awaited, wire.Save | wire.LoadCall)
            if unwanted and isinstance(answer, wire.Slots | wire.Claim) and answer.lease:
                attachment.put(wire.End(answer.lease))
            attachment.awaited = None
            return True
        if time.monotonic() - attachment.overdue_since > _GIVE_UP_S:
            raise TierError(f"the server has owed an answer for {_GIVE_UP_S:.0f} s")
        return False

    # ---- in the background -----------------------------------------------------------------------

    @contextmanager
    def _minding(self, attachment: Attachment) -> Iterator[Attachment]:
        """Give up the attachment, under the lock, if talking to the server fails."""
        try:
            yield attachment
        except (OSError, KVTierError) as error:
            self._lose(attachment, error)

    def _lose(self, attachment: Attachment, error: Exception) -> None:
        """Give up the attachment, under the lock, and connect anew in the background."""
        attachment.lose()
        if attachment is self._attachment:
            self._attachment = None
            if self._heard is not None:
                self._heard.lose()
            self.counts["lost"] += 1
            logger.warning(
                "lost the server at %s: %s; misses until it is back", self._access.address, error
            )
            self._lane.submit(self._reconnect, urgent=True)

    def _reconnect(self) -> None:
        """Connect, on the lane, until it works. Each new kind of failure is logged once."""
        breaker, said = Breaker(time.monotonic, 1, _WAIT_S, _LONGEST_WAIT_S), ""
        while not self._ending.is_set() and self._attachment is None:
            if not breaker.allows():
                self._ending.wait(breaker.wait_s)
                continue
            try:
                attachment = Attachment(enter(self._access))
            except (KVTierError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s; trying again", said)
                breaker.fault()
                continue
            with self._lock:
                if self._ending.is_set():
                    attachment.close()
                    return
                self._attachment = attachment
                if self._heard is not None:
                    with self._minding(attachment):
                        self._heard.begin(attachment)
            logger.warning("attached to the server at %s", self._access.address)

    def _nurse_soon(self, attachment: Attachment) -> None:
        self._lane.submit(lambda: self._nurse(attachment))

    def _nurse(self, attachment: Attachment) -> None:
        """Take an overdue answer and send queued messages, on the lane, while the engine may be
        idle."""
        while not self._ending.wait(_NURSE_S):
            with self._lock:
                if attachment.lost or attachment.settled:
                    return
                with self._minding(attachment):
                    if attachment.awaited is None:
                        attachment.flush()
                    else:
                        self._caught_up(attachment)


def _told(asker: Asker) -> tuple[str, int, bool, int]:
    return asker.session[:64], min(asker.tokens, _MOST_TOKENS), asker.again, asker.request


def _claims(chunks: int) -> Callable[[wire.Claim, Attachment], None]:
    return lambda claim, at: check_claim(claim, chunks, at)


def _learn(lease: LoadLease, held: _Held, claim: wire.Claim) -> None:
    held.attachment.pool.hear(claim.renewed)
    places = held.attachment.places
    lease.slots += claim.slots
    lease.sources += [places[source] for source in claim.sources]
    held.coming = claim.coming
