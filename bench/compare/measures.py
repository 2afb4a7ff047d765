"""What is measured of an arm in one round of the comparison, and the arithmetic on it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.bench.long_doc_qa_client import Outcome


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM of an arm's engine and companion after the query round; bytes.

    ``touched``: their own pages, shared ones counted once; no page cache. ``untouched``: the pages of large mappings
    that nobody has used yet. ``budget``: what the arm was allowed for what it caches (Redis: what it says it uses).
    """

    touched: int
    untouched: int
    budget: int

    def beyond(self, bare: Memory) -> int:
        """More than the engine alone (``bare``), in pages that are there."""
        return self.touched - bare.touched

    def beyond_budget(self, bare: Memory) -> int:
        """And more than the budget. A pool whose pages come with use has used less of its budget by what it has not
        touched: held against all of it, the arm would have that much room to hide in."""
        spared = max(0, self.untouched - bare.untouched)
        return self.beyond(bare) - max(0, self.budget - spared)


@dataclass(frozen=True, slots=True)
class Restart:
    """The engine stopped and started again, its companion not, and every document asked about once more.

    ``ready_s``: from the start of the process until it answers. ``error``: why it could not be measured.
    """

    ready_s: float = 0.0
    outcomes: Sequence[Outcome] = ()
    error: str = ""

    @property
    def first(self) -> float | None:
        """TTFT of the very first question; seconds."""
        return self.outcomes[0].ttft if self.outcomes else None

    @property
    def mean(self) -> float | None:
        times = [one.ttft for one in self.outcomes if one.ttft is not None]
        return statistics.fmean(times) if times else None

    @property
    def cached(self) -> float:
        return cached_part(self.outcomes)


@dataclass(frozen=True, slots=True)
class Run:
    """One arm in one round of the comparison; ``outcomes`` are those of its query round.

    ``fill``: prompt tokens a second of the round before, in which nothing could be reused. ``cpu_s``: CPU seconds of
    the whole machine during the query round. ``pairs``: in turn a question whose document has to be loaded, and one
    whose document is in vLLM's own cache since then. ``mixed``: a round in which each document is followed by one that
    was never seen. None: not measured.
    """

    arm: str
    outcomes: Sequence[Outcome]
    fill: float | None = None
    cpu_s: float | None = None
    memory: Memory | None = None
    pairs: Sequence[Outcome] = ()
    mixed: Sequence[Outcome] = ()
    restart: Restart | None = None

    @classmethod
    def told(cls, one: Mapping[str, Any]) -> Run:
        """From its JSON; measures that it does not have were not taken."""
        memory, restart = one.get("memory"), one.get("restart")
        return cls(
            one["arm"],
            _outcomes(one["outcomes"]),
            one.get("fill"),
            one.get("cpu_s"),
            Memory(**memory) if memory else None,
            _outcomes(one.get("pairs", ())),
            _outcomes(one.get("mixed", ())),
            Restart(restart["ready_s"], _outcomes(restart["outcomes"]), restart["error"]) if restart else None,
        )

    @property
    def ttft(self) -> list[float]:
        return [one.ttft for one in self.outcomes if one.ttft is not None]

    @property
    def load_costs(self) -> list[float]:
        """By how much the first of each pair was slower to its first token; seconds."""
        twos = zip(self.pairs[::2], self.pairs[1::2], strict=True)
        return [one.ttft - other.ttft for one, other in twos if one.ttft is not None and other.ttft is not None]

    @property
    def throughput(self) -> float:
        """Prompt tokens a second."""
        return throughput(self.outcomes)

    @property
    def answered(self) -> list[Outcome]:
        """The requests of all its rounds whose answers are compared."""
        return [*self.outcomes, *self.mixed, *(self.restart.outcomes if self.restart else ())]


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Prompt tokens a second of one round."""
    return sum(one.prompt_tokens for one in outcomes) / max(one.request_end for one in outcomes)


def cached_part(outcomes: Sequence[Outcome]) -> float:
    """Of the prompt tokens, the part that was served from a cache."""
    return sum(one.cached_tokens or 0 for one in outcomes) / max(1, sum(one.prompt_tokens for one in outcomes))


def load_speed(outcomes: Sequence[Outcome], load_cost: float | None, token_bytes: int) -> float | None:
    """GB/s at which a hit's bytes came, were they all of its cost; None where it costs nothing that can be seen."""
    asked = [one for one in outcomes if one.successful]
    if not asked or not token_bytes or load_cost is None or load_cost <= 0:
        return None
    return statistics.fmean(one.cached_tokens or 0 for one in asked) * token_bytes / load_cost / 1e9


def _outcomes(told: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    return [Outcome(**one) for one in told]
