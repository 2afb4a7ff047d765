"""What of a Redis is whose, and what a tier does about it from time to time.

The names of chunks begin with their fingerprint: other weights, another vLLM or chunk size have
other names, which nobody looks for any more. Under ``noeviction`` Redis deletes none of them. So
every tier signs its fingerprint once a minute. When Redis is full, fingerprints of which nothing
was signed, written or read in a day give their room back: all of their chunks. No
fingerprint in use is touched, and nothing while there is room. Redis's own clock of idle seconds
decides, and no host's.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.terminal import size_text
from kvtier.extensions.redis.errors import FAULTS
from kvtier.extensions.redis.layout import Form
from kvtier.extensions.redis.servers import RedisServers
from kvtier.extensions.redis.wire import Wire

_LOG = logging.getLogger(__name__)
UNUSED_S = 86_400
"""A fingerprint that was not used for so long gives its room back when it is needed."""
_SIGNED_MS = 2 * UNUSED_S * 1000
_SIGN_S, _AWAY_S = 60.0, 5.0
_LOOK_AGAIN_S = 300.0
_LOOKED_S = 60.0
_SCAN_COUNT = 1000
_MOST_SCANNED = 2_000_000
_MOST_FINGERPRINTS = 1000
_MOST_TOLD = 3
_ORPHAN_S = 60
_AT_ONCE = 512
_CLOSE_S = 1.0


@dataclass(slots=True)
class Fingerprint:
    """Another fingerprint's chunks, as far as they were seen. ``idle_s``: since the last use of
    any."""

    chunks: int = 0
    idle_s: float = math.inf


class Census:
    """Chunks in Redis, ours and those of other fingerprints. ``whole``: nothing was left out."""

    def __init__(self, form: Form, chunk_bytes: int) -> None:
        self.stamps: dict[ChunkKey, int] = {}
        """Our chunks, with minus the seconds since they were last used."""
        self.others: dict[bytes, Fingerprint] = {}
        """By the beginning of their names."""
        self.whole = True
        self._form, self._chunk_bytes = form, chunk_bytes
        self._everyones = re.compile(re.escape(form.prefix) + rb":[0-9]{1,3}:[0-9a-f]{2,64}:")
        self._headless: set[ChunkKey] = set()

    def look(self, wire: Wire, within_s: float, clock: Callable[[], float]) -> bool:
        """Look at one node, and take away parts of ours that have had no header for a minute: their
        writer died. False when there was no time for all."""
        until, seen = clock() + within_s, 0
        for names in wire.scan(self._form.everyones, _SCAN_COUNT):
            for name, idle in zip(names, _idle(wire, names), strict=True):
                self._add(name, idle)
            seen += len(names)
            if clock() > until or seen > _MOST_SCANNED:
                self.whole = False
                break
        if self.whole:
            self._take_orphans(wire)
        return self.whole

    def _add(self, name: bytes, idle: int | None) -> None:
        if (parsed := self._form.parse(name)) is not None:
            key, is_header = parsed
            if is_header:
                self.stamps[key] = -(idle or 0)
            elif idle is not None and idle > _ORPHAN_S:
                self._headless.add(key)
            return
        base, _, rest = name.partition(b"{")
        if not self._everyones.fullmatch(base) or self._form.is_own(base):
            return
        if base not in self.others and len(self.others) == _MOST_FINGERPRINTS:
            self.whole = False
            return
        one = self.others.setdefault(base, Fingerprint())
        one.idle_s = min(one.idle_s, idle or 0)
        if rest.endswith(b"}") and name != base + Form.SIGN:
            one.chunks += 1

    def _take_orphans(self, wire: Wire) -> None:
        orphans, self._headless = list(self._headless - self.stamps.keys()), set()
        for start in range(0, len(orphans), _AT_ONCE):
            wire.renew()
            keys = orphans[start : start + _AT_ONCE]
            wire.ask(("UNLINK", *self._form.names(key, self._chunk_bytes)) for key in keys)

    @property
    def unused(self) -> list[bytes]:
        """Fingerprints that nobody has used for a day, the longest unused first. None, where not
        all was seen: what was not may be in use."""
        old = [base for base, one in self.others.items() if self.whole and one.idle_s >= UNUSED_S]
        return sorted(old, key=lambda base: -self.others[base].idle_s)

    def words(self) -> str:
        """Whose chunks lie in Redis beside ours. Empty: nobody's."""
        held = {base: one for base, one in self.others.items() if one.chunks}
        most = sorted(held, key=lambda base: -held[base].chunks)[:_MOST_TOLD]
        told = ", ".join(
            f"{base.decode()} {held[base].chunks:,}, last used {_ago(held[base].idle_s)} ago"
            for base in most
        )
        if not held:
            return ""
        every = sum(one.chunks for one in held.values())
        return (
            f"{'' if self.whole else 'at least '}{every:,} chunks are of {len(held)} other "
            f"fingerprints (weights, vLLM or chunk size): {told}"
        )


