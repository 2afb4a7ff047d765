"""What session ends would add: told live from the prompts alone, near to what such hints do add,
bounded, in words for people, and as metrics."""

from __future__ import annotations

import random

import pytest

from kvtier.cli.operate import _size_class_lines
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.lookup import Asker
from kvtier.core.pool import Pool
from kvtier.eviction.adaptive import ALL_LRU, Adaptive
from kvtier.eviction.ends import WINDOW, Ends
from kvtier.eviction.hints import Hint
from kvtier.store.reports.figures import STORE_FIGURES
from kvtier.store.reports.status import SizeClassStatus, read
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from kvtier.traces.mooncake import Request
from kvtier.traces.simulate import Cache, oracle, simulate, unhinted

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "ends"}), 1, 1, (SLOT,))
ROOM = 240


def chats(prompts: int, seed: int = 1) -> list[Request]:
    """Conversations of up to six turns, among prompts that come once. Every one that goes on does
    so within some sixty prompts."""
    draw, going, fresh, found = random.Random(seed), list[list[int]](), 10, list[Request]()
    for number in range(prompts):
        ids = going.pop(0) if len(going) > 30 and draw.random() < 0.6 else [1, 2]
        more = draw.randint(1, 4)
        ids = [*ids, *range(fresh, fresh + more)]
        fresh += more
        if len(ids) < 16 and draw.random() < 0.6:
            going.append(ids)
        found.append(Request(float(number), tuple(LAYOUT.keys(ids)), str(ids[2])))
    return found


def served(trace: list[Request], adaptive: Adaptive | None, *, told: bool = False) -> Store:
    """A Store after these prompts. ``told``: each session says its end."""
    spare = ManualLane(bound=1)
    orders = ALL_LRU if adaptive is None else adaptive.orders()
    store = Store(Pool(ROOM, SLOT), orders=orders, spare=spare)
    spare.run()
    for request in oracle(trace) if told else unhinted(trace):
        with store.load(request.run, asker=Asker(request.session)):
            spare.run()
        with store.save(request.run) as save:
            save.commit()
        if request.hint.over:
            store.hint(request.run, Hint(over=True), request.session)
            spare.run()
    return store


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_it_is_near_to_what_such_hints_add(policy: str) -> None:
    """Where the order adapts, hints change its setting too. That is not tried, so that more is
    added than told."""
    trace = chats(4000)
    plain, hinted = (
        simulate(each, Cache(ROOM, policy=policy)) for each in (unhinted(trace), oracle(trace))
    )
    added = hinted.percent(hinted.hits) - plain.percent(plain.hits)
    status = read(served(trace, Adaptive() if policy == "auto" else None))
    told = 100 * (status.ends_hits_said - status.ends_hits) / status.ends_asked
    assert added > 10
    assert 0.7 * added < told < 1.1 * added
    assert 0.3 * plain.asked < status.ends_asked < plain.asked
    (figure,) = [one for one in STORE_FIGURES if one.name == "whatif_ends_added_ratio"]
    assert figure.values(status) == {(): pytest.approx(told / 100)}


def test_where_sessions_say_it_nothing_is_left_to_add() -> None:
    status = read(served(chats(2000), None, told=True))
    assert status.hints_over > 500
    assert abs(status.ends_hits_said - status.ends_hits) < 0.01 * status.ends_asked


def lines(status: SizeClassStatus) -> str:
    (line,) = [line for line in _size_class_lines(status) if "session ends" in line]
    return line


def test_the_words_say_how_much_and_whether_anybody_says_it() -> None:
    line = lines(read(served(chats(1000), None)))
    assert line.startswith("hints: session ends would add +")
    assert "points (nobody says them; tried with" in line
    line = lines(read(served(chats(1000), None, told=True)))
    assert "that nobody said would add" in line and "sessions said it" in line


def test_before_anything_left_the_window_nothing_is_said() -> None:
    status = read(served([], None))
    assert not [line for line in _size_class_lines(status) if "hints" in line]


def test_the_window_and_the_shadows_are_bounded() -> None:
    ends, longest = Ends(100_000), 0
    for number in range(40_000):
        run = [ChunkKey(bytes([number >> 8, number & 255, at, 0]) * 10) for at in range(24)]
        ends.seen(100_000, run, number, run)
        ends.over(run[:1])
        while ends.serve():
            pass
        longest = max(longest, len(ends._window))
        assert ends._chunks <= WINDOW and len(ends._in_window) <= len(ends._window)
    assert longest <= WINDOW
    assert len(ends._plain) <= 2048 and len(ends._told) <= 2048
    assert ends.asked < 0.03 * 40_000 * 24, "of a large place a part is followed"
    for _ in range(WINDOW + 1000):
        ends.over(run[:1])
        while ends.serve():
            pass
    assert len(ends._window) == WINDOW, "hints have a bound too"
    ends.seen(50, run, 1, run)
    assert ends.part == 1.0 and len(ends._plain) == 0, "another size begins anew"
