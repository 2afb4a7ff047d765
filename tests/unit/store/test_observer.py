"""What watches a Store: it keeps a bounded number of things, whatever it is told, and is called for
what it overrides alone."""

import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import store as room
from kvtier.core.lookup import Asker, Ended, Served
from kvtier.core.pool import Pool
from kvtier.eviction.hints import Hint
from kvtier.store.directory import Directory
from kvtier.store.entry import READY, Entry
from kvtier.store.lower.lower_tier import Core, LowerTier, TierSpec
from kvtier.store.observer import Left, Observer, Observers
from kvtier.store.observers.ages import Ages
from kvtier.store.observers.audit import Audit
from kvtier.store.observers.changes import Changes
from kvtier.store.observers.follower import Follower, UsesSince
from kvtier.store.observers.record import Recorder
from kvtier.store.observers.timings import ComputeCounts, Timings
from kvtier.store.reports.miss_reasons import Past
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.stores import SLOT, filled, keys, save

KEYS = [keys(number)[0] for number in range(100)]


def test_a_watch_that_has_ended_is_told_nothing_and_costs_nothing():
    store = Store(Pool(2, SLOT))
    assert not store._directory.observers.came
    one, two = store.watch(), store.watch()
    one.end()
    save(store, KEYS[:1])
    assert not one.has_changes
    assert [change.key for change in two.changes() or ()] == KEYS[:1]
    two.end()
    assert not store._directory.observers.came


def test_only_what_an_observer_overrides_is_called_and_once():
    class Ends(Observer):
        def finished(self, ended): ...

    observers, one = Observers(Observer()), Ends()
    observers.add(one)
    observers.add(one)
    assert [len(getattr(observers, event)) for event in EVENTS] == [
        int(event == "finished") for event in EVENTS
    ]


BOUND = 8


class LoadedOnce(Audit):
    """Of a Directory with one chunk, which lies in RAM and below. Each load of it is compared."""

    def __init__(self):
        self.lane, directory = ManualLane(bound=BOUND), Directory(1, [1])
        core = Core(nullcontext(), directory, Pool(1, SLOT), Counter(), float)
        lower = LowerTier(core, 0, TierSpec(DictTier(1), self.lane))
        entry = filled(directory, KEYS[0])
        directory.spill_begun(entry, 0)
        directory.spill_ended(entry, 0, stored=True)
        super().__init__(core, [lower], lambda keys: None)
        self.one_in = 1


def begun(made):
    (made.begin(1) if isinstance(made, Ages) else made.hinted())
    return made


ONE = Directory(1), nullcontext()
MADE: dict[type[Observer], tuple[Callable[[], Any], Callable[[Any], int]]] = {
    Audit: (LoadedOnce, lambda made: len(made.lane)),
    Ages: (lambda: begun(Ages(1)), lambda made: len(made._used)),
    UsesSince: (lambda: begun(UsesSince(BOUND)), lambda made: len(made._last_use)),
    Changes: (lambda: Changes(*ONE, ["ram"]), lambda made: len(made._waiting)),
    ComputeCounts: (ComputeCounts, lambda made: len(made.counted())),
    Past: (lambda: Past(ONE[0]), lambda made: len(made._marks) - (1 << 15)),
    Timings: (lambda: Timings(["tier"]), lambda made: len(made._all)),
    Follower: (
        lambda: Follower(*ONE, None, float, {"ram": 1}),
        lambda made: len(made._waiting) + len(made._uses._last_use),
    ),
    Recorder: (
        lambda: Recorder(bytes(32), float),
        lambda made: len(made._waiting) + len(made._open),
    ),
}
"""How each is made, and how many things it keeps."""

MODULES = "kvtier.store.observers"


BOUNDS = (
    "ages._USED_CHUNKS",
    "changes._WAITING_CHANGES",
    "follower._WAITING_NOTES",
    "record._WAITING_NOTES",
    "record._OPEN_PROMPTS",
)
"""Those that no argument gives."""


def tell(observers, event, number, entry):
    key = KEYS[number]
    arguments: dict[str, tuple[object, ...]] = {
        "came": (number % 2, key),
        "left": (number % 2, key, Left.EVICTED),
        "missing": (key, Left.CORRUPT),
        "used": ([key],),
        "stored": ([key],),
        "took": ("spill", "tier", 0.1),
        "loaded": ([entry],),
        "served": (Served(10, {"ram": 5}, [key], 5),),
        "prompt": ([key], Asker(str(number), request=number)),
        "hint": ([key], "", Hint(over=True)),
        "finished": (Ended(number, 1, "stop"),),
    }
    for call in getattr(observers, event):
        call(*arguments[event])


EVENTS = [event for event in vars(Observers()) if event != "all"]


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=True))
def test_whatever_an_observer_is_told_it_keeps_a_bounded_number_of_things(kind, draw):
    entry = Entry(KEYS[0], 0, None, 0)
    entry.state, entry.copies = READY, 1
    with ExitStack() as small:
        for name in BOUNDS:
            small.enter_context(patch(f"{MODULES}.{name}", BOUND))
        make, kept = MADE[kind]
        made = make()
        for _ in range(200):
            tell(Observers(made), draw.choice(EVENTS), draw.randrange(100), entry)
            assert kept(made) <= 2 * BOUND


def test_every_observer_of_kvtier_is_among_those_whose_bound_is_tried():
    found = set[type]()
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        classes = vars(import_module(module.name)).values()
        found |= {one for one in classes if inspect.isclass(one) and issubclass(one, Observer)}
    assert found - {Observer} == set(MADE)
