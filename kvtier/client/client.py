"""Client: the Store of a server on this host, with the same surface. KV bytes stay in the shared pool.

Made for a scheduling loop: every call is bounded. A server that is dead, slow or not there yet means misses, at once;
the connection comes back by itself in the background, with another pool. Calls that need no answer (commit, close,
forget, clear) are sent and not waited for; all others take one round trip.

When an answer does not come in time, the call is a miss and the connection stays: until that answer comes, further
calls are misses too, without waiting. A server that owes an answer for ten seconds is given up, and so is one that
answers what was not asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvtier.client.attachment import Link, SharedPool
from kvtier.client.connect import Door, enter
from kvtier.client.leases import SharedLoad, SharedSave
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import KVTierError, StateError, TierError
from kvtier.core.lanes import Executor, Lane
from kvtier.load_policy.outlook import NOTHING, Asking, Outlook
from kvtier.protocol import wire
from kvtier.protocol.answers import check_claim, check_extent, check_number, check_slots
from kvtier.store.hints import LONGEST_KEEP_S, Hint
from kvtier.store.lease import Match

logger = logging.getLogger("kvtier.client")

_GIVE_UP_S = 10.0
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
_NURSE_S = 0.02
A = TypeVar("A", bound=wire.Message)


class Client:
    """Attached through ``door``. Safe to call from any thread; one lock, held for a round trip.

    Raises ConfigError when the server is there and refuses; when it is not there, engines start without it.
    """

    def __init__(self, door: Door, timeout_s: float = 0.1, lane: Executor | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """``unanswered`` calls and ``lost`` connections since the start."""
        self._door = door
        self._timeout_s = timeout_s
        self._lane = lane or Lane("client", 1, urgent_bound=1, bound=4)
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._number = 0
        self._link: Link | None = None
        try:
            self._link = Link(enter(door))
        except TierError as error:
            logger.warning("%s; until it is there, the engine runs without", error)
            self._lane.submit(self._reconnect, urgent=True)
        except BaseException:
            self._lane.close(0.0)
            raise

    @property
    def pool(self) -> SharedPool | None:
        """The server's pool; another one after a reconnection, None while there is no connection."""
        link = self._link
        return link.pool if link is not None else None

    # ---- the Store's verbs ---------------------------------------------------------------------------------------

    def match(self, keys: Sequence[ChunkKey]) -> Match:
        """See Store.match."""
        outlook = self.forecast(keys)
        return Match(outlook.ready, outlook.known - outlook.ready)

    def forecast(self, keys: Sequence[ChunkKey]) -> Outlook:
        """See Store.forecast."""
        asked = keys[: wire.MAX_KEYS]
        check = partial(check_extent, chunks=len(asked))
        with self._lock:
            answer = self._ask(wire.Extent, wire.Match, wire.joined(asked), check=check)
        if answer is None:
            return NOTHING
        return Outlook(answer.steps, Asking(*answer.asking) if answer.asking is not None else None, answer.why)

    def decline(self, keys: Sequence[ChunkKey], reason: wire.Reason) -> None:
        """See Store.decline."""
        self.tell(self._link, wire.Decline(wire.joined(keys[: wire.MAX_KEYS]), reason))

    def hint(self, keys: Sequence[ChunkKey], hint: Hint, session: str = "") -> None:
        """See Store.hint; sessions are this namespace's own."""
        asked = wire.joined(keys[: wire.MAX_KEYS])
        self.tell(self._link, wire.Hint(asked, hint.over, min(hint.keep_s, LONGEST_KEEP_S), session[:64]))

    def save(self, keys: Sequence[ChunkKey]) -> SharedSave:
        """See Store.save."""
        asked = keys[: wire.MAX_KEYS]
        with self._lock:
            check = partial(check_slots, chunks=len(asked), pool_slots=self._pool_slots)
            answer = self._ask(wire.Slots, wire.Save, wire.joined(asked), check=check)
            return SharedSave(self, self._link, keys, answer)

    def load(
        self, keys: Sequence[ChunkKey], start: int = 0, *, most: int = wire.MAX_KEYS, session: str = ""
    ) -> SharedLoad:
        """See Store.load."""
        asked = keys[: wire.MAX_KEYS]
        with self._lock:
            check = self._claims(max(0, len(asked) - start))
            answer = self._ask(wire.Claim, wire.Load, wire.joined(asked), start, most, session[:64], check=check)
            return SharedLoad(self, self._link, keys[start:], answer)

    def check(self, idle: bool = False) -> None:
        """See Store.check; of the whole server, which has ten seconds for it."""
        with self._lock:
            answer = self._ask(wire.Done, wire.Check, idle, timeout_s=_GIVE_UP_S)
        if answer is None:
            raise StateError("the server gave no answer to check")
        if answer.trouble:
            raise StateError(answer.trouble)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Leave the server. Leases that are open end when every process of this engine has let go of the pool."""
        self._ending.set()
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                link.close()
        return self._lane.close(timeout_s)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """See Store.forget; only what is this namespace's, or nobody's."""
        every = list(keys)
        for first in range(0, len(every), wire.MAX_KEYS):
            self.tell(self._link, wire.Forget(wire.joined(every[first : first + wire.MAX_KEYS])))

    def clear(self) -> None:
        """See Store.clear; only what is this namespace's, or nobody's."""
        self.tell(self._link, wire.Clear())

    def wait(self, timeout_s: float) -> None:
        """See Store.wait."""
        bound = min(timeout_s, self._timeout_s / 2)
        with self._lock:
            answer = self._ask(wire.Done, wire.Wait, round(bound * 1000))
        if answer is None:
            self._ending.wait(bound)

    def stats(self) -> dict[str, int]:
        """See Store.stats; of the whole server, and this client's own counts."""
        with self._lock:
            answer = self._ask(wire.Counted, wire.Stats)
        return {**(answer.values if answer is not None else {}), **self.counts}

    # ---- for leases ----------------------------------------------------------------------------------------------

    def tell(self, link: Link | None, message: wire.Message) -> None:
        """Send what needs no answer, if that connection is still there."""
        with self._lock:
            if link is None or link.lost:
                return
            try:
                link.put(message)
            except (OSError, KVTierError) as error:
                self._lose(link, error)
                return
            if not link.settled:
                self._nurse_soon(link)

    def poll(self, link: Link, lease: int, known: int, chunks: int) -> wire.Claim | None:
        """What became ready of a load lease of ``chunks``, beyond the ``known`` ones; None when that cannot be asked
        now, or ever again if the link is lost."""
        with self._lock:
            if link.lost or link is not self._link:
                return None
            return self._ask(wire.Claim, wire.Poll, lease, known, check=self._claims(chunks - known))

    def end(self, link: Link, lease: int, message: wire.Message) -> None:
        """The last message of a lease, after which its link may go."""
        with self._lock:
            self.tell(link, message)
            link.release(lease)

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def _pool_slots(self) -> int:
        return self._link.pool.slots if self._link is not None else 0

    def _claims(self, chunks: int) -> Callable[[wire.Claim], None]:
        """Under the lock: what a Claim is compared with."""
        places = len(self._link.places) if self._link is not None else 0
        return partial(check_claim, chunks=chunks, pool_slots=self._pool_slots, places=places)

    def _ask(
        self,
        kind: type[A],
        question: Callable[..., wire.Message],
        *fields: Any,
        check: Callable[[A], None] | None = None,
        timeout_s: float = 0.0,
    ) -> A | None:
        """Under the lock: the answer, or None when there is none in time. ``check`` raises WireError for an answer that
        this question cannot have."""
        link = self._link
        if link is None:
            return None
        self._number = self._number % (2**32 - 1) + 1
        try:
            if link.awaited is None or self._caught_up(link):
                asked = question(self._number, *fields)
                link.put(asked)
                answer = self._answer(link, asked, timeout_s or self._timeout_s)
                if isinstance(answer, kind):
                    if check is not None:
                        check(answer)
                    return answer
                if answer is not None:
                    raise wire.WireError(f"{type(answer).__name__} for a {type(question).__name__}")
        except (OSError, KVTierError) as error:
            self._lose(link, error)
        self.counts["unanswered"] += 1
        return None

    def _answer(self, link: Link, asked: Any, timeout_s: float) -> wire.Answer | None:
        answer = link.take(timeout_s)
        if answer is None:
            link.awaited, link.overdue_since = asked, time.monotonic()
            self._nurse_soon(link)
        else:
            check_number(answer, asked.id)
        return answer

    def _caught_up(self, link: Link) -> bool:
        """Under the lock: the overdue answer has come. Its lease, if it is one, goes back: nobody waits for it."""
        answer = link.take(0.0)
        if answer is not None:
            check_number(answer, link.awaited.id)
            if isinstance(link.awaited, wire.Save | wire.Load) and isinstance(answer, wire.Slots | wire.Claim):
                self._give_back(link, answer.lease)
            link.awaited = None
            return True
        if time.monotonic() - link.overdue_since > _GIVE_UP_S:
            raise TierError(f"the server has owed an answer for {_GIVE_UP_S:.0f} s")
        return False

    @staticmethod
    def _give_back(link: Link, lease: int) -> None:
        """A lease that nobody waits for any more."""
        if lease:
            link.put(wire.End(lease))

    # ---- in the background ---------------------------------------------------------------------------------------

    def _lose(self, link: Link, error: Exception) -> None:
        """Under the lock."""
        link.lose()
        if link is self._link:
            self._link = None
            self.counts["lost"] += 1
            logger.warning("lost the server at %s: %s; misses until it is back", self._door.address, error)
            self._lane.submit(self._reconnect, urgent=True)

    def _reconnect(self) -> None:
        """On the lane, until it works. One line in the log when it does, and one for each new kind of failure."""
        backoff, said = _BACKOFF_S, ""
        while not self._ending.is_set() and self._link is None:
            try:
                link = Link(enter(self._door))
            except (KVTierError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s; trying again", said)
                self._ending.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_S)
                continue
            with self._lock:
                if self._ending.is_set():
                    link.close()
                    return
                self._link = link
            logger.warning("attached to the server at %s", self._door.address)

    def _nurse_soon(self, link: Link) -> None:
        self._lane.submit(lambda: self._nurse(link))

    def _nurse(self, link: Link) -> None:
        """On the lane: see that an overdue answer is taken and messages are sent although the engine may be idle."""
        while not self._ending.wait(_NURSE_S):
            with self._lock:
                if link.lost or link.settled:
                    return
                try:
                    if link.awaited is None:
                        link.flush()
                    else:
                        self._caught_up(link)
                except (OSError, KVTierError) as error:
                    self._lose(link, error)
                    return
