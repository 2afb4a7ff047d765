"""What a session is told of changes: only of chunks that it has named, in order, and honestly when
some were lost."""

import asyncio

import pytest

from kvtier.client.client import Client
from kvtier.client.connect import ServerAccess, hello
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.lookup import Change
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.store.observers import changes
from kvtier.store.store import Store
from kvtier.testing import DictTier
from tests import stores
from tests.answering import Session
from tests.child_process import DEADLINE_S
from tests.loop_server import served, until

SLOT = 4096
RAM, NVME = 0, 1
LAYOUT = ChunkLayout(fingerprint({"model": "watched"}), 1, 1, (SLOT,))
OTHER = ChunkLayout(fingerprint({"model": "watched", "namespace": "other"}), 1, 1, (SLOT,))


class Bench:
    """A Store of eight slots over one tier, and sessions that watch it."""

    def __init__(self):
        self.store, (self.lane,) = stores.over(DictTier(8, name="nvme"), slots=8)

    def session(self, owner=1):
        session = Session(self.store, owner)
        assert hear(session) == []
        return session


def hear(session):
    heard: list[Change] = []
    while True:
        answer = session.answer(wire.Hear())
        if answer.lost:
            assert not answer.keys
            return None
        for key, what in zip(wire.split(answer.keys), answer.what, strict=True):
            heard.append(Change(what >> 1, key, bool(what & 1)))
        if not answer.more:
            return heard


def save(session, keys, *, commit=True):
    slots = session.answer(wire.Save(0, wire.joined(keys)))
    session.answer(wire.Commit(slots.lease) if commit else wire.End(slots.lease))


def where(session, keys):
    return session.answer(wire.Where(0, wire.joined(keys))).places


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.store.close()


def test_what_a_session_saved_is_told_from_place_to_place(bench):
    session, (key,) = bench.session(), LAYOUT.keys([1])
    save(session, [key])
    assert hear(session) == [Change(RAM, key, True)]
    bench.lane.run()
    assert hear(session) == [Change(NVME, key, True)]
    session.answer(wire.Invalidate(key))
    assert hear(session) == [Change(RAM, key, False), Change(NVME, key, False)]
    assert not session._watch._named, "nothing is remembered of what is nowhere"


def test_what_left_one_place_after_another_is_withdrawn_from_both(bench):
    session, keys = bench.session(), LAYOUT.keys([1])
    save(session, keys)
    bench.lane.run()
    hear(session)
    stores.save(bench.store, LAYOUT.keys([2, 3, 4, 5, 6, 7, 8, 9]))
    bench.store.invalidate(keys)
    assert hear(session) == [Change(RAM, keys[0], False), Change(NVME, keys[0], False)]


def test_a_save_that_is_given_up_leaves_what_lies_below_told(bench):
    session, keys = bench.session(), LAYOUT.keys([1])
    save(session, keys)
    bench.lane.run()
    stores.save(bench.store, LAYOUT.keys([2, 3, 4, 5, 6, 7, 8, 9]))
    hear(session)
    save(session, keys, commit=False)
    bench.store.invalidate(keys)
    assert hear(session) == [Change(NVME, keys[0], False)]


def test_what_is_not_committed_is_not_told(bench):
    session, (key,) = bench.session(), LAYOUT.keys([1])
    save(session, [key], commit=False)
    assert hear(session) == []
    assert not session._watch._named


def test_nobody_hears_of_chunks_that_he_has_not_named(bench):
    mine, other = bench.session(), bench.session(owner=2)
    save(mine, LAYOUT.keys([1, 2]))
    save(other, OTHER.keys([1, 2]))
    bench.lane.run()
    bench.store.invalidate_all()
    assert {change.key for change in hear(mine) or ()} == set(LAYOUT.keys([1, 2]))
    assert {change.key for change in hear(other) or ()} == set(OTHER.keys([1, 2]))


def test_who_names_a_chunk_of_another_engine_hears_of_it_from_then_on(bench):
    one, two, keys = bench.session(), bench.session(), LAYOUT.keys([1, 2, 3])
    save(one, keys[:1])
    bench.lane.run()
    save(one, keys[2:])
    assert where(two, keys) == [1 << RAM | 1 << NVME]
    assert hear(two) == []
    bench.store.invalidate_all()
    assert hear(two) == [Change(RAM, keys[0], False), Change(NVME, keys[0], False)]


def test_a_chunk_that_nobody_owns_is_told_too(bench):
    session, keys = bench.session(), LAYOUT.keys([1])
    stores.save(bench.store, keys)
    assert where(session, keys) == [1 << RAM]
    bench.store.invalidate(keys)
    assert hear(session) == [Change(RAM, keys[0], False)]


def test_a_session_that_asks_too_seldom_loses_its_changes_and_is_told(bench, monkeypatch):
    monkeypatch.setattr(changes, "_WAITING_CHANGES", 3)
    slow, quick, keys = bench.session(), bench.session(), LAYOUT.keys([1, 2, 3, 4])
    save(slow, keys)
    assert hear(quick) == []
    assert hear(slow) is None
    assert hear(slow) == []
    assert where(slow, keys) == [1 << RAM] * 4, "what is named again is told again"
    bench.store.invalidate(keys[:1])
    assert hear(slow) == [Change(RAM, keys[0], False)]


def test_many_changes_come_in_several_answers(bench, monkeypatch):
    monkeypatch.setattr("kvtier.server.session._TOLD_CHANGES", 2)
    session, keys = bench.session(), LAYOUT.keys([1, 2, 3])
    save(session, keys)
    answer = session.answer(wire.Hear())
    assert (len(answer.what), answer.more) == (2, True)
    assert hear(session) == [Change(RAM, keys[2], True)]


def test_the_store_notes_nothing_while_nobody_watches(bench):
    sessions = bench.session(), bench.session()
    assert len(bench.store._directory.observers.came) == 2
    for session in sessions:
        session.gone()
    assert not bench.store._directory.observers.came


def test_where_before_the_first_hear_is_an_error(bench):
    session = Session(bench.store, 1)
    with pytest.raises(wire.WireError, match="before the first Hear"):
        session.answer(wire.Where(0, b""))


@pytest.mark.usefixtures("patient")
def test_an_engine_is_told_nothing_once_its_connection_is_gone():
    store = Store(Pool(8, SLOT))
    own = hello(LAYOUT.fingerprint, SLOT, stream=False)

    async def scenario():
        async with served(store) as server:
            access = ServerAccess(server.listeners[0].address, own)
            client = await asyncio.to_thread(Client, access, DEADLINE_S)
            client.watch()
            lease = await asyncio.to_thread(client.save, LAYOUT.keys([1]))
            noted = bool(store._directory.observers.came)
            assert client._attachment is not None
            client._attachment.lose()
            await until(lambda: bool(server.lingering))
            assert lease.pool is not None
            assert noted and not store._directory.observers.came
            await asyncio.to_thread(client.close)

    asyncio.run(scenario())
