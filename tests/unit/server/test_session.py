"""Session: leases are the session's own, limits hold, and what no correct client asks is refused.
And owners."""

from typing import Any

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.pool import Pool
from kvtier.core.steps import whole
from kvtier.protocol import wire
from kvtier.protocol.wire import WireError
from kvtier.server import session as session_module
from kvtier.server.registry import SizeClass
from kvtier.server.shares import ScanLimiter, Shares
from kvtier.server.stream import ChunkStream
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.answering import Session
from tests.clock import Clock
from tests.stores import LAYOUT, SLOT, over


def blob(*tokens):
    return wire.joined(LAYOUT.keys(list(tokens)))


@pytest.fixture
def store():
    return Store(Pool(8, SLOT))


@pytest.fixture
def session(store):
    return Session(store, 1)


def save(session, *tokens):
    slots = session.answer(wire.Save(0, blob(*tokens)))
    if slots.lease:
        session.answer(wire.Commit(slots.lease))


def test_a_save_names_the_places_of_what_is_new(session):
    save(session, 1, 2)
    assert session.answer(wire.Save(7, blob(1, 2, 3, 4))) == wire.Slots(7, 2, [2, 3], [2, 3])
    assert session.answer(wire.Save(8, blob(1, 2))) == wire.Slots(8, 0, [], [])


def test_slots_that_have_other_memory_are_named_with_each_lease_that_has_them(store, session):
    save(session, *range(8))
    for times in (1, 2):
        whole(store.sharing.limit({"ram": 0}))
        whole(store.sharing.limit({"ram": 8}))
        saved = session.answer(wire.Save(0, blob(*range(100 * times, 100 * times + 3))))
        assert saved.renewed == [(slot, times) for slot in saved.slots]
        session.answer(wire.Commit(saved.lease))
    loaded = session.answer(wire.LoadCall(0, blob(200, 201, 202), 0))
    assert loaded.renewed == [(slot, 2) for slot in loaded.slots]
    assert len(loaded.renewed) == 3


def test_leases_end_with_the_session_and_its_share_is_free(store):
    shares = Shares(lambda: store.most_held)
    session, other = Session(store, 1, shares), Session(store, 2, shares)
    save(session, 1, 2)
    session.answer(wire.LoadCall(0, blob(1, 2), 0))
    session.answer(wire.Save(0, blob(3)))
    assert session.leases == 2
    session.end()
    store.check(idle=True)
    assert session.leases == 0
    assert taken(other.answer(wire.Save(0, blob(*range(10, 18))))) == 6, "as if it was alone"


@pytest.mark.parametrize(
    "question",
    [
        wire.Commit(9),
        wire.End(9),
        wire.Poll(1, 9, 0),
        wire.Commit(2),
        wire.Poll(1, 1, 0),
        wire.Poll(1, 2, 3),
        wire.Save(1, blob(1) * 2),
        wire.LookupCall(1, bytes(41)),
    ],
)
def test_what_no_correct_client_asks(store, session, question):
    """Lease 1 is a save, lease 2 a load of two chunks."""
    save(Session(store, 1), 5, 6)
    session.answer(wire.Save(0, blob(1)))
    session.answer(wire.LoadCall(0, blob(5, 6), 0))
    with pytest.raises(WireError):
        session.answer(question)
    session.end()
    store.check(idle=True)


def test_one_session_cannot_hold_the_whole_pool(store, session):
    first = session.answer(wire.Save(0, blob(*range(8))))
    assert len(first.slots) == 6, "one message asks for all, and gets three quarters"
    assert session.answer(wire.Save(0, blob(9))) == wire.Slots(0, 0, [], [])
    assert session.answer(wire.LoadCall(0, blob(9), 0)) == wire.Claim(0, 0, 0, [], b"")
    session.answer(wire.Commit(first.lease))
    assert session.answer(wire.Save(0, blob(9))) == wire.Slots(0, 2, [0], [6])


