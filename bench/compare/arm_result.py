"""The results of each arm: medians over the comparison's rounds, compared with the other arms.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtier.bench.compare.measures import (
    Again,
    Estimate,
    Memory,
    Run,
    cached_part,
    calls_of_filling,
    calls_of_load,
    cpu_gib,
    load_speed,
    throughput,
)
from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.long_doc_qa.arms import GPU_HIT, NONE
from kvtier.bench.requests.client import answers


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm over all rounds. Times are seconds.

    Attributes:
        load_costs: of each pair, what a hit costs beyond one in vLLM's own cache. ``load_cost`` is
            their median.
        fill: prompt tokens a second when nothing can be reused.
        cpu_gib: CPU seconds for each GiB of hits, beyond those of answers from vLLM's own cache.
        look_ups: of each request with a load, from the first question to the connector to its
            definite answer. ``cold_look_ups``: the same when nothing is held.
        in_connector: of each pair, by how much longer the engine was in its connector. ``calls``:
            the same by entry point.
        filling: the engine's time for each prompt token of the fill, by entry point.
        mixed: prompt tokens a second when half of the documents are new. ``mixed_cached``: the part
            of them that was served.
        memory: bytes of RAM beyond those of the engine alone. ``beyond_budget``: bytes beyond those
            and what the arm was given.
        load_speed: GB/s, if moving the bytes were all of the load cost. ``save_speed``: GB/s, if
            saving them were all that the engine does in its connector during the fill.
        second, restart: the last ones.
        times_ours: this load cost as a multiple of that of the kvtier arm with which it is
            compared. Above 1, kvtier's is less.
        cached: the part of the prompt tokens that was served from a cache.
        differing: answers unlike those of ``none``.
    """

    arm: str
    ttft: Sequence[float]
    throughput: float
    load_costs: Sequence[float]
    cached: float
    differing: int | None
    failed: int
    fill: float | None = None
    cpu_gib: Estimate | None = None
    look_ups: Sequence[float] = ()
    cold_look_ups: Sequence[float] = ()
    in_connector: Sequence[float] = ()
    calls: Mapping[str, float] = field(default_factory=dict)
    filling: Mapping[str, float] = field(default_factory=dict)
    times_ours: float | None = None
    mixed: float | None = None
    mixed_cached: float | None = None
    memory: int | None = None
    beyond_budget: int | None = None
    load_speed: float | None = None
    save_speed: float | None = None
    second: Again | None = None
    restart: Again | None = None

    @property
    def load_cost(self) -> float | None:
        return median(self.load_costs)

    @property
    def look_up(self) -> float | None:
        return median(self.look_ups)

    @property
    def cold_look_up(self) -> float | None:
        return median(self.cold_look_ups)

    @property
    def engine_load(self) -> float | None:
        return median(self.in_connector)

    @property
    def engine_fill(self) -> float | None:
        """For each prompt token."""
        return sum(self.filling.values()) or None

    @property
    def fill_share(self) -> float | None:
        """The part of the fill's time that the engine was in its connector."""
        return (
            None if self.engine_fill is None or self.fill is None else self.engine_fill * self.fill
        )

    @property
    def ttft_mean(self) -> float:
        return statistics.fmean(self.ttft)

    @property
    def ttft_p50(self) -> float:
        return statistics.median(self.ttft)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def arm_results(
    arms: Sequence[Contender], runs: Sequence[Run], token_bytes: int = 0
) -> dict[str, ArmResult]:
    """By arm, for those that ran and had an answer. ``token_bytes``: those of KV. Where it is 0,
    values by the byte are left out."""
    by_arm = {one.name: [run for run in runs if run.arm == one.name and run.ttft] for one in arms}
    by_arm = {name: found for name, found in by_arm.items() if found}
    reference = _reference(by_arm[NONE], runs) if NONE in by_arm else None
    found = {name: _arm_result(name, own, reference) for name, own in by_arm.items()}
    steps: tuple[Callable[[ArmResult, Sequence[Run]], ArmResult], ...] = (
        _with_calls,
        lambda one, own: _with_speeds(one, own, token_bytes),
        lambda one, own: _with_memory(one, own, by_arm.get(NONE, ())),
    )
    for step in steps:
        found = {name: step(one, by_arm[name]) for name, one in found.items()}
    return {name: _beside_ours(one, ours(one, found, arms)) for name, one in found.items()}


