"""Jobs that have ended in a rank since vLLM and the scheduler's half were last told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.connectors.vllm.metadata import Job, LoadEnd, StepReport
from kvtier.connectors.vllm.worker_side.extension import JobEnd


@dataclass(slots=True)
class _LoadInParts:
    under_way: int = 0
    """Number of parts that have begun and not ended."""
    lacking: set[int] = field(default_factory=set)
    """Blocks that may not be kept, because a part failed."""
    end: LoadEnd | None = None


class JobEnds:
    """Ends of jobs, for vLLM and the scheduler's half. vLLM is told of each load exactly once, and
    of a load in parts (:mod:`kvtier.connectors.vllm.scheduler_side.early`) at its end."""

    def __init__(self) -> None:
        self.report = StepReport()
        """Report to the scheduler's half."""
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._left: set[int] = set()
        self._in_parts = dict[int, _LoadInParts]()
        """Number of the load -> its state."""

    def expect(self, job: Job) -> None:
        """Count a part of a load as under way, until it has ended."""
        if job.part_of is not None:
            load = self._in_parts.setdefault(job.part_of, _LoadInParts())
            load.under_way, load.end = load.under_way + 1, job.end

    def refuse(self, job: Job) -> None:
        """Fail a job of a load that other weights have computed. If the load ends with it, nothing
        of the load is kept."""
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
        """Report the end of a job, to the store for its slots, and to vLLM for the request."""
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
        """Return requests whose load has ended since the last call, and those whose load failed."""
        ended = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return ended

    def take_blocks(self) -> tuple[set[int], set[int]]:
        """Return blocks of failed loads since the last call, and those that loads in parts have
        left to be computed."""
        blocks = self._bad_blocks, self._left
        self._bad_blocks, self._left = set(), set()
        return blocks

    def take_report(self) -> StepReport:
        report, self.report = self.report, StepReport()
        return report