def test_a_lookup_says_what_the_engine_may_hold_beside_others(store):
    shares = Shares(lambda: store.most_held)
    first, second = Session(store, 1, shares), Session(store, 2, shares)

    def most(session):
        return session.answer(wire.LookupCall(0, blob(1))).most_held

    assert most(first) == most(second) == 7, "of eight slots one is a reserve"
    lease = first.answer(wire.Save(0, blob(*range(4))))
    assert (most(first), most(second)) == (7, 3), "its own count, and others' do not"
    first.answer(wire.Commit(lease.lease))
    assert most(second) == 7


def test_a_load_pins_no_more_than_the_engine_can_use(store, session):
    save(session, *range(4))
    claim = session.answer(wire.LoadCall(0, blob(*range(4)), 1, 2))
    assert (len(claim.slots), claim.coming, session._share.held) == (2, 0, 2)
    session.end()
    store.check(idle=True)


def test_a_load_holds_what_a_shared_tier_may_still_bring():
    store, (lane,) = over(DictTier(64, shared=True), slots=8)
    session = Session(store, 1)
    claim = session.answer(wire.LoadCall(0, blob(*range(100)), 0))
    assert session.answer(wire.Save(0, blob(9))) == wire.Slots(0, 0, [], []), "six may come"
    lane.run()
    session.answer(wire.Poll(0, claim.lease, 0))
    assert len(session.answer(wire.Save(0, blob(9))).slots) == 1
    session.end()
    store.check(idle=True)


class Engines:
    """Sessions over one Store with 64 slots, as engines of one server have them."""

    def __init__(self, share=None):
        self.store = Store(Pool(64, SLOT), share=share)
        self.shares = Shares(lambda: self.store.most_held)

    def session(self, owner):
        return Session(self.store, owner, self.shares, ScanLimiter(Clock()))


def test_an_engine_that_stops_while_it_fills_all_it_can_leaves_the_others_room():
    engines = Engines()
    stopped, honest = engines.session(1), engines.session(2)
    slots = stopped.answer(wire.Save(0, blob(*range(64))))
    assert isinstance(slots, wire.Slots) and len(slots.slots) == 54
    for token in range(100, 200):
        save(honest, token)
        assert engines.store.lookup(LAYOUT.keys([token])).ready == 1
    engines.store.check()
    assert engines.store.stats()["ram_filling"] == 54
    assert engines.store.stats()["save_refused"] == 10


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_two_engines_that_ask_at_once_get_no_more_than_one_after_the_other(loads):
    store = Store(Pool(2048, SLOT))
    shares = Shares(lambda: store.most_held)
    runs = [LAYOUT.keys([first, *range(999)]) for first in (10_001, 10_002)]
    if loads:
        for run in runs:
            with store.save(run) as lease:
                lease.commit()
    kind = wire.LoadCall if loads else wire.Save
    rest: list[Any] = [0] if loads else []
    alone, after = (Session(store, owner, shares) for owner in (1, 2))
    first = taken(alone.answer(kind(0, wire.joined(runs[0]), *rest)))
    second = taken(after.answer(kind(0, wire.joined(runs[1]), *rest)))
    alone.end()
    after.end()
    assert first == 1000 > second
    sessions = [Session(store, owner, shares) for owner in (1, 2)]
    works = [
        one.begin(kind(0, wire.joined(run), *rest)) for one, run in zip(sessions, runs, strict=True)
    ]
    got = []
    while works:
        for work in list(works):
            try:
                next(work)
            except StopIteration as done:
                got.append(taken(done.value))
                works.remove(work)
    assert sum(got) <= first + second
    for session in sessions:
        session.end()
    store.check(idle=True)


def test_a_stream_that_looks_for_a_long_run_holds_its_slots_while_it_looks():
    size_class = SizeClass(Store(Pool(2048, SLOT)), lambda call: None)
    keys, sent = LAYOUT.keys(range(1500)), list[bytes | memoryview]()
    with size_class.store.save(keys) as lease:
        lease.commit()
    one, other = (
        ChunkStream(size_class, 1, SLOT, sent.append, lambda: None, client) for client in "ab"
    )
    most = other._share.left
    looking = one.begin(wire.Find(1, wire.joined(keys)))
    while not any(entry.pins for entry in map(size_class.store._directory.get, keys) if entry):
        next(looking)
    assert other._share.left < most // 2
    whole(looking)
    assert other._share.left == most
    assert sent == [wire.frame(wire.Found(1, len(keys)))]
    size_class.store.check(idle=True)


