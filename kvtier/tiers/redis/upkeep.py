"""Upkeep: owners of the chunks in a Redis, and room for a write in a full one.

The names of chunks begin with their fingerprint: other weights, another vLLM or chunk size have
other names, which nobody looks for any more. Under ``noeviction`` Redis deletes none of them. So
every tier signs its fingerprint: it is a member of a set that goes with its last member, or five
minutes after that died. A write that finds Redis full takes the room of chunks whose fingerprint
has no such set, the least recently used first, and only as many as it needs."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.terminal import size_text
from kvtier.tiers.redis.errors import FAULTS
from kvtier.tiers.redis.layout import HEADER_BYTES, Form, names_told
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.startup import facts_of
from kvtier.tiers.redis.wire import INFO, Bounds, Reply, Wire

_LOG = logging.getLogger(__name__)
_SIGNED_MS = 300_000
_SIGN_S, _AWAY_S = 60.0, 5.0
_SIGN_BYTES = 512
_MEMBER = re.compile(rb"\b[0-9a-f]{16}(:[0-9]{1,10})\b")
"""Pattern of a sign's member: a process, and its chunk's bytes, if it is no older version."""
_MEMBERS = 64
_SIGNED = Bounds(8192, _MEMBERS, 1)
_SAMPLE_NAMES = 500
_MOST_SAMPLES = 10
_SCANNED_NAMES = 2_000_000
_MOST_FINGERPRINTS = 1000
_TOLD_FINGERPRINTS = 3
_ORPHAN_S = 60
_UNLINK_CHUNKS = 512
_CLOSE_S = 1.0
_BASE = rb":[0-9]{1,3}:[0-9a-f]{2,64}:"


@dataclass(slots=True)
class Fingerprint:
    """Seen chunks of another fingerprint. ``idle_s``: seconds since any of them was used."""

    chunks: int = 0
    idle_s: int = 1 << 40


class Census:
    """Chunks in Redis, ours and of other fingerprints. ``whole``: whether all were counted."""

    def __init__(self, form: Form, chunk_bytes: int) -> None:
        self.stamps: dict[ChunkKey, int] = {}
        """Our chunks -> minus the seconds since their last use."""
        self.others: dict[bytes, Fingerprint] = {}
        self.whole = True
        self._form, self._chunk_bytes = form, chunk_bytes
        self._everyones = re.compile(re.escape(form.prefix) + _BASE)
        self._headless: set[ChunkKey] = set()

    def count(self, wire: Wire, within_s: float, clock: Callable[[], float]) -> bool:
        """Count one node's chunks, and delete our parts that have had no header for a minute: their
        writer died. Returns False when there was no time for all."""
        until, seen = clock() + within_s, 0
        for names in wire.scan(self._form.everyones):
            for name, idle in zip(names, _idle(wire, names), strict=True):
                self._add(name, idle)
            seen += len(names)
            if clock() > until or seen > _SCANNED_NAMES:
                self.whole = False
                break
        if self.whole:
            self._take_orphans(wire)
        return self.whole

    def _add(self, name: bytes, idle: int) -> None:
        if (parsed := self._form.parse(name)) is not None:
            key, is_header = parsed
            if is_header:
                self.stamps[key] = -max(0, idle)
            elif idle > _ORPHAN_S:
                self._headless.add(key)
            return
        base, _, rest = name.partition(b"{")
        if not self._everyones.fullmatch(base) or self._form.is_own(base):
            return
        if base not in self.others and len(self.others) == _MOST_FINGERPRINTS:
            self.whole = False
            return
        one = self.others.setdefault(base, Fingerprint())
        one.idle_s = min(one.idle_s, max(0, idle))
        if rest.endswith(b"}") and name != base + Form.SIGN:
            one.chunks += 1

    def _take_orphans(self, wire: Wire) -> None:
        orphans, self._headless = list(self._headless - self.stamps.keys()), set()
        for start in range(0, len(orphans), _UNLINK_CHUNKS):
            wire.renew()
            keys = orphans[start : start + _UNLINK_CHUNKS]
            wire.ask(("UNLINK", *self._form.names(key, self._chunk_bytes)) for key in keys)

    def words(self) -> str:
        """Return log text on chunks of other fingerprints, "" if there are none."""
        held = {base: one for base, one in self.others.items() if one.chunks}
        most = sorted(held, key=lambda base: -held[base].chunks)[:_TOLD_FINGERPRINTS]
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
    "When Redis is full, a write takes the room of chunks whose fingerprint no running engine or "
    "server has, the least recently used first. To delete one fingerprint now: redis-cli --scan "
    "--pattern 'FINGERPRINT*' | xargs -n 500 redis-cli unlink"
)


class Upkeep:
    """Signs for one tier on a thread of its own: every five seconds until Redis has said how much
    room there is (``settle``), then once a minute. Makes room for the tier's writes on their
    threads. ``apart``: whether a signer for the same model has chunks of another size."""

    def __init__(
        self, servers: RedisServers, form: Form, settle: Callable[[], bool], chunk_bytes: int
    ) -> None:
        self._servers, self._form, self._settle = servers, form, settle
        self._names = re.compile(
            b"(%s%s)({[0-9a-f]+})(?::[0-9:]+)?" % (re.escape(form.prefix), _BASE)
        )
        self._cursors: dict[str, bytes] = {}  # by node: where the next look begins
        self._told = set[bytes]()
        self._wake, self._closed, self._signed = threading.Event(), False, False
        self._size = b":%d" % chunk_bytes
        self._member, self.apart = secrets.token_hex(8).encode() + self._size, False
        self._settled = self._sign()
        self._lane = Lane("redis-upkeep", 1, urgent_bound=0, bound=1)
        self._lane.submit(self._rounds)

    def close(self) -> None:
        """Stop, and take our member out of the sign. Where Redis is away, the sign expires."""
        self._closed = True
        self._wake.set()
        self._lane.close(_CLOSE_S)
        sign = self._form.sign
        if self._signed:
            with suppress(*FAULTS), self._servers.wire(sign) as wire:
                wire.ask([("SREM", sign, self._member)])

    def told(self, census: Census, free: int, share: int) -> None:
        """Log the census. ``free``: our bytes and those free for us. ``share``: our budget."""
        words, level = [census.words()], logging.INFO
        if free < share:
            words.insert(0, f"only {size_text(max(0, free))} of our {size_text(share)} are free")
            level = logging.WARNING
        if text := "; ".join(filter(None, words)):
            _LOG.log(level, "Redis tier %s: %s. %s", self._servers.label, text, GIVEN_BACK)

    def round(self) -> None:
        """Sign once. A fault costs the round."""
        self._settled = self._settle() and self._sign()

    def _rounds(self) -> None:
        while not self._closed:
            self._wake.wait(_SIGN_S if self._settled else _AWAY_S)
            if not self._closed:
                self.round()

    def _sign(self) -> bool:
        """Sign our fingerprint, and return whether that worked. A full Redis takes no new member
        but prolongs a set, so the first signer makes room for it, if need be of a chunk of ours."""
        sign, signed = self._form.sign, False
        steps = [("SADD", sign, self._member), ("PEXPIRE", sign, _SIGNED_MS)]
        steps.append(("SRANDMEMBER", sign, _MEMBERS))
        with suppress(*FAULTS), self._servers.wire(sign) as wire:
            added, lives, members = wire.ask(steps, _SIGNED)
            if not isinstance(added, int) and not (self._signed and lives == 1):
                self.make_room(wire, sign, _SIGN_BYTES, ours=True)
                added, lives, members = wire.ask(steps, _SIGNED)
            signed = lives == 1 and (self._signed or isinstance(added, int))
            told = b" ".join(members if isinstance(members, list) else [])
            self.apart = {*_MEMBER.findall(told)} > {self._size}
        self._signed = signed or self._signed
        return signed

    # ---- room ------------------------------------------------------------------------------------

    def make_room(self, wire: Wire, name: bytes, bytes_: int, *, ours: bool = False) -> bool:
        """Make room on the node of ``wire``, which has ``name``, within half of the call's time, by
        evicting among samples as Redis's own LRU does. ``ours``: our chunks too, while nobody signs
        for them. Returns whether there is room. Raises FAULTS."""
        place, ask_used = self._servers.node_of(name), ("INFO", "memory")
        short = _short(wire.ask([ask_used], INFO)[0], bytes_)
        for _ in range(_MOST_SAMPLES):
            if short is None or short <= 0 or wire.late:
                break
            cursor = self._cursors.get(place, b"0")
            cursor, names = wire.page(cursor, self._form.prefix + b":*", _SAMPLE_NAMES)
            self._cursors[place] = cursor
            for chunk, seen in self._unsigned(wire, place, names, ours=ours):
                if short is None or short <= 0 or wire.late:
                    break
                (header,) = wire.ask([("GETRANGE", chunk, 0, HEADER_BYTES - 1)])
                unlink = ("UNLINK", *(names_told(chunk, header) or seen))
                gone, used = wire.ask([unlink, ask_used], INFO)
                if not isinstance(gone, int):
                    return False
                short = _short(used, bytes_)
                self._tell(chunk.partition(b"{")[0])
        return short is not None and short <= 0 and not wire.late

    def _unsigned(
        self, wire: Wire, place: str, names: list[bytes], *, ours: bool
    ) -> list[tuple[bytes, list[bytes]]]:
        """Return header and names of unsigned fingerprints' chunks, least recently used first."""
        found = [match for name in names if (match := self._names.fullmatch(name))]
        bases = {match[1] for match in found if ours or not self._form.is_own(match[1])}
        free = self._free(wire, place, sorted(bases))
        found = [match for match in found if match[1] in free]
        chunks, idle = dict[bytes, list[bytes]](), dict[bytes, int]()
        for match, seconds in zip(found, _idle(wire, [match[0] for match in found]), strict=True):
            chunk = match[1] + match[2]
            chunks.setdefault(chunk, []).append(match[0])
            idle[chunk] = min(idle.get(chunk, seconds), seconds)
        known = [chunk for chunk in idle if idle[chunk] >= 0]
        return [(one, chunks[one]) for one in sorted(known, key=lambda one: -idle[one])]

    def _free(self, wire: Wire, place: str, bases: list[bytes]) -> set[bytes]:
        """Return the unsigned ones of ``bases``. Signs may lie on another node than ``wire``'s."""
        asked, replies = [("EXISTS", base + Form.SIGN) for base in bases], list[Reply]()
        if self._servers.node_of(self._form.sign) == place:
            replies = wire.ask(asked)
        else:
            with suppress(*FAULTS), self._servers.wire(self._form.sign) as other:
                other.share(wire)
                replies = other.ask(asked)
        return {base for base, reply in zip(bases, replies, strict=False) if reply == 0}

    def _tell(self, base: bytes) -> None:
        if base not in self._told and len(self._told) < _MOST_FINGERPRINTS:
            self._told.add(base)
            _LOG.warning(
                "Redis tier %s is full: what was not used for long of fingerprint %s, which no "
                "running engine or server has, makes room",
                self._servers.label,
                base.decode(),
            )


def _short(info: Reply, bytes_: int) -> int | None:
    """Return the missing bytes. None if unknown, or if Redis may evict signs (volatile keys)."""
    facts = facts_of(info)
    if facts.policy != "noeviction" or not facts.maxmemory or facts.used is None:
        return None
    return facts.used + bytes_ - facts.maxmemory


def _idle(wire: Wire, names: list[bytes]) -> list[int]:
    """Return the seconds since each name was used, -1 if unknown, or if the name is gone."""
    replies = wire.ask(("OBJECT", "IDLETIME", name) for name in names)
    return [reply if isinstance(reply, int) else -1 for reply in replies]


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
