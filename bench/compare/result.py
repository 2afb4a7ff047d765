"""Measures of an arm in one round of the comparison, and its rows. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvtier.bench.compare.calls import Step
from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.long_doc_qa.arms import GPU_HIT, NONE
from kvtier.bench.report import Row, mean_row, median_row
from kvtier.bench.requests.client import Outcome, answers

_HELD = ("load cost", "CPU a GiB of hits", "look-up", "look-up, cold", "connector, a load")
"""Rows whose limit is the value of the kvtier arm with which an arm is compared."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Time of one answer, from the answer before it until the engine was idle, in seconds. None:
    not measured.

    ``cpu_s``: of the engine's and its companion's processes. ``calls``: the engine's time in its
    connector, by entry point. ``look_up_s``: from the first question to the connector to its
    definite answer.
    """

    cpu_s: float | None
    calls: Mapping[str, float] | None = None
    look_up_s: float | None = None

    @property
    def in_connector(self) -> float | None:
        return None if self.calls is None else sum(self.calls.values())


_NOT_MEASURED = Effort(None)


@dataclass(frozen=True, slots=True)
class Pair:
    """A question whose document had to be loaded, and then one whose document was in vLLM's own
    cache."""

    loaded: Outcome
    warm: Outcome
    load: Effort = _NOT_MEASURED
    rest: Effort = _NOT_MEASURED

    @property
    def cost(self) -> float:
        assert self.loaded.ttft is not None and self.warm.ttft is not None
        return self.loaded.ttft - self.warm.ttft

    @property
    def more_cpu_s(self) -> float | None:
        return _less(self.load.cpu_s, self.rest.cpu_s)

    @property
    def in_connector(self) -> float | None:
        return _less(self.load.in_connector, self.rest.in_connector)


@dataclass(frozen=True, slots=True)
class Again:
    """Every document asked about once more, by an engine that has seen none of them. ``error``: why
    that could not be measured."""

    outcomes: Sequence[Outcome] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One arm in one round of the comparison. None and empty mean: not measured.

    Attributes:
        outcomes: of the query round.
        fill: prompt tokens a second of the round before, in which nothing could be reused.
            ``fill_tokens``, ``fill_efforts``: its prompt tokens, and what its answers took.
        pairs: in turn a question whose document has to be loaded, and one whose document is then in
            vLLM's own cache. ``pair_efforts``: what these took.
        second: what another engine beside this one found.
        restart: what this one found after a restart.
        mode: how its engine ran.
    """

    arm: str
    outcomes: Sequence[Outcome]
    fill: float | None = None
    fill_tokens: int = 0
    fill_efforts: Sequence[Effort] = ()
    pairs: Sequence[Outcome] = ()
    pair_efforts: Sequence[Effort] = ()
    second: Again | None = None
    restart: Again | None = None
    mode: str | None = None

    @property
    def twos(self) -> list[Pair]:
        """The pairs of which both were answered."""
        efforts = self.pair_efforts or [_NOT_MEASURED] * len(self.pairs)
        parts = (self.pairs[::2], self.pairs[1::2], efforts[::2], efforts[1::2])
        twos = [Pair(*four) for four in zip(*parts, strict=True)]
        return [two for two in twos if two.loaded.ttft is not None and two.warm.ttft is not None]

    @property
    def compared(self) -> list[Sequence[Outcome]]:
        """The rounds whose answers are compared. A question may be asked in several of them."""
        again = [one.outcomes for one in (self.second, self.restart) if one is not None]
        return [self.outcomes, *again]

    @property
    def answered(self) -> list[Outcome]:
        return [one for outcomes in self.compared for one in outcomes]


def efforts(
    notes: Sequence[tuple[float, float | None]], steps: Sequence[Step] | None
) -> list[Effort]:
    """One for each answer. ``notes``: ``time.perf_counter()`` and CPU seconds so far, before the
    first question and after each answer. A step belongs to the answer before whose note it ended,
    and one after the last note to the last. ``steps``: those of the same engine, or None where they
    could not be read."""
    made = []
    for place, ((begun, cpu), (ended, cpu_then)) in enumerate(pairwise(notes), start=2):
        cpu_s = _less(cpu_then, cpu)
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


def rows(arms: Sequence[Contender], runs: Sequence[Run], token_bytes: int = 0) -> list[Row]:
    """Every arm, in order. A value is None for what did not run. ``token_bytes``: of KV."""
    made: dict[str, Row] = {}
    for arm in arms:
        own = [run for run in runs if run.arm == arm.name]
        made |= {f"{arm.name}: {row.name}": row for row in _rows(arm, own, token_bytes)}
    held = {f"{arm.name}: {what}": f"{arm.like}: {what}" for arm in arms for what in _HELD}
    for arm in arms:
        held[f"{arm.name}: ttft mean"] = f"{GPU_HIT}: ttft mean"
        what = "throughput, nothing reused"
        held[f"{arm.name}: {what}"] = f"{NONE}: {what}"
    return [_held(name, row, made.get(held.get(name, ""))) for name, row in made.items()]


