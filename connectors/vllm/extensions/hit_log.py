"""One log line for each request that was loaded: the first hit of an engine can be seen.

vLLM's own line counts hits of its own cache and of kvtier's separately, every ten seconds, and in
percent. One thread makes all calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.connectors.vllm.extension import Extension
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.server.log_limit import LogLimit
from kvtier.tiers.registry import TIERS

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import StepMetadata

logger = logging.getLogger("kvtier.connectors.vllm.hits")

logger.addFilter(LogLimit(5, 10.0, again_s=0.0))  # lines in so many seconds
_PLACES = {"ram": "RAM", "remote": "the server"}
_PLACES |= {name: tier.section.title for name, tier in TIERS.items()}


_WHY_A_PART = {
    "deadline": "came too late",
    "refused": "could not be read or found no room",
    "slower": "computed sooner",
    "unasked": "not asked for in a shared tier",
}


class _Load(NamedTuple):
    asked: float
    prompt: int
    tokens: Mapping[str, int]
    declined: Mapping[str, int]


class HitLog(Extension):
    """Logs a load when all ranks have confirmed it. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[int, _Load] = {}

    def asked(self, prompt: Prompt, keys: Sequence[ChunkKey]) -> None:
        prompt.notes.setdefault(self, self._clock())

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        if not prompt.progress.sources:
            prompt.notes.pop(self, None)

    def step(self, metadata: StepMetadata, loads: Sequence[BegunLoad]) -> None:
        for number, prompt, _ in loads:
            asked = prompt.notes.pop(self, None)
            if asked is not None:
                tokens, declined = prompt.progress.sources, prompt.claim.declined
                self._loads[number] = _Load(asked, prompt.request.num_tokens, tokens, declined)

    def ended(self, job: Pending, *, is_last: bool) -> None:
        load = self._loads.pop(job.number, None)
        if load is not None and load.tokens and not job.failed:
            logger.info("%s", _text(load, self._clock() - load.asked))


def _text(load: _Load, seconds: float) -> str:
    """``2,304 of 3,000 tokens from NVMe in 12 ms; 2 chunks came too late (deadline)``."""
    places = [(_PLACES.get(place, place), count) for place, count in load.tokens.items()]
    if len(places) == 1:
        named = places[0][0]
    else:
        named = " and ".join(f"{place} ({count:,})" for place, count in places)
    hit = sum(load.tokens.values())
    whys = [
        f"{count:,} chunk{'s' * (count != 1)} {_WHY_A_PART[reason]} ({reason})"
        for reason, count in load.declined.items()
        if count
    ]
    came = f"{hit:,} of {load.prompt:,} tokens from {named} in {seconds * 1e3:,.0f} ms"
    return "; ".join([came, *whys])