def ours(
    one: ArmResult, found: Mapping[str, ArmResult], arms: Sequence[Contender]
) -> ArmResult | None:
    """The kvtier arm with which it is compared."""
    like = next(arm.like for arm in arms if arm.name == one.arm)
    return found.get(like) if like is not None else None


def _reference(
    bare: Sequence[Run], runs: Sequence[Run]
) -> dict[tuple[int, int], tuple[int, ...] | str]:
    """What ``none`` answered first to each question. For questions that it is not asked: what
    another arm answered when nothing was cached."""
    found: dict[tuple[int, int], tuple[int, ...] | str] = {}
    for run in bare:
        found = answers(run.answered) | found
    for run in runs:
        found = answers([one for one in run.answered if one.cached_tokens == 0]) | found
    return found


def _arm_result(
    name: str, runs: Sequence[Run], reference: Mapping[tuple[int, int], object] | None
) -> ArmResult:
    outcomes = [one for run in runs for one in run.outcomes]
    mixed = [run.mixed for run in runs if run.mixed]
    differing = None
    if reference is not None and name != NONE:
        differing = sum(
            own != reference.get(pair, own) for run in runs for pair, own in _answers(run)
        )
    return ArmResult(
        arm=name,
        ttft=[value for run in runs for value in run.ttft],
        throughput=statistics.median(run.throughput for run in runs),
        load_costs=[two.cost for run in runs for two in run.twos],
        cached=cached_part(outcomes),
        differing=differing,
        failed=sum(not one.successful for run in runs for one in run.answered),
        fill=median([run.fill for run in runs if run.fill is not None]),
        mixed=median([throughput(one) for one in mixed]),
        mixed_cached=cached_part([one for each in mixed for one in each]) if mixed else None,
        second=next((run.second for run in reversed(runs) if run.second), None),
        restart=next((run.restart for run in reversed(runs) if run.restart), None),
    )


def _answers(run: Run) -> Iterator[tuple[tuple[int, int], object]]:
    """Of all rounds. A question that is asked in two rounds is there twice."""
    for outcomes in run.compared:
        yield from answers(outcomes).items()


def _with_speeds(one: ArmResult, runs: Sequence[Run], token_bytes: int) -> ArmResult:
    if one.arm in (NONE, GPU_HIT):
        return one
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    saved = one.engine_fill if one.cached else None
    return replace(
        one,
        cpu_gib=cpu_gib([two for run in runs for two in run.twos], token_bytes),
        load_speed=load_speed(outcomes, one.load_cost, token_bytes),
        save_speed=token_bytes / saved / 1e9 if token_bytes and saved else None,
    )


def _with_calls(one: ArmResult, runs: Sequence[Run]) -> ArmResult:
    twos = [two for run in runs for two in run.twos]
    loads = [two.load.look_up_s for two in twos if two.load is not None]
    fills = [effort.look_up_s for run in runs for effort in run.fill_efforts]
    return replace(
        one,
        look_ups=[value for value in loads if value is not None],
        cold_look_ups=[value for value in fills if value is not None],
        in_connector=[value for two in twos if (value := two.in_connector) is not None],
        calls=calls_of_load(twos),
        filling=calls_of_filling(runs),
    )


def _with_memory(one: ArmResult, runs: Sequence[Run], bare: Sequence[Run]) -> ArmResult:
    own, alone = (_median_memory(each) for each in (runs, bare))
    if own is None or alone is None or not own.budget:
        return one
    return replace(one, memory=own.beyond(alone), beyond_budget=own.beyond_budget(alone))


def _median_memory(runs: Sequence[Run]) -> Memory | None:
    seen = [run.memory for run in runs if run.memory is not None]
    if not seen:
        return None
    parts = (
        [one.touched for one in seen],
        [one.untouched for one in seen],
        [one.budget for one in seen],
    )
    return Memory(*(round(statistics.median(part)) for part in parts))


def _beside_ours(one: ArmResult, best: ArmResult | None) -> ArmResult:
    if best is None or not best.load_cost or one.load_cost is None or best.load_cost <= 0:
        return one
    return replace(one, times_ours=one.load_cost / best.load_cost)
