"""What a server publishes: chunks that are there, once a place, under one engine's hashes, and
withdrawn when they leave. It keeps no tokens, and no engine takes all of the room."""

from dataclasses import astuple
from typing import Any

import msgspec
import pytest

from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.steps import whole
from kvtier.extensions.event_stream import announced as announced_module
from kvtier.extensions.event_stream.announced import Announced
from kvtier.protocol import wire
from kvtier.protocol.kv_events import AllBlocksCleared, BlockStored, Event
from kvtier.store.observers import changes
from kvtier.testing import DictTier
from tests.answering import Session
from tests.stores import SLOT, over

BLOCK, CHUNK = 2, 4
RAM, NVME = 0, 1
LAYOUT = ChunkLayout(fingerprint({"model": "announced"}), CHUNK, BLOCK, (SLOT,))
CLEARED = ("AllBlocksCleared", "", b"")


def event(number=0, engine=b"e", **more):
    """Of chunk ``number`` of the prompt. Each ``engine`` has hashes of its own."""
    names = [
        engine + bytes([block]) for block in range(2 * number - 1, 2 * number + 2) if block + 1
    ]
    given: dict[str, Any] = {
        "block_hashes": names[-2:],
        "parent_block_hash": names[0] if number else None,
        "token_ids": [number] * CHUNK,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return BlockStored(**(given | more))


KEYS = LAYOUT.keys([token for number in range(9) for token in [number] * CHUNK])


class Bench:
    """A Store of eight slots over one tier, and what is published of it."""

    def __init__(self):
        self.store, (self.lane,) = over(DictTier(8, name="nvme"), slots=8)
        self.events: list[Event] = []
        self.announced = Announced(self.events.append)

    def session(self, owner=1):
        return Session(self.store, owner, announced=self.announced)

    def heard(self):
        """Kind, medium and first hash of each event since the last call."""
        whole(self.announced.following())
        events, told = list(self.events), []
        self.events.clear()
        for one in events:
            if isinstance(one, AllBlocksCleared):
                told.append(CLEARED)
            else:
                first = one.block_hashes[0]
                assert isinstance(first, bytes)
                told.append((type(one).__name__, one.medium or "", first))
        return told


def save(session, keys):
    slots = session.answer(wire.Save(0, wire.joined(keys)))
    session.answer(wire.Commit(slots.lease))


def tell(session, number=0, place=RAM, engine=b"e", **more):
    session.answer(wire.Announce(KEYS[number], place, event(number, engine, **more)))


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.store.close()


def test_a_chunk_is_published_in_each_place_and_withdrawn_from_each(bench):
    session = bench.session()
    save(session, KEYS[:1])
    tell(session)
    (first,) = bench.events
    assert isinstance(first, BlockStored)
    assert (first.medium, first.locality, first.token_ids) == ("CPU", "LOCAL", [0] * CHUNK)
    assert bench.heard() == [("BlockStored", "CPU", b"e\0")]
    bench.lane.run()
    tell(session, place=NVME)
    assert bench.heard() == [("BlockStored", "STORAGE", b"e\0")]
    session.answer(wire.Invalidate(KEYS[0]))
    assert bench.heard() == [
        ("BlockRemoved", "CPU", b"e\0"),
        ("BlockRemoved", "STORAGE", b"e\0"),
        CLEARED,
    ]
    assert not bench.announced._chunks and not bench.announced._ends


def test_what_is_not_in_the_place_is_not_published(bench):
    session = bench.session()
    tell(session)
    save(session, KEYS[:1])
    tell(session, place=NVME)
    assert bench.heard() == []
    assert not bench.announced._chunks and not bench.announced._blocks


def test_two_engines_yield_one_event_under_the_hashes_of_the_first(bench):
    one, two = bench.session(), bench.session()
    save(one, KEYS[:2])
    bench.lane.run()
    tell(one)
    for place in (RAM, NVME):
        tell(two, 0, place, b"f")
    tell(two, 1, RAM, b"f")
    *_, last = bench.events
    assert isinstance(last, BlockStored) and last.parent_block_hash == b"e\1"
    assert bench.heard() == [
        ("BlockStored", "CPU", b"e\0"),
        ("BlockStored", "STORAGE", b"e\0"),
        ("BlockStored", "CPU", b"f\2"),
    ]


def test_an_engine_that_is_gone_leaves_what_it_announced(bench):
    session = bench.session()
    save(session, KEYS[:1])
    tell(session)
    session.gone()
    session.end()
    assert bench.heard() == [("BlockStored", "CPU", b"e\0")]
    bench.store.invalidate_all()
    assert bench.heard() == [("BlockRemoved", "CPU", b"e\0"), CLEARED]


def test_another_tenant_is_published_when_no_engine_of_the_first_is_left(bench):
    one, two = bench.session(), bench.session(owner=2)
    save(one, KEYS[:1])
    save(two, KEYS[1:2])
    tell(one)
    tell(two, 1)
    assert bench.heard() == [("BlockStored", "CPU", b"e\0")]
    assert bench.announced.ignored == 1
    one.gone()
    tell(two, 1)
    assert bench.heard() == [
        ("BlockRemoved", "CPU", b"e\0"),
        CLEARED,
        ("BlockStored", "CPU", b"e\2"),
    ]


def test_a_store_that_is_closed_is_withdrawn(bench):
    session = bench.session()
    save(session, KEYS[:2])
    tell(session)
    whole(bench.announced.without([bench.store]))
    assert bench.heard() == [("BlockStored", "CPU", b"e\0")]
    whole(bench.announced.without([]))
    assert bench.heard() == [("BlockRemoved", "CPU", b"e\0"), CLEARED]
    assert not bench.store._directory.observers.came, "and nothing is noted any more"


def test_after_a_loss_everything_is_withdrawn_and_announced_anew(bench, monkeypatch):
    session = bench.session()
    save(session, KEYS[:1])
    tell(session)
    bench.heard()
    monkeypatch.setattr(changes, "_WAITING_CHANGES", 0)
    bench.store.invalidate(KEYS[:1])
    monkeypatch.undo()
    save(session, KEYS[:1])
    assert bench.heard() == [("BlockRemoved", "CPU", b"e\0"), CLEARED]
    tell(session)
    assert bench.heard() == [("BlockStored", "CPU", b"e\0")]


def test_a_session_has_half_of_the_room_that_others_leave(bench, monkeypatch):
    monkeypatch.setattr(announced_module, "_MOST_BLOCKS", 12)
    one, two = bench.session(), bench.session()
    save(one, KEYS[:6])
    for session, numbers in ((one, range(4)), (two, range(3, 6))):
        for number in numbers:
            tell(session, number)
    assert [first[1] // 2 for _, _, first in bench.heard()] == [0, 1, 2, 3]
    assert bench.announced.ignored == 3
    bench.store.invalidate(KEYS[:1])
    bench.heard()
    tell(one, 4)
    assert bench.heard() == [], "it has as much as is free"
    tell(two, 4)
    assert [first[1] // 2 for _, _, first in bench.heard()] == [4]


def test_hashes_are_kept_and_no_tokens(bench):
    session = bench.session()
    save(session, KEYS[:1])
    tell(session)
    ((key, chunk),) = bench.announced._chunks.items()
    *kept, _, places = astuple(chunk)
    assert (key, kept, places) == (KEYS[0], [msgspec.msgpack.encode([b"e\0", b"e\1"]), 2, 0], 1)


@pytest.mark.parametrize(
    ("place", "more"),
    [
        (2, {}),
        (RAM, {"token_ids": [1]}),
        (RAM, {"token_ids": [], "block_hashes": []}),
        (RAM, {"token_ids": [], "block_size": 0}),
        (RAM, {"extra_keys": [None]}),
    ],
)
def test_what_no_engine_announces(bench, place, more):
    session = bench.session()
    save(session, KEYS[:1])
    with pytest.raises(wire.WireError):
        tell(session, place=place, **more)
    assert not bench.events


def test_a_server_that_publishes_nothing_is_told_nothing(bench):
    session = Session(bench.store, 1)
    with pytest.raises(wire.WireError, match="publishes nothing"):
        tell(session)