def _held(name: str, row: Row, bound: Row | None) -> Row:
    """The row with its whole name, beside what it is compared with."""
    if bound is None or row.value is None or not bound.value or bound.value < 0:
        return replace(row, name=name)
    return replace(row, name=name, limit=bound.value, ratio=row.value / bound.value)


def _rows(arm: Contender, runs: Sequence[Run], token_bytes: int) -> Iterator[Row]:
    """Without the arm's name."""
    ttft = [one.ttft for run in runs for one in run.outcomes if one.ttft is not None]
    if not ttft:
        yield Row("ttft mean", None, "s")
        return
    twos = [two for run in runs for two in run.twos]
    filled = [effort for run in runs for effort in run.fill_efforts]
    yield mean_row("ttft mean", ttft, "s")
    if twos:
        yield median_row("load cost", [two.cost for two in twos], "s")
    fills = [run.fill for run in runs if run.fill is not None]
    if fills:
        yield Row("throughput, nothing reused", statistics.median(fills), "tokens/s")
    cpu = cpu_row(twos, token_bytes)
    if cpu is not None:
        yield cpu
    for what, seconds in (
        ("look-up", [two.load.look_up_s for two in twos]),
        ("look-up, cold", [effort.look_up_s for effort in filled]),
        ("connector, a load", [two.in_connector for two in twos]),
    ):
        told = [1000 * one for one in seconds if one is not None]
        if told and arm.connector is not None:
            yield median_row(what, told, "ms")
    spent = [effort.in_connector for effort in filled]
    if fills and spent and None not in spent:
        a_token = sum(one or 0.0 for one in spent) / sum(run.fill_tokens for run in runs)
        yield Row("connector, of the fill", 100 * a_token * statistics.median(fills), "%")
    for what, found in (
        ("second engine", [run.second for run in runs if run.second]),
        ("after a restart", [run.restart for run in runs if run.restart]),
    ):
        yield from _again_rows(what, found[-1:])


def _again_rows(what: str, found: Sequence[Again]) -> Iterator[Row]:
    for again in found:
        times = [one.ttft for one in again.outcomes if one.ttft is not None]
        if not times:
            yield Row(f"{what}, ttft mean", None, "s")
            continue
        yield mean_row(f"{what}, ttft mean", times, "s")
        cached = sum(one.cached_tokens or 0 for one in again.outcomes)
        asked = sum(one.prompt_tokens for one in again.outcomes)
        yield Row(f"{what}, cached", 100 * cached / max(1, asked), "%")


def cpu_row(pairs: Sequence[Pair], token_bytes: int) -> Row | None:
    """CPU seconds for each GiB of hits: what the loaded one of a pair took beyond the warm one,
    divided by the bytes that came. The true median lies between min and max in 19 cases of 20.
    None when fewer than two pairs have a hit."""
    more = [(one.more_cpu_s, (one.loaded.cached_tokens or 0) * token_bytes) for one in pairs]
    each = sorted(cpu_s / size * 2**30 for cpu_s, size in more if cpu_s is not None and size)
    if len(each) < 2:
        return None
    # of a median's bounds, by the binomial law
    rank = max(0, round(len(each) / 2 - 0.98 * math.sqrt(len(each))) - 1)
    middle = statistics.median(each)
    return Row("CPU a GiB of hits", middle, "s", min=each[rank], max=each[-1 - rank])


def about(
    arms: Sequence[Contender], runs: Sequence[Run], reasons: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Facts of every arm beside its rows. ``reasons``: why some could not run."""
    reference = _reference(runs)
    return {
        arm.name: {
            "about": arm.about,
            "held_against": arm.like,
            "note": arm.note,
            "cannot_run": reasons.get(arm.name),
            "runs": sum(run.arm == arm.name for run in runs),
            "failed_requests": sum(
                not one.successful for run in runs if run.arm == arm.name for one in run.answered
            ),
            "answers_unlike_none": unlike(arm.name, runs, reference),
        }
        for arm in arms
    }


def unlike(arm: str, runs: Sequence[Run], reference: Mapping[Any, object] | None) -> int | None:
    own = [run for run in runs if run.arm == arm]
    if reference is None or arm == NONE or not own:
        return None
    told = [one for run in own for outcomes in run.compared for one in answers(outcomes).items()]
    return sum(answer != reference.get(asked, answer) for asked, answer in told)


def _reference(runs: Sequence[Run]) -> dict[tuple[int, int], object] | None:
    """Answers of ``none`` to each question. For questions that it is not asked: what
    another arm answered when nothing was cached."""
    if not any(run.arm == NONE for run in runs):
        return None
    found: dict[tuple[int, int], object] = {}
    for run in sorted(runs, key=lambda run: run.arm != NONE):
        sure = run.answered if run.arm == NONE else [o for o in run.answered if not o.cached_tokens]
        found = answers(sure) | found
    return found


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other
