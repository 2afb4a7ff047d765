"""ZeroHits: notices that a cache in use has had no hit for a long time, and says why in words."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvtier.core.report import SizeClassStatus

_CHUNKS, _LOOK_S = 2000, 600.0
_SHOWN_REASONS, _LEAST_PART = 2, 0.1
"""Most reasons that are told, and the least part of the asked chunks that each must explain."""

_WORDS = {
    "cold": (
        "never seen before: do prompts begin with a time, an id, or anything else that differs "
        "each time?"
    ),
    "other_chunk_size": (
        "the model's chunks are kept in another size: give all its engines the same chunk_tokens"
    ),
    "evicted": "{room}, and what is used again needs more: raise ram_bytes, or give nvme_path",
    "corrupt": (
        "bytes of a lower tier do not match their checksums: look at the disk or the "
        "network (kvtier doctor)"
    ),
    "forgotten": "chunks were cleared, or dropped because no load of them worked: see the log",
    "tier_down": "a lower tier or the server does not answer: kvtier doctor",
    "saving": "the same prompts come while the first of them is still being computed",
    "salt": (
        "the same tokens were saved under another cache_salt: does it differ with each request?"
    ),
    "adapter": (
        "the same tokens were saved under another LoRA adapter: is it loaded anew under "
        "each request?"
    ),
    "media": "the same tokens were saved with other images, audio or video",
    "unnamed": (
        "prompts have media or adapters that only this start of the engine can name: see the log "
        "and what makes a cache cold"
    ),
    "slower": (
        "computing is faster than loading from the tiers that hold them: a faster disk or network"
    ),
    "unasked": "asking the shared tier takes longer than computing: a faster network",
    "deadline": (
        "lower tiers did not deliver in time: a faster disk or network, or a higher load_timeout_ms"
    ),
    "refused": "RAM had no free slot or a lane was full: raise ram_bytes",
    "short": "prompts have fewer tokens than one chunk: lower chunk_tokens",
}


def room(slots: int, lower: Mapping[str, int]) -> str:
    """Return the room of a cache, in words. ``lower``: chunks by tier."""
    places = ", ".join(f"{name} {chunks:,}" for name, chunks in lower.items())
    return f"RAM holds {slots:,} chunks, {places or 'there is no lower tier'}"


def totals(stats: Mapping[str, int]) -> tuple[int, int, int, dict[str, int]]:
    """Return the arguments of :meth:`ZeroHits.counted` from ``Store.stats()``."""
    hits = sum(count for name, count in stats.items() if name.endswith("_loaded"))
    kinds = ("missed_", "declined_")
    reasons = {
        name.split("_", 1)[1]: count for name, count in stats.items() if name.startswith(kinds)
    }
    return stats.get("load_asked", 0), hits, stats.get("saved", 0), reasons


class ZeroHits:
    """Watch for times without hits, by counts that only grow. One thread, or under a lock.

    ``room``: how much the cache holds, see :func:`room`. ``found``: chunks that lower tiers held at
    the start. ``chunks``: the least number of asked chunks in a window without a hit, and
    ``seconds`` its least length. 0: the whole time since the start counts at once."""

    def __init__(
        self,
        room: str,
        found: int = 0,
        *,
        chunks: int = _CHUNKS,
        seconds: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verdict = ""
        """Sentence why nothing is ever hit. Empty while there are hits, or too little was asked."""
        self._room, self._found = room, found
        self._chunks, self._seconds, self._clock = chunks, seconds, clock
        self._since, self._hits, self._asked = clock(), 0, 0
        self._before: Mapping[str, int] = {}

    @classmethod
    def of(cls, status: SizeClassStatus, slots: int, clock: Callable[[], float]) -> ZeroHits:
        """Make one for a Store that has just been made."""
        lower = status.tiers[1:]
        holds = room(slots, {tier.tier: tier.capacity for tier in lower})
        return cls(holds, sum(tier.held for tier in lower), clock=clock)

    def counted(self, asked: int, hits: int, saved: int, reasons: Mapping[str, int]) -> bool:
        """Compare the counts since the start: chunks asked for, hits, chunks saved, and the other
        asked chunks by reason. A prompt too short for a chunk counts as one, with the reason
        ``short``. Returns True once in each period without hits, when :attr:`verdict` is new."""
        if hits > self._hits:
            self.verdict, self._hits, self._asked = "", hits, asked
            self._before, self._since = dict(reasons), self._clock()
            return False
        count = asked - self._asked
        if self.verdict or count < self._chunks:
            return False
        seconds, new = self._clock() - self._since, Counter(reasons)
        new.subtract(self._before)
        if seconds < self._seconds or not (saved or self._found or new["short"]):
            return False
        when = f"in {seconds / 60:.0f} min" if self._seconds else "since the start"
        self.verdict = f"0 of {count:,} chunks asked for were hits {when}: {self._why(new)}"
        return True

    def _why(self, reasons: Counter[str]) -> str:
        whole = max(1, sum(reasons.values()))
        said = [
            f"{count / whole:.0%} {reason}: {_WORDS.get(reason, reason).format(room=self._room)}"
            for reason, count in reasons.most_common(_SHOWN_REASONS)
            if count >= _LEAST_PART * whole
        ]
        if self._found and reasons["cold"] >= _LEAST_PART * whole:
            said.append(
                f"{self._found:,} chunks lay in the tiers at the start: if prompts are as before, "
                "they were saved with another model, engine setting or namespace"
            )
        return "; ".join(said) or "no reason is known"
