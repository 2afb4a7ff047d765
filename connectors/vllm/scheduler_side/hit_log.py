"""One log line for each request that was loaded: the first hit of an engine can be seen.

vLLM's own line counts hits of its own cache and of kvtier's separately, every ten seconds, and in
percent. One thread makes all calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvtier.connectors.vllm.scheduler_side.tracing import LoadObserver
from kvtier.server.log_limit import LogLimit
from kvtier.tiers.registry import TIERS

logger = logging.getLogger("kvtier.connectors.vllm.hits")

logger.addFilter(LogLimit(5, 10.0))  # lines in so many seconds
_PLACES = {"ram": "RAM", "remote": "the server"}
_PLACES |= {name: tier.section.title for name, tier in TIERS.items()}


class _Load(NamedTuple):
    asked: float
    """When vLLM first asked for the request, in seconds of the clock."""
    prompt: int
    """Tokens of the request."""
    tokens: Mapping[str, int]
    """Loaded tokens by place."""


class HitLog(LoadObserver):
    """Logs a load when all ranks have confirmed it. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._loads: dict[int, _Load] = {}

    def asked(self, request: Any) -> None:
        self._asked.setdefault(request.request_id, self._clock())

    def answered(self, request: Any, tokens: Mapping[str, int], why: str) -> None:
        if not tokens:
            self._asked.pop(request.request_id, None)

    def began(self, number: int, request: Any, tokens: Mapping[str, int], size: int) -> None:
        asked = self._asked.pop(request.request_id, None)
        if asked is not None:
            self._loads[number] = _Load(asked, request.num_tokens, tokens)

    def ended(self, number: int, *, failed: bool) -> None:
        load = self._loads.pop(number, None)
        if load is not None and not failed:
            logger.info("%s", _text(load, self._clock() - load.asked))

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)


def _text(load: _Load, seconds: float) -> str:
    """``2,816 of 3,000 tokens from RAM in 12 ms``. Tokens that vLLM's own cache had are among the
    rest."""
    places = [(_PLACES.get(place, place), count) for place, count in load.tokens.items()]
    if len(places) == 1:
        named = places[0][0]
    else:
        named = " and ".join(f"{place} ({count:,})" for place, count in places)
    hit = sum(load.tokens.values())
    return f"{hit:,} of {load.prompt:,} tokens from {named} in {seconds * 1e3:,.0f} ms"
