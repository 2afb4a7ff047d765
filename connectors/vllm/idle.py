"""The scheduler's half where there is no store: not yet, or never."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm.metadata import RankLayout, StepMetadata, StepReport


class IdleHalf:
    """Of an engine that kvtier leaves alone: nothing is served, nothing is kept. Has the calls of
    :class:`kvtier.connectors.vllm.scheduler.SchedulerHalf` that vLLM's hooks lead to."""

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        return

    def step(self, output: Any) -> StepMetadata:
        return StepMetadata(None)

    def report(self, report: StepReport) -> None:
        return

    def new(self, request: Any) -> None:
        return

    def finished(self, request: Any) -> None:
        return

    def sources(self, request: Any) -> dict[str, int]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}

    def expects_reports(self) -> bool:
        return False

    def clear(self) -> None:
        return

    def close(self) -> bool:
        return True


class StartingHalf(IdleHalf):
    """Until every one of ``ranks`` workers has told its layout: a request waits. That takes one
    step, which runs without tokens if there is nothing to compute."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.layouts: dict[tuple[int, int], RankLayout] = {}

    @property
    def complete(self) -> bool:
        return len(self.layouts) == self._ranks

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return None, False

    def step(self, output: Any) -> StepMetadata:
        return StepMetadata(None, asks_layout=True)

    def report(self, report: StepReport) -> None:
        self.layouts |= report.layouts

    def expects_reports(self) -> bool:
        return True
