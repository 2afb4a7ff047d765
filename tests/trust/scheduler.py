"""World: one seeded scheduler with virtual time, under which real product code runs in any order of
its steps.

Every task is a real thread, but only the one that holds the baton runs. The baton changes hands at
*steps*: before a lock is taken, at a wait, and inside every simulated I/O. Who goes next is drawn
from the seed, so a seed is a whole history: the same order of steps, faults and deaths every time
(with a fixed PYTHONHASHSEED, because sets of keys are walked here and there). The product's own
``threading`` and ``time`` are replaced module by module while a world lasts. Nothing of the product
is changed for it.

A process is what dies at once: from then on each of its primitives raises :class:`Dead`, so that
nothing it was doing goes on, whatever its ``finally`` clauses try.

After the simulation testing of FoundationDB (Zhou et al., SIGMOD 2021, section 4) and TigerBeetle's
VOPR.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

TICK_S = 0.001
"""Virtual seconds that one step takes."""
LONGEST = 50_000
"""Steps of one world. Thirty times what the longest takes."""
_NEVER = float("inf")


class Dead(BaseException):
    """The process that this step belongs to has died."""


class ViolationError(BaseException):
    """A promise is broken. Not an Exception: the product's own nets must not catch it."""


class Process:
    """What dies together."""

    def __init__(self, name):
        self.name = name
        self.dead = False


class Task:
    """One thread of the simulation."""

    def __init__(self, name, process, baton):
        self.name = name
        self.process = process
        self.baton = baton
        self.parked = False
        self.parked_in: Process | None = None
        self.wake_at = _NEVER
        self.steps = 0
        self.locks = 0
        self.failed = False
        """An I/O of its current write was refused or cut short."""
        self.calling = False
        """It is an engine inside a call, which may neither wait nor do I/O."""


class _Runner(threading.Thread):
    """A thread that is lent to one task after the other, over all worlds: starting threads is what
    costs."""

    idle: list[_Runner] = []  # noqa: RUF012 - shared on purpose

    def __init__(self):
        super().__init__(daemon=True, name="trust")
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job: Callable[[], Task] = lambda: Task("", None, self.baton)
        self.start()

    def run(self):
        while True:
            self.baton.acquire()
            job = self.job
            self.job = lambda: Task("", None, self.baton)
            heir = job()
            del job
            self.idle.append(self)
            heir.baton.release()
            del heir


class World:
    """Tasks, their baton, the clock and the dice. The thread that makes it is the task "main"."""

    def __init__(self, seed, *, trace=False):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.trace: list[str] | None = [] if trace else None
        self.injected: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.over = False
        self.dirty = True
        """A lock was let go since the last look: something may have changed."""
        self.quiet = False
        """Primitives are plain: for looks from outside."""
        self.sticky = self.rng.choice((0.0, 0.3, 0.6, 0.85))
        self.fault_rate = 0.0
        self.opening: Process | None = None
        """Whose primitives are being made."""
        self.observe: Callable[[], None] = lambda: None
        """After every step that may have changed something."""
        self.alarm_at = _NEVER
        """The step at which to :attr:`ring`, which says when next."""
        self.ring: Callable[[], float] = lambda: _NEVER
        baton = threading.Lock()
        baton.acquire()
        self.main = self.current = Task("main", None, baton)
        self.tasks = [self.main]

    @property
    def making(self):
        """The process of what is made now."""
        return self.opening if self.current is self.main else self.current.process

    # ---- for product code, through the primitives below ------------------------------------------

    def step(self, process, what):
        """Somebody else may go now. Raises Dead when ``process`` has died."""
        if self.quiet:
            return
        self._alive(process)
        self.steps += 1
        if self.steps > LONGEST:
            raise ViolationError("work that never ends")
        self.now += TICK_S
        self.current.steps += 1
        if self.trace is not None:
            self.trace.append(f"{self.steps:5} {self.now:8.3f} {self.current.name:12} {what}")
        if self.dirty:
            self.dirty = False
            self.observe()
        if self.steps >= self.alarm_at:
            self.alarm_at = self.ring()
        if self.rng.random() >= self.sticky:
            self._switch()
        self._alive(process)

    def io(self, process, what):
        """A step in the middle of an I/O."""
        if self.quiet:
            return
        if self.current.locks:
            raise ViolationError(f"{what}: I/O with a lock held")
        if self.current.calling:
            raise ViolationError(f"{what}: an engine's call does I/O itself")
        self.step(process, what)

    def fault(self, kind, factor=1.0):
        """Does this happen now?"""
        if not self.fault_rate or self.rng.random() >= self.fault_rate * factor:
            return False
        self.injected[kind] += 1
        self.say(f"fault: {kind}")
        return True

    def sleep(self, seconds, process=None):
        self.park(process, seconds)
        self._alive(process)

    def park(self, process, timeout):
        """Let the others run until somebody unparks this task or its time is up."""
        me = self.current
        me.parked, me.parked_in = True, process
        me.wake_at = _NEVER if timeout is None else self.now + max(0.0, timeout)
        self._switch()
        me.parked, me.wake_at = False, _NEVER

    def say(self, what):
        if self.trace is not None:
            self.trace.append(f"{self.steps:5} {self.now:8.3f} {self.current.name:12} - {what}")

    # ---- for the simulation ----------------------------------------------------------------------

    def spawn(self, name, body, process=None):
        runner = _Runner.idle.pop() if _Runner.idle else _Runner()
        task = Task(name, process, runner.baton)

        def job():
            try:
                self._alive(process)
                body()
            except Dead:
                pass
            except BaseException as error:  # noqa: BLE001 - it is the finding
                self.fail(error)
            return self._ended(task)

        runner.job = job
        self.tasks.append(task)
        return task

    def kill(self, process):
        """Nothing of it runs on: who waits in it wakes up to die."""
        process.dead = True
        for task in self.tasks:
            if task.parked and (task.parked_in is process or task.process is process):
                task.parked = False

    def settle(self, longest_s=10_000.0):
        """Return when every other task waits for something that will not come by itself."""
        until = self.now + longest_s
        while any(
            not task.parked or task.wake_at < _NEVER for task in self.tasks if task is not self.main
        ):
            if self.now > until:
                raise ViolationError("work that never ends")
            self.sleep(1.0)

    def fail(self, error):
        if self.failure is None:
            self.failure = error
        self.over = True
        self.quiet = False
        for task in self.tasks:
            task.parked = False

    def end(self):
        """Every task unwinds."""
        self.over, self.quiet = True, False
        for task in self.tasks:
            task.parked = False
        while len(self.tasks) > 1:
            self._switch()

    # ---- the baton -------------------------------------------------------------------------------

    def _alive(self, process):
        if self.current is self.main:
            if self.failure is not None:
                raise self.failure
        elif self.over:
            raise Dead
        if process is not None and process.dead:
            raise Dead

    def _switch(self):
        me = self.current
        other = self._pick()
        if other is not me:
            self.current = other
            other.baton.release()
            me.baton.acquire()

    def _pick(self):
        if self.over:
            return self.tasks[-1]
        ready = [task for task in self.tasks if not task.parked or task.wake_at <= self.now]
        if not ready:
            soonest = min(self.tasks, key=lambda task: task.wake_at)
            if soonest.wake_at == _NEVER:
                raise ViolationError(
                    "everybody waits for ever: " + ", ".join(task.name for task in self.tasks)
                )
            self.now = soonest.wake_at
            return soonest
        return ready[int(self.rng.random() * len(ready))] if len(ready) > 1 else ready[0]

    def _ended(self, task):
        """Who gets the baton of a task that is over."""
        self.tasks.remove(task)
        try:
            heir = self._pick()
        except ViolationError as error:
            self.fail(error)
            heir = self._pick()
        self.current = heir
        return heir


