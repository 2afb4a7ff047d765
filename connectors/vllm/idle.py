"""The scheduler's half of an engine that kvtier leaves alone: nothing is served, nothing is kept."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm.metadata import StepMetadata, StepReport


class IdleHalf:
    """Has the calls of :class:`kvtier.connectors.vllm.scheduler.SchedulerHalf` that vLLM's hooks lead to."""

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        return

    def step(self, output: Any) -> StepMetadata:
        return StepMetadata(None)

    def report(self, report: StepReport) -> None:
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
