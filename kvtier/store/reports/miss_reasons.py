"""Miss reasons: why a chunk that was asked for is not there. Pure: no I/O, lock, thread, clock or
log.

A prompt's run ends at its first missing chunk. All chunks after it count under the same reason.

- ``cold``: it was never seen, as far as is remembered.
- ``evicted``: it was held, and left to make room.
- ``corrupt``: it was held, and its bytes did not match their checksum any more. It was not served.
- ``forgotten``: it was dropped on purpose: it was cleared or purged, or no load of it worked.
- ``tier_down``: a lower tier or the server that has it, or may have it, does not answer.
- ``other_chunk_size``: it was never seen, and the model's chunks are kept in another size too: its
  engines differ in chunk_tokens.
- ``saving``: another prompt is computing it at this moment.
- ``salt``: the same tokens were saved under another cache salt.
- ``adapter``: the same tokens were saved under another LoRA adapter.
- ``media``: the same tokens were saved with other images, audio or video.
- ``unnamed``: the content of an image or adapter is not known, so its chunks have names of this
  start alone, or none.

A chunk that is there but is computed all the same is *declined* and not missed. The reasons are
``slower``, ``unasked``, ``deadline`` and ``refused``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.store.directory import Directory
from kvtier.store.observer import Left, Observer

_WAYS = 4
_MARK_BITS = 3
_BEGINNINGS, _MOST_EXTRAS = 2048, 8
"""First chunks that are remembered, and the most salts, adapters and media of each."""


class Marks:
    """Bounded memory of small numbers (1 to 7) by digest. A place takes 8 bytes, all allocated at
    the start.

    It is set-associative as processor caches are (A. J. Smith, *Cache Memories*, ACM Computing
    Surveys 1982): a digest has four places, and the oldest of the four is replaced. 61 bits of a
    digest are compared, so one is taken for another once in 10**17 queries. Not thread-safe."""

    def __init__(self, places: int) -> None:
        self._sets = max(1, places // _WAYS)
        self._words = array("Q", [0]) * (self._sets * _WAYS)

    def __len__(self) -> int:
        return len(self._words)

    def put(self, digest: bytes, mark: int) -> None:
        """Set the number of a digest, of 8 evenly distributed bytes or more."""
        words = self._words
        tag = int.from_bytes(digest[:8], "little") >> _MARK_BITS
        start = tag % self._sets * _WAYS
        first, second, third, _ = words[start : start + _WAYS]
        words[start] = tag << _MARK_BITS | mark
        # Each word moves on by one place, up to the place that had the same digest. There is no
        # loop, because this runs at every eviction.
        if first >> _MARK_BITS != tag:
            words[start + 1] = first
            if second >> _MARK_BITS != tag:
                words[start + 2] = second
                if third >> _MARK_BITS != tag:
                    words[start + 3] = third

    def get(self, digest: bytes) -> int:
        tag = int.from_bytes(digest[:8], "little") >> _MARK_BITS
        start = tag % self._sets * _WAYS
        for word in self._words[start : start + _WAYS]:
            if word >> _MARK_BITS == tag:
                return word & ((1 << _MARK_BITS) - 1)
        return 0


EXTRAS = ("salt", "adapter", "media")
"""Parts of a first chunk's key besides its tokens, within one engine."""


class FirstChunks:
    """Tokens with which prompts began, and the salt, adapter and media under which they were saved,
    so that a mismatch of keys is told from a new prompt.

    It is the memory of one engine's scheduler and never leaves that process. No request is told
    what it says, only counters are. A server keeps none, because several tenants use it. At most a
    megabyte. One thread uses it."""

    def __init__(self) -> None:
        self._saved: OrderedDict[bytes, tuple[tuple[int, ...], ...]] = OrderedDict()
        """Digest of the tokens -> hashes of the extras under which they were saved."""

    def saved(self, content: bytes, extras: Sequence[bytes]) -> None:
        """Note a saved first chunk. ``content``: a digest of the tokens alone. ``extras``: in the
        order of :data:`EXTRAS`."""
        known, new = self._saved.get(content[:8], ()), tuple(map(hash, extras))
        if new not in known:
            self._saved[content[:8]] = (*known, new)[-_MOST_EXTRAS:]
            if len(self._saved) > _BEGINNINGS:
                self._saved.popitem(last=False)

    def differs(self, content: bytes, extras: Sequence[bytes]) -> str:
        """Return the one of :data:`EXTRAS` in which this first chunk differs from a saved one. ""
        when none was saved, or the very same chunk was."""
        known = self._saved.get(content[:8])
        if known is None:  # as of most prompts
            return ""
        own = tuple(map(hash, extras))
        apart = [[mine != its for mine, its in zip(own, one, strict=True)] for one in known]
        if [False] * len(own) in apart:
            return ""
        alone = (at for at in range(len(own)) if any(one[at] and sum(one) == 1 for one in apart))
        return next((EXTRAS[at] for at in alone), "")


_LEAST_PLACES, _MOST_PLACES = 1 << 15, 1 << 20


class Past(Observer):
    """Memory of departures: twice as many as its Directory has room, within 256 KiB and 8 MiB, by
    parts of keys, which say nothing without the tokens. The Directory's lock guards it."""

    def __init__(self, directory: Directory) -> None:
        room = directory.slots.limit + sum(tier.capacity for tier in directory.tiers)
        self._directory = directory
        self._marks = Marks(min(max(2 * room, _LEAST_PLACES), _MOST_PLACES))

    def left(self, place: int, key: ChunkKey, how: Left) -> None:
        """Remember a departure but for chunks that were dropped by name: another place may have
        them, and :meth:`missing` is told when none has."""
        if how is not Left.FORGOTTEN:
            self._marks.put(key, how)

    def missing(self, key: ChunkKey, how: Left) -> None:
        self._marks.put(key, how)

    def why(self, key: ChunkKey) -> str:
        if self._directory.get(key) is not None:
            return "saving"
        held = next(self._directory.holders(key), None) is not None
        return "tier_down" if held else self._how(key)

    def remembered_run(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading chunks that are held, or left to make room and are
        remembered. By bisection: the end of a run leaves and is forgotten first."""
        if not keys or not self._is_remembered(keys[0]):  # most prompts that miss are new
            return 0
        return bisect_left(keys, True, key=lambda key: not self._is_remembered(key))

    def _is_remembered(self, key: ChunkKey) -> bool:
        left = self._marks.get(key)
        return left in {Left.EVICTED, Left.CORRUPT} or self._directory.held_run((key,)) == 1

    def _how(self, key: ChunkKey) -> str:
        mark = self._marks.get(key)
        return Left(mark).name.lower() if mark else "cold"
