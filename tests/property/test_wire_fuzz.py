"""Whatever arrives in whatever pieces: a message or a WireError. Whatever is asked in whatever
order: nothing leaks."""

import hypothesis.strategies as st
from hypothesis import given, settings

from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.lookup import STOPS
from kvtier.core.pool import Pool
from kvtier.core.steps import whole
from kvtier.extensions.event_stream.announced import Announced
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.kv_events import AllBlocksCleared, BlockStored, Event
from kvtier.protocol.wire import WireError, frame
from kvtier.server.registry import SizeClass
from kvtier.server.stream import ChunkStream
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.answering import Session
from tests.feeding import feed

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "fuzz"}), 1, 1, (SLOT,))
NUMBERS = st.integers(0, 9) | st.integers(0, 2**32 - 1)
BLOBS = st.lists(st.integers(0, 2), max_size=4).map(lambda tokens: wire.joined(LAYOUT.keys(tokens)))
KEYS = st.integers(0, 3).map(lambda token: bytes(LAYOUT.keys([token])[0]))
FIELDS = {
    "keys": BLOBS | st.binary(max_size=90),
    "key": KEYS,
    "idle": st.booleans(),
    "timeout_ms": st.integers(0, 10_000),
    "reason": st.sampled_from(["slower", "deadline"]),
    "over": st.booleans(),
    "again": st.booleans(),
    "keep_s": st.floats(0, 86_400),
    "session": st.text(max_size=64),
    "stop": st.sampled_from(STOPS),
    "hits": st.lists(st.integers(0, 2**32 - 1), max_size=3),
}
UNANSWERED = (
    wire.Commit
    | wire.End
    | wire.Invalidate
    | wire.InvalidateAllCall
    | wire.Decline
    | wire.HintCall
    | wire.ServedCall
    | wire.EndedCall
    | wire.Announce
)
FIELDS |= {
    "place": st.integers(0, 3),
    "event": st.builds(
        BlockStored,
        st.lists(st.binary(max_size=4), max_size=2),
        st.none() | st.binary(max_size=4),
        st.lists(st.integers(0, 9), max_size=4),
        st.integers(0, 3),
        st.none(),
        st.none(),
        st.none() | st.text(max_size=4),
    ),
}
FIELDS |= {"checksum": st.binary(min_size=16, max_size=16)}


def messages(union):
    """Any message of a union, with fields that often make sense."""
    kinds = union.__args__
    return st.one_of(
        *(
            st.builds(kind, *(FIELDS.get(name, NUMBERS) for name in kind.__struct_fields__))
            for kind in kinds
        )
    )


def pieces(data, cuts):
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(
    st.lists(messages(wire.Question | wire.StreamQuestion), max_size=8),
    st.lists(st.integers(0, 2000), max_size=8),
)
def test_messages_survive_any_cut(sent, cuts):
    inbox: Inbox[wire.Message] = Inbox(wire.Question | wire.StreamQuestion)
    got = [
        message
        for piece in pieces(b"".join(map(frame, sent)), cuts)
        for message in feed(inbox, piece)
    ]
    assert got == sent


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=500)
def test_rubbish_is_a_wire_error_or_nothing(data, cuts):
    inbox: Inbox[wire.Message] = Inbox(wire.Question | wire.Hello | wire.StreamQuestion)
    try:
        for piece in pieces(data, cuts):
            for message in feed(inbox, piece):
                assert isinstance(message, wire.Message)
    except WireError:
        pass


@given(messages(wire.Question), st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=500)
def test_a_damaged_message_is_a_wire_error_another_message_or_not_complete(sent, at, flip):
    data = bytearray(frame(sent))
    data[at % len(data)] ^= flip
    try:
        got = list(feed(Inbox[wire.Message](wire.Question), bytes(data)))
    except WireError:
        return
    assert len(got) <= 1


@given(
    st.lists(
        messages(wire.Question).filter(lambda one: not isinstance(one, wire.Wait)), max_size=40
    ),
    st.data(),
)
@settings(max_examples=300)
def test_a_session_may_ask_anything(asked, data):
    """What it should not ask is a WireError and the end of it; then nothing of it remains."""
    lane = ManualLane(urgent_bound=4, bound=4)
    store = Store(
        Pool(3, SLOT), [(DictTier(4), lane)], share=data.draw(st.sampled_from([None, 0.5]))
    )
    published: list[Event] = []
    announced = Announced(published.append)
    session = Session(store, 1, announced=announced)
    for question in asked:
        try:
            answer = session.answer(question)
        except WireError:
            break
        assert (answer is None) == isinstance(question, UNANSWERED)
        assert answer is None or len(frame(answer)) < wire.MAX_FRAME_BYTES
        if len(lane) and data.draw(st.booleans()):
            lane.turn(0)
        store.check()
    session.gone()
    session.end()
    lane.run()
    store.check(idle=True)
    store.invalidate_all()
    whole(announced.following())
    assert not announced._chunks
    assert not published or isinstance(published[-1], AllBlocksCleared)


@given(st.lists(messages(wire.StreamQuestion), max_size=40), st.data())
@settings(max_examples=300)
def test_a_stream_may_ask_anything(asked, data):
    lane = ManualLane(urgent_bound=4, bound=4)
    store = Store(Pool(3, SLOT), [(DictTier(4), lane)])
    sent = bytearray()
    stream = ChunkStream(SizeClass(store, lambda call: call()), 1, SLOT, sent.extend, lambda: None)
    for question in asked:
        try:
            whole(stream.begin(question))
        except WireError:
            break
        while stream.sending:
            stream.pump()
        while (room := stream.room()) is not None and data.draw(st.booleans()):
            stream.filled(data.draw(st.integers(1, len(room))))
        if stream.room() is not None:
            break
        if len(lane) and data.draw(st.booleans()):
            lane.turn(0)
        store.check()
    stream.end()
    lane.run()
    store.check(idle=True)