GIVEN_BACK = (
    "A fingerprint that nobody has used for a day is deleted when Redis is full. To delete one "
    "now: redis-cli --scan --pattern 'FINGERPRINT*' | xargs -n 500 redis-cli unlink"
)


class Upkeep:
    """The rounds of one tier, on a thread of its own: until Redis has said how much room there is,
    every five seconds; then once a minute, and when Redis is full.

    Args:
        servers: where Redis is.
        form: our names.
        chunk_bytes: the largest chunk.
        settle: learn how much room there is. False while Redis does not say.
        clock: monotonic seconds.
        signs: whether chunks are there for longer than a day.
    """

    def __init__(
        self,
        servers: RedisServers,
        form: Form,
        chunk_bytes: int,
        settle: Callable[[], bool],
        clock: Callable[[], float],
        *,
        signs: bool,
    ) -> None:
        self._servers, self._form, self._chunk_bytes = servers, form, chunk_bytes
        self._settle, self._clock = settle, clock
        self.trouble = ""
        """Whose chunks keep ours from being written. Empty: nobody's."""
        self._wake, self._closed = threading.Event(), False
        self._full, self._look_at, self._signs = False, clock(), signs
        self._settled = self._sign()
        self._lane = Lane("redis-upkeep", 1, urgent_bound=0, bound=1)
        self._lane.submit(self._rounds)

    def full(self) -> None:
        """Redis has refused a write because it is full."""
        self._full = True
        if self._clock() >= self._look_at:
            self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._lane.close(_CLOSE_S)

    def told(self, census: Census, free: int, share: int) -> None:
        """Say what was seen at the start. ``free``: bytes that are free for us, with those that we
        have. ``share``: bytes that are to be ours."""
        words, short = census.words(), free < share
        if words or short:
            _LOG.log(
                logging.WARNING if short else logging.INFO,
                "Redis tier %s: %s. %s",
                self._servers.label,
                "; ".join(
                    [f"only {size_text(max(0, free))} of our {size_text(share)} are free"] * short
                    + [words] * bool(words)
                ),
                GIVEN_BACK,
            )

    def round(self) -> None:
        """One round. A fault costs the round."""
        self._settled = self._settle() and self._sign()
        if self._full and self._settled and self._clock() >= self._look_at:
            with suppress(*FAULTS):
                self._make_room()

    def _rounds(self) -> None:
        while not self._closed:
            self._wake.wait(_SIGN_S if self._settled else _AWAY_S)
            self._wake.clear()
            if not self._closed:
                self.round()

    def _sign(self) -> bool:
        """This fingerprint is in use. Not a number: Redis keeps small numbers of all names as one
        object, with one time of last use."""
        if not self._signs:
            return True
        name = self._form.sign
        with suppress(*FAULTS), self._servers.wire(name) as wire:
            wire.ask([("SET", name, b"alive", "PX", _SIGNED_MS)])
            return True
        return False

    def _make_room(self) -> None:
        self._full = False
        self._look_at = self._clock() + _LOOK_AGAIN_S
        census = Census(self._form, self._chunk_bytes)
        for wire in self._wires():
            census.look(wire, _LOOKED_S, self._clock)
        for base in census.unused:
            gone = sum(_give_back(wire, base, self._clock) for wire in self._wires())
            _LOG.warning(
                "Redis tier %s: it was full; %d names of fingerprint %s, which nobody had used for "
                "a day, are deleted",
                self._servers.label,
                gone,
                base.decode(),
            )
            if gone:  # the next one only when it is full again
                self._look_at, self.trouble = self._clock(), ""
                return
        words = census.words()
        if words and not self.trouble:
            _LOG.warning("Redis tier %s is full: %s. %s", self._servers.label, words, GIVEN_BACK)
        self.trouble = (
            "redis is full, and other fingerprints have chunks there (the log names them)"
            if words
            else ""
        )

    def _wires(self) -> Iterator[Wire]:
        with closing(self._servers.wires(2 * _LOOKED_S)) as wires:
            yield from wires


def _give_back(wire: Wire, base: bytes, clock: Callable[[], float]) -> int:
    """Delete what begins with ``base`` on one node. It ends early where somebody uses it again."""
    gone, until = 0, clock() + _LOOKED_S
    for names in wire.scan(base + b"*", _SCAN_COUNT):
        idle = _idle(wire, names, gone=UNUSED_S)
        if any(one is None or one < UNUSED_S for one in idle) or clock() > until:
            break
        gone += sum(reply == 1 for reply in wire.ask(("UNLINK", name) for name in names))
    return gone


def _idle(wire: Wire, names: list[bytes], gone: int | None = None) -> list[int | None]:
    """Seconds since each name was used. None: it does not say. ``gone``: of one that is not there
    any more."""
    replies = wire.ask(("OBJECT", "IDLETIME", name) for name in names)
    return [
        reply if isinstance(reply, int) else gone if _is_gone(reply) else None for reply in replies
    ]


def _is_gone(reply: object) -> bool:
    return reply is None or "no such key" in str(reply)


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