def taken(answer):
    return len(answer.slots)


# ---- pieces --------------------------------------------------------------------------------------

LONG = LAYOUT.keys(range(3000))
MESSAGES: dict[str, wire.Question] = {
    "lookup": wire.LookupCall(1, wire.joined(LONG)),
    "known": wire.KnownCall(1, wire.joined(LONG)),
    "save": wire.Save(1, wire.joined(LONG)),
    "load": wire.LoadCall(1, wire.joined(LONG), 0),
    "invalidate": wire.Invalidate(wire.joined(LONG)),
    "hint": wire.HintCall(wire.joined(LONG), True, 0.0),
    "served": wire.ServedCall(256 * len(LONG), [0], wire.joined(LONG), 256, 0),
    "clear": wire.InvalidateAllCall(),
    "check": wire.Check(1, False),
    "end": wire.End(1),
    "commit": wire.Commit(1),
}
ONE_PIECE = 1024


class Counting:
    """A lock that counts, between two of its holders, how many chunks the Directory was asked
    about."""

    def __init__(self, store, monkeypatch):
        self.calls = 0
        for name in ("get", "reserve", "pin", "unpin", "filled", "invalidate"):
            monkeypatch.setattr(
                store._directory, name, self._counted(getattr(store._directory, name))
            )
        for name in ("used", "ordered"):
            monkeypatch.setattr(
                store._directory, name, self._counted_run(getattr(store._directory, name))
            )

    def _counted_run(self, method):
        def counted(run):
            self.calls += len(run)
            method(run)

        return counted

    def _counted(self, method):
        def counted(*words):
            self.calls += 1
            return method(*words)

        return counted


@pytest.mark.parametrize("question", MESSAGES)
def test_a_message_about_thousands_of_chunks_is_worked_on_in_short_pieces(question, monkeypatch):
    store, (lane,) = over(DictTier(1), slots=4096, bound=1)
    session = Session(store, 1, None, ScanLimiter(Clock()))
    if question not in {"save", "commit"}:
        save(session, *range(3000))
    if question == "end":
        session.answer(wire.LoadCall(0, wire.joined(LONG), 0))
    if question == "commit":
        session.answer(wire.Save(0, wire.joined(LONG)))
    asked = MESSAGES[question]
    asked = wire.End(2) if question == "end" else asked
    counting, pieces = Counting(store, monkeypatch), []
    work = session.begin(asked)
    going = True
    while going:
        counting.calls = 0
        going = next(work, None) is not None
        pieces.append(counting.calls)
        store.check()
    assert len(pieces) >= 3000 // ONE_PIECE
    assert max(pieces) <= ONE_PIECE
    session.end()
    lane.run()
    store.check(idle=True)


@pytest.mark.parametrize("question", ["save", "load"])
def test_what_is_left_in_the_middle_goes_back(question):
    store = Store(Pool(4096, SLOT))
    session = Session(store, 1)
    if question == "load":
        save(session, *range(3000))
    work = session.begin(MESSAGES[question])
    while not store.stats()["ram_filling"] + store.stats()["ram_pinned"]:
        next(work)
    work.close()
    store.check(idle=True)
    assert session.leases == 0


def test_the_number_of_leases_is_bounded(session, monkeypatch):
    monkeypatch.setattr(session_module, "_MAX_LEASES", 2)
    save(session, 1)
    answers = [session.answer(wire.LoadCall(0, blob(1), 0)) for _ in range(3)]
    assert [answer.lease for answer in answers if isinstance(answer, wire.Claim)] == [2, 3, 0]


def test_a_claim_says_what_is_new_since_the_last_and_where_from():
    tier, lane = DictTier(8), ManualLane(urgent_bound=8, bound=8)
    store = Store(Pool(8, SLOT), [(tier, lane)])
    session = Session(store, 1)
    save(session, 1, 2)
    lane.run()
    first, second = LAYOUT.keys([1, 2])
    for key in (first, second):
        assert key in tier.held
    again = Store(Pool(8, SLOT), [(tier, lane)])
    session = Session(again, 1)
    assert session.answer(wire.LoadCall(5, blob(1, 2), 0)) == wire.Claim(5, 1, 2, [], b"")
    lane.turn(0)
    assert session.answer(wire.Poll(6, 1, 0)) == wire.Claim(6, 1, 1, [0], b"\1")
    lane.turn(0)
    assert session.answer(wire.Poll(7, 1, 1)) == wire.Claim(7, 1, 0, [1], b"\1")


