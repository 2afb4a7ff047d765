"""Half of the scheduler where there is no store: not yet, or never."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm.metadata import RankLayout, StepMetadata, StepReport


class IdleHalf:
    """Half of an engine that kvtier does not serve: the methods of
    :class:`~kvtier.connectors.vllm.scheduler_side.scheduler.SchedulerHalf` that vLLM's hooks
    call."""

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return 0, False

    def step(self, output: Any) -> StepMetadata:
        return StepMetadata(None)

    def report(self, report: StepReport) -> None:
        return

    def _pass(self, *told: Any) -> None:
        return

    new = allocated = finished = clear = _pass

    def sources(self, request: Any) -> dict[str, int]:
        return {}

    def counts(self) -> dict[str, float]:
        return {}

    def expects_reports(self) -> bool:
        return False

    def events(self) -> list[Any]:
        return []

    def close(self) -> bool:
        return True


class StartingHalf(IdleHalf):
    """Half that lets requests wait until each of ``ranks`` workers has told its layout. That takes
    one step, without tokens if there is nothing to compute."""

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
