"""Jobs that have ended in a rank since vLLM and the scheduler's half were last told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.connectors.vllm.metadata import Job, LoadEnd, StepReport
from kvtier.connectors.vllm.worker_side.extension import JobEnd


@dataclass(slots=True)
class _LoadInParts:
    under_way: int = 0
    """Parts that have begun and not ended."""
    lacking: set[int] = field(default_factory=set)
    """Blocks that may not be kept."""
    end: LoadEnd | None = None


class JobEnds:
    """vLLM is told of each load exactly once, and of a load in parts
    (:mod:`kvtier.connectors.vllm.scheduler_side.early`) at its end."""

    def __init__(self) -> None:
        self.report = StepReport()
        """For the scheduler's half."""
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._left: set[int] = set()
        self._in_parts = dict[int, _LoadInParts]()
        """By the number of the load."""

    def expect(self, job: Job) -> None:
        """A part of a load is under way until it has ended."""
        if job.part_of is not None:
            load = self._in_parts.setdefault(job.part_of, _LoadInParts())
            load.under_way, load.end = load.under_way + 1, job.end

    def refuse(self, job: Job) -> None:
        """Other weights have computed what this job would load. Nothing is kept of the load that
        ends with it."""
        if job.end is not None:
            self._in_parts[job.end.number].lacking.update(job.end.blocks)
        self.ended(job, failed=True)

    def ended(self, job: Job, *, failed: bool) -> None:
        if job.part_of is None:
            self.told(JobEnd(job.number, job.request_id, job.blocks, failed))
            return
        self.told(JobEnd(job.number, None, (), failed))
        load = self._in_parts[job.part_of]
        load.under_way -= 1
        if failed:
            load.lacking.update(job.blocks)
        if load.end is not None and not load.under_way:
            self.ended_in_parts(load.end)

    def told(self, end: JobEnd) -> None:
        """The store gets the job's slots back, and vLLM hears of the request."""
        number, request_id, blocks, failed = end
        (self.report.failed if failed else self.report.done)[number] += 1
        if request_id is not None:
            self._finished.add(request_id)
            if failed:
                self._failed.add(request_id)
                self._bad_blocks.update(blocks)

    def ended_in_parts(self, end: LoadEnd) -> None:
        self.told(JobEnd(end.number, end.request_id, (), failed=False))
        self._left.update(end.blocks[end.kept :])
        self._left |= self._in_parts.pop(end.number, _LoadInParts()).lacking

    def take_transfers(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those whose load failed."""
        ended = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return ended

    def take_blocks(self) -> tuple[set[int], set[int]]:
        """Blocks of failed loads since the last call, and those that loads in parts have left to be
        computed."""
        blocks = self._bad_blocks, self._left
        self._bad_blocks, self._left = set(), set()
        return blocks

    def take_report(self) -> StepReport:
        report, self.report = self.report, StepReport()
        return report
