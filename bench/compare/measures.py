"""What is measured of an arm in one round of the comparison, and the arithmetic on it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtier.bench.compare.calls import Step
from kvtier.bench.requests.client import Outcome


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM of an arm's engine and companion after the query round, in bytes.

    ``touched``: their own pages and shared ones, which count once, without the page cache.
    ``untouched``: the pages of large mappings that are not used yet. ``budget``: what the arm was
    allowed for its cache (for Redis, what it says that it uses).
    """

    touched: int
    untouched: int
    budget: int

    def beyond(self, bare: Memory) -> int:
        """Bytes beyond the engine alone (``bare``), in pages that are present."""
        return self.touched - bare.touched

    def beyond_budget(self, bare: Memory) -> int:
        """Bytes beyond the budget too. A pool whose pages come with use has used less of its budget
        by what it has not touched. Compared with all of the budget, the arm could hide that
        much."""
        spared = max(0, self.untouched - bare.untouched)
        return self.beyond(bare) - max(0, self.budget - spared)


@dataclass(frozen=True, slots=True)
class Again:
    """Every document asked about once more, by an engine that has seen none of them: the one that
    was stopped and started again, or a second one beside the first. The arm's companion and its
    folder stay as they are.

    ``ready_s``: from the start of the process until it answers. ``error``: why it could not be
    measured.
    """

    ready_s: float = 0.0
    outcomes: Sequence[Outcome] = ()
    error: str = ""

    @classmethod
    def told(cls, one: Mapping[str, Any] | None) -> Again | None:
        return cls(one["ready_s"], _outcomes(one["outcomes"]), one["error"]) if one else None

    @property
    def first(self) -> float | None:
        """TTFT of the very first question, in seconds."""
        return self.outcomes[0].ttft if self.outcomes else None

    @property
    def mean(self) -> float | None:
        times = [one.ttft for one in self.outcomes if one.ttft is not None]
        return statistics.fmean(times) if times else None

    @property
    def cached(self) -> float:
        return cached_part(self.outcomes)


