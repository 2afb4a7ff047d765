"""Messages and their bytes: what comes out is what went in, and nothing malformed gets through."""

import ast
import hmac
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.kv_events import BlockStored
from kvtier.protocol.wire import WireError, client_proof, frame, proven, server_proof
from tests.feeding import feed

KEY = bytes(range(40))
MESSAGES = [
    wire.Challenge(1, bytes(32)),
    wire.Hello(1, "attach", bytes(32), "tenant", 4096, "engine", bytes(32), b"proof"),
    wire.Welcome(8, 4096, ["ram", "nvme"], 100, b"proof", True),
    wire.Refused("why"),
    wire.Refused("why", False, [4096, 1 << 21]),
    wire.LookupCall(1, KEY),
    wire.KnownCall(1, KEY * 2),
    wire.Save(2, KEY * 2),
    wire.LoadCall(3, KEY * 3, 1),
    wire.Poll(4, 5, 6),
    wire.Wait(5, 100),
    wire.StatsCall(6),
    wire.Check(7, True),
    wire.Commit(8),
    wire.End(9),
    wire.Invalidate(KEY),
    wire.InvalidateAllCall(),
    wire.LookupReply(1, [(2, 0.0), (5, 0.25), (7, None)], (None, 1.5, 0.5), "evicted"),
    wire.Known(1, b"\0\1"),
    wire.Decline(KEY, "slower"),
    wire.HintCall(KEY, True, 1.5, "session"),
    wire.ServedCall(512, [256, 0], KEY, 256, 16),
    wire.EndedCall(7, 100, "length"),
    wire.Where(1, KEY * 2),
    wire.Hear(),
    wire.Announce(KEY, 1, BlockStored([b"a", 7], None, [1, 2, 3, 4], 2, None, "CPU", None)),
    wire.Slots(1, 2, [0, 1], [7, 9]),
    wire.Claim(1, 2, 3, [7], b"\1"),
    wire.Done(1, "trouble"),
    wire.Counted(1, {"ram_free": 3}),
    wire.Placed(1, [1, 3]),
    wire.Changed(KEY * 2, b"\1\2", more=True, lost=False),
    wire.Find(1, KEY),
    wire.Get(1, KEY),
    wire.Put(1, KEY),
    wire.Seal(bytes(16)),
    wire.Delete(1, KEY),
    wire.Found(1, 2),
    wire.Chunk(1, 4096),
    wire.Go(1, True, False),
    wire.Stored(1, True),
]
STORED = {
    "type": "BlockStored",
    "block_hashes": [b"a"],
    "parent_block_hash": None,
    "token_ids": [1],
    "block_size": 1,
    "lora_id": None,
    "medium": None,
    "lora_name": None,
}
ANY = (
    wire.Challenge
    | wire.Hello
    | wire.Welcome
    | wire.Question
    | wire.Answer
    | wire.StreamQuestion
    | wire.StreamAnswer
)


def test_every_message_survives_the_wire_byte_by_byte():
    inbox: Inbox[wire.Message] = Inbox(ANY)
    sent = b"".join(map(frame, MESSAGES))
    assert [
        message for at in range(len(sent)) for message in feed(inbox, sent[at : at + 1])
    ] == MESSAGES


def test_the_list_above_has_every_message():
    every = {*wire.Message.__subclasses__(), *wire.Asked.__subclasses__()} - {wire.Asked}
    assert {type(message) for message in MESSAGES} == every


def test_a_message_larger_than_the_first_room_and_a_small_one_after_it():
    inbox: Inbox[wire.Message] = Inbox(ANY)
    sent = [wire.LookupCall(1, KEY * wire.MAX_KEYS), wire.LookupCall(2, KEY)]
    assert list(feed(inbox, b"".join(map(frame, sent)))) == sent
    assert len(inbox.room()) == 64 * 1024, "the large room is given back"