class Lock:
    """threading.Lock. Held across a step it would make others wait: that is a violation."""

    def __init__(self, world):
        self.world = world
        self.process = world.making
        self.owner: Task | None = None

    def acquire(self, blocking=True, timeout=-1):
        world = self.world
        if world.quiet:
            return True
        if not world.current.locks:
            world.step(self.process, "lock")
        if self.owner is not None:
            raise ViolationError(
                f"{world.current.name} waits for a lock that {self.owner.name} holds across a step"
            )
        self.owner = world.current
        world.current.locks += 1
        return True

    def release(self):
        world = self.world
        if self.owner is not None:
            self.owner.locks -= 1
            self.owner = None
        world.dirty = True

    def locked(self):
        return self.owner is not None

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class Condition:
    """threading.Condition over one of these locks."""

    def __init__(self, world, lock=None):
        self.world = world
        self._lock = lock or Lock(world)
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        return self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()

    def wait(self, timeout=None):
        world, me = self.world, self.world.current
        self._lock.release()
        self._waiting.append(me)
        world.park(self._lock.process, timeout)
        notified = me not in self._waiting
        if not notified:
            self._waiting.remove(me)
        self._lock.acquire()
        return notified

    def notify(self, n=1):
        for task in self._waiting[:n]:
            task.parked = False
        del self._waiting[:n]

    def notify_all(self):
        self.notify(len(self._waiting))


class Thread:
    """threading.Thread: a task of the process that is being made."""

    def __init__(self, world, target, name):
        self._world, self._target, self.name = world, target, name
        self._process = world.making
        self._task: Task | None = None

    def start(self):
        self._task = self._world.spawn(self.name, self._target, self._process)

    def join(self, timeout=None):
        world = self._world
        until = _NEVER if timeout is None else world.now + timeout
        while self._task in world.tasks and world.now < until:
            world.sleep(TICK_S * 10, self._process)


class Event:
    """threading.Event over a condition. Its timeouts never pass: who does something once a minute
    for ever would keep the world from settling."""

    def __init__(self, world):
        self._changed, self._is_set = Condition(world), False

    def set(self):
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout=None):
        with self._changed:
            return self._is_set or self._changed.wait(None)


class Threading:
    """What the product's modules find under the name ``threading``."""

    def __init__(self, world):
        self._world = world

    def Condition(self, lock=None):  # noqa: N802 - the name it has there
        return Condition(self._world, lock)

    def Lock(self):  # noqa: N802
        return Lock(self._world)

    def Event(self):  # noqa: N802
        return Event(self._world)

    def Thread(self, *, target, name, **_):  # noqa: N802
        return Thread(self._world, target, name)


class Time:
    """What they find under the name ``time``."""

    def __init__(self, world):
        self._world = world

    def monotonic(self):
        return self._world.now

    time = perf_counter = monotonic

    def monotonic_ns(self):
        return int(self._world.now * 1e9)

    time_ns = perf_counter_ns = monotonic_ns

    def sleep(self, seconds):
        self._world.sleep(seconds)