@dataclass(frozen=True, slots=True)
class Effort:
    """What one answer took, from the answer before it until the engine was idle, in seconds.

    ``cpu_s``: CPU seconds of the engine's and its companion's processes. ``calls``: the engine's
    seconds in its connector, by entry point (:mod:`kvtier.bench.compare.calls`). ``look_up_s``:
    from the first question to the connector, what it holds of the prompt, to a definite answer. It
    includes the time to fetch the prompt from a lower place, where an arm answers only after that.
    None: not measured.
    """

    cpu_s: float | None
    calls: Mapping[str, float] | None = None
    look_up_s: float | None = None

    @property
    def in_connector(self) -> float | None:
        return None if self.calls is None else sum(self.calls.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """A question whose document had to be loaded, and then one whose document was in vLLM's own
    cache."""

    loaded: Outcome
    warm: Outcome
    load: Effort | None = None
    rest: Effort | None = None

    @property
    def cost(self) -> float:
        """By how much longer the first took to its first token, in seconds."""
        assert self.loaded.ttft is not None and self.warm.ttft is not None
        return self.loaded.ttft - self.warm.ttft

    @property
    def more_cpu_s(self) -> float | None:
        """How many more CPU seconds the first took."""
        if (
            self.load is None
            or self.rest is None
            or self.load.cpu_s is None
            or self.rest.cpu_s is None
        ):
            return None
        return self.load.cpu_s - self.rest.cpu_s

    @property
    def in_connector(self) -> float | None:
        """By how much longer the engine was in its connector, in seconds."""
        if (
            self.load is None
            or self.rest is None
            or self.load.in_connector is None
            or self.rest.in_connector is None
        ):
            return None
        return self.load.in_connector - self.rest.in_connector


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over pairs, and the two values between which the true median lies in 19 cases of
    20."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Run:
    """One arm in one round of the comparison. ``outcomes`` are those of its query round. None and
    empty mean: not measured.

    Attributes:
        fill: prompt tokens a second of the round before, in which nothing could be reused.
            ``fill_tokens``, ``fill_efforts``: its prompt tokens, and what its answers took.
        pairs: in turn a question whose document has to be loaded, and one whose document is then in
            vLLM's own cache. ``pair_efforts``: what these took.
        mixed: a round in which a document that was never seen follows each document.
        second: what another engine beside this one found.
        restart: what this one found after a restart.
        mode: how its engine ran. None where that did not say it.
    """

    arm: str
    outcomes: Sequence[Outcome]
    fill: float | None = None
    memory: Memory | None = None
    pairs: Sequence[Outcome] = ()
    mixed: Sequence[Outcome] = ()
    restart: Again | None = None
    second: Again | None = None
    fill_tokens: int = 0
    fill_efforts: Sequence[Effort] = ()
    pair_efforts: Sequence[Effort] = ()
    mode: str | None = None

    @classmethod
    def told(cls, one: Mapping[str, Any]) -> Run:
        """From its JSON. Measures that are not in it were not taken."""
        memory = one.get("memory")
        return cls(
            arm=one["arm"],
            outcomes=_outcomes(one["outcomes"]),
            fill=one.get("fill"),
            memory=Memory(**memory) if memory else None,
            pairs=_outcomes(one.get("pairs", ())),
            mixed=_outcomes(one.get("mixed", ())),
            restart=Again.told(one.get("restart")),
            second=Again.told(one.get("second")),
            fill_tokens=one.get("fill_tokens", 0),
            fill_efforts=[Effort(**effort) for effort in one.get("fill_efforts", ())],
            pair_efforts=[Effort(**effort) for effort in one.get("pair_efforts", ())],
            mode=one.get("mode"),
        )

    @property
    def ttft(self) -> list[float]:
        return [one.ttft for one in self.outcomes if one.ttft is not None]

    @property
    def twos(self) -> list[Pair]:
        """The pairs of which both were answered."""
        efforts: Sequence[Effort | None] = self.pair_efforts or [None] * len(self.pairs)
        parts = (self.pairs[::2], self.pairs[1::2], efforts[::2], efforts[1::2])
        twos = [Pair(*four) for four in zip(*parts, strict=True)]
        return [two for two in twos if two.loaded.ttft is not None and two.warm.ttft is not None]

    @property
    def throughput(self) -> float:
        """Prompt tokens a second."""
        return throughput(self.outcomes)

    @property
    def answered(self) -> list[Outcome]:
        """The requests of all its rounds whose answers are compared."""
        return [one for outcomes in self.compared for one in outcomes]

    @property
    def compared(self) -> list[Sequence[Outcome]]:
        """The same by round, because a question may be asked in more than one."""
        again = [one.outcomes for one in (self.second, self.restart) if one is not None]
        return [self.outcomes, self.mixed, *again]


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Prompt tokens a second of one round."""
    return sum(one.prompt_tokens for one in outcomes) / max(one.request_end for one in outcomes)


def cached_part(outcomes: Sequence[Outcome]) -> float:
    """Of the prompt tokens, the part that was served from a cache."""
    return sum(one.cached_tokens or 0 for one in outcomes) / max(
        1, sum(one.prompt_tokens for one in outcomes)
    )


def load_speed(
    outcomes: Sequence[Outcome], load_cost: float | None, token_bytes: int
) -> float | None:
    """GB/s at which a hit's bytes came, if they were all of its cost. None where it has no
    measurable cost."""
    asked = [one for one in outcomes if one.successful]
    if not asked or not token_bytes or load_cost is None or load_cost <= 0:
        return None
    return statistics.fmean(one.cached_tokens or 0 for one in asked) * token_bytes / load_cost / 1e9


def efforts(
    notes: Sequence[tuple[float, float | None]], steps: Sequence[Step] | None
) -> list[Effort]:
    """One for each answer. ``notes``: ``time.perf_counter()`` and CPU seconds so far, before the
    first question and after each answer. A step belongs to the answer before whose note it ended,
    and one after the last note to the last. ``steps``: those of the same engine, or None where they
    could not be read."""
    made = []
    for place, ((begun, cpu), (ended, cpu_then)) in enumerate(pairwise(notes), start=2):
        cpu_s = cpu_then - cpu if cpu is not None and cpu_then is not None else None
        if steps is None:
            made.append(Effort(cpu_s))
            continue
        last = place == len(notes)
        own = [step for step in steps if begun < step.at and (last or step.at <= ended)]
        calls: dict[str, float] = {}
        for name, spent in (one for step in own for one in step.calls.items()):
            calls[name] = calls.get(name, 0.0) + spent
        look_ups = [one for step in own for one in step.look_ups]
        made.append(Effort(cpu_s, calls or None, sum(look_ups) if look_ups else None))
    return made


def cpu_gib(pairs: Sequence[Pair], token_bytes: int) -> Estimate | None:
    """CPU seconds for each GiB of hits, beyond those of the same answers from vLLM's own cache:
    what the loaded one of a pair took beyond the warm one, divided by the bytes that came. Pairs
    without a hit are left out. None when fewer than two pairs remain."""
    more = [
        (one.more_cpu_s, (one.loaded.cached_tokens or 0) * token_bytes / 2**30) for one in pairs
    ]
    each = sorted(cpu_s / gib for cpu_s, gib in more if cpu_s is not None and gib)
    if len(each) < 2:
        return None
    rank = max(
        0, round(len(each) / 2 - 0.98 * math.sqrt(len(each))) - 1
    )  # of a median's bounds, by the binomial law
    return Estimate(statistics.median(each), each[rank], each[-1 - rank])


def calls_of_load(pairs: Sequence[Pair]) -> dict[str, float]:
    """Seconds that a load took of the engine, by entry point of the connector: medians over pairs
    of what the loaded one took beyond the warm one."""
    both = [(one.load.calls, one.rest.calls) for one in pairs if one.load and one.rest]
    told = [(load, rest) for load, rest in both if load is not None and rest is not None]
    names = dict.fromkeys(name for load, rest in told for name in (*load, *rest))
    return {
        name: statistics.median(load.get(name, 0.0) - rest.get(name, 0.0) for load, rest in told)
        for name in names
    }


def calls_of_filling(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds of the engine for each prompt token of the fills, by entry point of the connector.
    Empty where they could not be read."""
    seen = [
        run
        for run in runs
        if run.fill_efforts and all(one.calls is not None for one in run.fill_efforts)
    ]
    found: dict[str, float] = {}
    tokens = sum(run.fill_tokens for run in seen)
    for name, spent in (
        one for run in seen for effort in run.fill_efforts for one in (effort.calls or {}).items()
    ):
        found[name] = found.get(name, 0.0) + spent / tokens
    return found


def _outcomes(told: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    return [Outcome(**one) for one in told]