# ---- owners --------------------------------------------------------------------------------------


def test_owners_drop_only_what_is_theirs_or_nobodys():
    tier, lane = DictTier(8), ManualLane(urgent_bound=8, bound=64)
    nobodys = LAYOUT.keys([9])[0]
    tier.write(nobodys, memoryview(bytes(SLOT)))
    store = Store(Pool(8, SLOT), [(tier, lane)])
    one, two = Session(store, 1), Session(store, 2)
    save(one, 1)
    save(two, 2)
    lane.run()
    one.answer(wire.Invalidate(blob(2)))
    assert store.lookup(LAYOUT.keys([2])).ready == 1
    one.answer(wire.InvalidateAllCall())
    lane.run()
    assert set(tier.held) == set(LAYOUT.keys([2]))
    assert [sum(store.lookup(LAYOUT.keys([token])).progress) for token in (1, 2, 9)] == [0, 1, 0]


def test_a_run_that_comes_chunk_by_chunk_is_put_together_again():
    size_class = SizeClass(Store(Pool(1, SLOT)), lambda call: None)
    keys = LAYOUT.keys([1, 2, 3, 4])
    size_class.remember([keys[2], keys[0], keys[1]])
    assert size_class.run_to(keys[3]) == keys
    assert size_class.run_to(keys[1]) == keys[:2]
    circle = [ChunkKey(bytes([n]) * 32 + bytes([1 - n]) * 8) for n in (0, 1)]
    size_class.remember(circle)
    assert set(size_class.run_to(circle[0])) == set(circle), "a forged circle of links ends"


# ---- hints ---------------------------------------------------------------------------------------


def test_a_hint_by_a_sessions_name_is_of_the_askers_own_session():
    spare = ManualLane(bound=1)
    store = Store(Pool(64, SLOT), [], spare=spare)
    spare.run()
    one, other = Session(store, 1), Session(store, 2)
    for number, (session, run) in enumerate([(other, range(10, 14)), (one, range(20, 24))]):
        session.answer(wire.LoadCall(number, blob(*run), 0, session="same"))
        slots = session.answer(wire.Save(number, blob(*run)))
        session.answer(wire.Commit(slots.lease))
        spare.run()
    assert other.answer(wire.HintCall(b"", True, 0.0, "same")) is None
    spare.run()
    assert store._directory._over == set(LAYOUT.keys(range(10, 14)))
    other.answer(wire.HintCall(b"", True, 0.0, ""))
    one.answer(wire.HintCall(b"", True, 0.0, "nobody"))
    one.answer(wire.HintCall(blob(*range(20, 24)), True, 0.0))
    spare.run()
    assert store._directory._over == set(
        LAYOUT.keys([*range(10, 14)]) + LAYOUT.keys([*range(20, 24)])
    )
    for session in (one, other):
        session.end()
    store.check()


# ---- tokens --------------------------------------------------------------------------------------


def test_an_engine_tells_what_came_of_a_prompt_and_no_nonsense():
    store = Store(Pool(4, SLOT), [])
    session = Session(store, 1)
    assert session.answer(wire.ServedCall(512, [256], blob(3), 256, 1280)) is None
    assert (store.counts["asked_tokens"], store.counts["ram_hit_tokens"]) == (512, 256)
    stats = store.stats()
    late = (512 + 512 * 1280 / 30_500, 256 + 256 * 1152 / 30_500)  # their middles are there
    assert (stats["asked_compute"], stats["saved_compute"]) == tuple(map(round, late))
    for wrong in ([513], [1, 1], [300, 300]):
        with pytest.raises(wire.WireError):
            session.answer(wire.ServedCall(512, wrong, b"", 256, 0))
    assert store.counts["asked_tokens"] == 512
