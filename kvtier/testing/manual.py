"""A lane that tests turn by hand: work runs when the test says so, in the order the test says."""

from __future__ import annotations

from kvtier.core.lanes import Work


class ManualLane:
    """Queues like :class:`kvtier.core.lanes.Lane`, runs nothing by itself. Single-threaded."""

    threads = 1
    failures = 0

    def __init__(self, *, urgent_bound: int = 1024, bound: int = 1024) -> None:
        self._bounds = {True: urgent_bound, False: bound}
        self.queues: dict[bool, list[Work]] = {True: [], False: []}
        self.closed = False

    @property
    def queued(self) -> tuple[int, int]:
        return len(self.queues[True]), len(self.queues[False])

    @property
    def is_idle(self) -> bool:
        return not len(self)

    def __len__(self) -> int:
        return sum(self.queued)

    def submit(self, work: Work, *, urgent: bool = False) -> bool:
        if self.closed or len(self.queues[urgent]) >= self._bounds[urgent]:
            return False
        self.queues[urgent].append(work)
        return True

    def turn(self, index: int = 0) -> None:
        """Run the ``index``-th queued work, urgent work first."""
        urgent = self.queues[True]
        queue, place = (
            (urgent, index) if index < len(urgent) else (self.queues[False], index - len(urgent))
        )
        queue.pop(place)()

    def run(self) -> None:
        """Run until nothing is queued, including what the work itself queues."""
        while len(self):
            self.turn()

    def close(self, timeout_s: float) -> bool:
        self.run()
        self.closed = True
        return True
