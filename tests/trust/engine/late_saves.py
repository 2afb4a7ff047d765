"""Workers of a device whose saves wait for staging memory: blocks are read some time after the step
that saves them, and when the engine waits for them at the latest."""

from collections import deque
from collections.abc import Sequence

from kvtier.gpu.regions import Copy, Job

_SOON = 0.02
"""How often a save is read when it is asked for."""


class LateSave(Copy):
    """A save that nothing has read yet."""

    def __init__(self, saves, jobs):
        super().__init__(jobs)
        self._saves, self.waits = saves, True

    def done(self):
        if self.waits and self._saves.draw.random() < _SOON:
            self._saves.read(self)
        return not self.waits

    def wait(self):
        self._saves.read(self)


class LateSaves:
    """Of one rank's blocks of a group, whose ``save`` and ``settle`` are replaced. Saves are read
    in their order. "saves read late" of ``counts`` are those since which the rank has computed."""

    def __init__(self, paged, draw, counts):
        self.draw, self.computed = draw, 0
        self._copy, self._counts = paged.save, counts
        self._waiting: deque[tuple[LateSave, Sequence[Job], int]] = deque()
        paged.save, paged.settle = self.save, self.settle

    def save(self, jobs):
        copy = LateSave(self, jobs)
        self._waiting.append((copy, jobs, self.computed))
        return copy

    def settle(self):
        while self._waiting:
            self._read_next()

    def read(self, copy):
        while copy.waits:
            self._read_next()

    def _read_next(self):
        copy, jobs, computed = self._waiting.popleft()
        self._copy(jobs)
        copy.waits = False
        self._counts["saves read late"] += self.computed > computed