def test_a_long_frame_is_refused_before_anything_is_allocated():
    inbox: Inbox[wire.Message] = Inbox(wire.Question)
    tracemalloc.start()
    with pytest.raises(WireError, match="4294967295 bytes, expected at most"):
        list(feed(inbox, b"\xff\xff\xff\xff" + bytes(100)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 1024
    with pytest.raises(WireError, match="expected at most 1024"):
        list(
            feed(
                Inbox[wire.Message](wire.Hello, wire.MAX_GREETING_BYTES),
                frame(wire.LookupCall(1, KEY * 100)),
            )
        )


def test_what_is_read_and_not_taken_is_bounded():
    inbox: Inbox[wire.Message] = Inbox(wire.Question, 1024)
    flood = frame(wire.LookupCall(1, KEY))
    with pytest.raises(WireError, match="faster than it is answered"):
        for _ in range(100):
            room = inbox.room()
            inbox.filled(min(len(room), 64 * 1024))
            room[: len(flood)] = flood


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        msgspec.msgpack.encode([10, 1]),
        msgspec.msgpack.encode([10, 1, KEY, 1]),
        msgspec.msgpack.encode([10, -1, KEY]),
        msgspec.msgpack.encode([10, 2**32, KEY]),
        msgspec.msgpack.encode([10, 1, KEY.hex()]),
        msgspec.msgpack.encode([10, 1, KEY * (wire.MAX_KEYS + 1)]),
        msgspec.msgpack.encode([30, 1, 2, 3]),
        msgspec.msgpack.encode([41, 1, KEY[:-1]]),
        msgspec.msgpack.encode([27, KEY, 0, {"type": "BlockRemoved", "block_hashes": []}]),
        msgspec.msgpack.encode([27, KEY, 0, STORED | {"token_ids": [-1]}]),
        msgspec.msgpack.encode([27, KEY, 0, STORED | {"block_hashes": ["a"]}]),
        msgspec.msgpack.encode({"tag": 10}),
        msgspec.msgpack.encode([10, 1, KEY]) + b"\0",
        b"\x91" * 900,
    ],
)
def test_what_is_not_exactly_a_message_is_refused(body):
    with pytest.raises(WireError, match=r"malformed|at most"):
        list(
            feed(
                Inbox[wire.Message](wire.Question | wire.StreamQuestion),
                len(body).to_bytes(4, "little") + body,
            )
        )


def test_keys_travel_as_one_blob():
    keys = [ChunkKey(bytes([n]) * 40) for n in range(5)]
    assert wire.split(wire.joined(keys)) == keys
    with pytest.raises(WireError, match="81 bytes of keys, expected a multiple of 40"):
        wire.split(bytes(81))


def test_bytes_behind_a_frame_can_be_drained():
    inbox: Inbox[wire.Message] = Inbox(ANY)
    room = inbox.room()
    sent = frame(wire.Chunk(1, 8)) + b"eight on" + b"e more"
    room[: len(sent)] = sent
    inbox.filled(len(sent))
    assert inbox.next() == wire.Chunk(1, 8)
    into = memoryview(bytearray(8))
    assert (inbox.drain(into), bytes(into)) == (8, b"eight on")
    assert (inbox.drain(into), bytes(into[:6])) == (6, b"e more")


def test_a_servers_proof_depends_on_token_and_both_nonces():
    token, challenge = b"token", wire.Challenge(1, bytes(32))
    hello = wire.Hello(1, "attach", bytes(32), "tenant", 4096, "engine", bytes(32))
    proof = server_proof(token, challenge, hello)
    others = (
        server_proof(b"other", challenge, hello),
        server_proof(token, wire.Challenge(1, bytes([1]) * 32), hello),
        server_proof(token, challenge, msgspec.structs.replace(hello, nonce=bytes([1]) * 32)),
        client_proof(token, challenge, hello),
        b"",
    )
    assert proven(proof, server_proof(token, challenge, hello))
    assert not any(proven(proof, other) for other in others)


def test_a_clients_proof_depends_on_every_field_of_its_hello():
    challenge = wire.Challenge(1, bytes(32))
    hello = wire.Hello(1, "attach", bytes(32), "tenant", 4096, "engine", bytes(32))
    changed = {
        "version": 2,
        "mode": "stream",
        "fingerprint": bytes([1]) * 32,
        "namespace": "b",
        "chunk_bytes": 1,
    }
    changed |= {"client": "b", "nonce": bytes([1]) * 32, "ticket": b"t"}
    assert changed.keys() | {"proof"} == set(wire.Hello.__struct_fields__)
    proofs = [
        client_proof(b"token", challenge, msgspec.structs.replace(hello, **{k: v}))
        for k, v in changed.items()
    ]
    proof = client_proof(b"token", challenge, hello)
    others = [client_proof(b"other", challenge, hello), server_proof(b"token", challenge, hello)]
    others.append(client_proof(b"token", wire.Challenge(1, bytes([1]) * 32), hello))
    assert len({proof, *proofs, *others}) == 4 + len(changed)
    said = msgspec.structs.replace(hello, proof=proof)
    assert proven(proof, client_proof(b"token", challenge, said))


def test_proofs_are_compared_in_constant_time(monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def same(one, other):
        compared.append((one, other))
        return True

    monkeypatch.setattr(hmac, "compare_digest", same)
    assert proven(b"one", b"other")
    assert compared == [(b"one", b"other")]


SECRETS = {"proof", "token", "secret", "client_proof", "server_proof"}


def test_no_file_compares_a_secret_by_its_first_difference():
    def names(node):
        each = (getattr(part, "id", None) or getattr(part, "attr", None) for part in ast.walk(node))
        return {name.lstrip("_") for name in each if isinstance(name, str)}

    found = []
    for file in (Path(wire.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(
                isinstance(op, ast.Eq | ast.NotEq) for op in node.ops
            ):
                found += [f"{file.name}:{node.lineno}"] if names(node) & SECRETS else []
    assert found == []
