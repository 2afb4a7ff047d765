"""Heard: what a server has told of its chunks, for an engine that tells routers.

What the engine announces is passed on to a server that publishes, as fast as the server reads it.
What does not fit into a queue meanwhile is not published.

Every answer is compared with its question before the engine uses it, because a slot or a place that
does not exist would be an error in its scheduler, or another chunk's bytes. The checks raise
:class:`~kvtier.protocol.wire.WireError`, and the connection cannot be used after that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier.client.attachment import Attachment
from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.lookup import Change
from kvtier.protocol import wire
from kvtier.protocol.kv_events import BlockStored


def check_number(answer: wire.Numbered, asked: int) -> None:
    """Check that an answer is to the one open question."""
    if answer.id != asked:
        raise wire.WireError(f"an answer to question {answer.id}, expected one to {asked}")


def check_lookup(answer: wire.LookupReply, chunks: int, _: Attachment) -> None:
    counts = [count for count, _ in answer.steps]
    if counts != sorted(counts) or counts[-1] > chunks:
        raise wire.WireError(f"runs of {counts} chunks, expected rising numbers up to {chunks}")


def check_known(answer: wire.Known, chunks: int, _: Attachment) -> None:
    if len(answer.each) != chunks or answer.each.strip(b"\0\1"):
        raise wire.WireError(f"{answer.each[:8].hex()}.. of {chunks} chunks, expected 0 or 1 each")


def check_slots(slots: wire.Slots, chunks: int, at: Attachment) -> None:
    if len(slots.places) != len(slots.slots):
        raise wire.WireError(f"{len(slots.slots)} slots for {len(slots.places)} chunks")
    if max(slots.places, default=0) >= max(chunks, 1) or len(set(slots.places)) < len(slots.places):
        raise wire.WireError(f"slots for other chunks than the {chunks} to be saved")
    _check_in_pool(slots, at.pool.slots)
    if len(set(slots.slots)) < len(slots.slots):
        raise wire.WireError("one slot for two chunks to be saved")


def check_claim(claim: wire.Claim, chunks: int, at: Attachment) -> None:
    """Check a claim. ``chunks``: those of the lease that the engine has not been told of."""
    places = len(at.places)  # that the Welcome named
    if len(claim.sources) != len(claim.slots):
        raise wire.WireError(f"{len(claim.sources)} sources of {len(claim.slots)} chunks")
    if len(claim.slots) + claim.coming > chunks:
        raise wire.WireError(f"{len(claim.slots)} chunks and {claim.coming} to come, of {chunks}")
    if max(claim.sources, default=0) >= max(places, 1):
        raise wire.WireError(f"a chunk from place {max(claim.sources)} of {places}")
    _check_in_pool(claim, at.pool.slots)


def check_placed(placed: wire.Placed, chunks: int, at: Attachment) -> None:
    places = len(at.places)
    if len(placed.places) > chunks:
        raise wire.WireError(f"places of {len(placed.places)} chunks, asked for {chunks}")
    if max(placed.places, default=0) >> places:
        raise wire.WireError(f"a chunk in places {max(placed.places):b} of {places}")


def check_changed(changed: wire.Changed, places: int) -> None:
    if len(changed.keys) != KEY_BYTES * len(changed.what):
        raise wire.WireError(f"{len(changed.what)} changes of {len(changed.keys)} bytes of keys")
    if max(changed.what, default=0) >= 2 * max(places, 1):
        raise wire.WireError(f"a change of place {max(changed.what) // 2} of {places}")


def _check_in_pool(answer: wire.Slots | wire.Claim, pool_slots: int) -> None:
    last = max((*answer.slots, *(slot for slot, _ in answer.renewed)), default=0)
    if last >= pool_slots:
        raise wire.WireError(f"slot {last} of a pool of {pool_slots}")


_EVERY_S = 0.02
_PATIENCE_S = 1.0
"""Longest time that an engine without work keeps stepping for an answer."""
_ANNOUNCED_CHUNKS, _SENT_CHUNKS = 8192, 32


class Heard:
    """A server's changes, as a :class:`kvtier.api.Watched`. Its owner's lock guards some fields.

    ``hear`` reads the changes that have come, and asks again when :meth:`is_due`. ``where`` asks
    for the places of the leading chunks that are held."""

    def __init__(
        self, hear: Callable[[], None], where: Callable[[Sequence[ChunkKey]], Sequence[int]]
    ) -> None:
        self._hear, self._where = hear, where
        self.place_names: list[str] = []
        self._waiting: list[Change] = []
        self._announced: deque[tuple[ChunkKey, int, Mapping[str, Any]]] = deque()
        self._publishes = False
        self._lost = True
        self.is_asked = self._owed = self._due = False
        """Whether a Hear has no answer yet; whether it was sent after something that the engine
        did; whether the engine has done something since."""
        self._asked_at = self._done_at = 0.0

    # ---- Watched ---------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether :meth:`changes` has some, or the answer to what the engine did last is due."""
        self._hear()
        owed = self._due or self._owed or bool(self._announced)
        patient = owed and time.monotonic() - self._done_at < _PATIENCE_S
        return self._lost or bool(self._waiting) or patient

    def changes(self) -> list[Change] | None:
        self._hear()
        if self._lost:
            self._lost = False
            return None
        taken, self._waiting = self._waiting, []
        return taken

    def places(self, keys: Sequence[ChunkKey]) -> list[list[int]]:
        bits = [] if self._lost or not keys else self._where(keys)
        found = [[place for place in range(one.bit_length()) if one >> place & 1] for one in bits]
        return found + [[] for _ in range(len(keys) - len(found))]

    def announce(self, key: ChunkKey, place: int, event: Mapping[str, Any]) -> None:
        if self._publishes and len(self._announced) < _ANNOUNCED_CHUNKS:
            self._announced.append((key, place, event))
            self._done_at = time.monotonic()

    # ---- for the client, under its lock ----------------------------------------------------------

    def begin(self, attachment: Attachment) -> None:
        """Send a connection's first message. Changes of chunks named after it are told."""
        self.lose()
        self.place_names = attachment.places
        self._publishes = attachment.publishes
        attachment.told = self._told
        self.ask(attachment)

    def lose(self) -> None:
        self._waiting, self._lost = [], True
        self.is_asked = self._owed = self._due = False
        self._announced.clear()

    def did(self) -> None:
        """Note that the engine has told the server something that may change what is held."""
        self._due, self._done_at = True, time.monotonic()

    @property
    def is_due(self) -> bool:
        return not self.is_asked and (self._due or time.monotonic() - self._asked_at >= _EVERY_S)

    def ask(self, attachment: Attachment) -> None:
        """Ask for changes. Raises OSError or TierError when the server is gone."""
        attachment.put(wire.Hear())
        self.is_asked, self._owed, self._due = True, self._due, False
        self._asked_at = time.monotonic()

    def pass_on(self, attachment: Attachment) -> None:
        """Send announcements that the socket takes at once. Raises as :meth:`ask` does."""
        attachment.flush()
        for _ in range(_SENT_CHUNKS):
            if not self._announced or not attachment.is_sent:
                return
            key, place, event = self._announced.popleft()
            try:
                frame = wire.frame(wire.Announce(key, place, BlockStored(**event)))
            except (TypeError, ValueError, OverflowError):
                continue  # a client may name its session, salt or adapter as it likes
            if len(frame) <= wire.MAX_FRAME_BYTES:
                attachment.put_frame(frame)

    def _told(self, changed: wire.Changed) -> None:
        check_changed(changed, len(self.place_names))
        if not self.is_asked:
            raise wire.WireError("changes that were not asked for")
        self.is_asked = self._owed = False
        if changed.lost:
            self._waiting, self._lost = [], True
        keys = wire.split(changed.keys)
        self._waiting += (
            Change(what >> 1, key, bool(what & 1))
            for key, what in zip(keys, changed.what, strict=True)
        )
        if changed.more:
            self.did()
