"""Long messages of KV events: what their pieces say is what the whole says, and no piece takes
long."""

import contextlib
import random
from typing import Any

import msgspec
import pytest

from kvtier.core.steps import whole
from kvtier.extensions.engine_index.kv_event_pieces import decoding
from kvtier.extensions.engine_index.picture import Picture
from kvtier.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode

pack = msgspec.msgpack.encode
NO_TOKENS: dict[str, Any] = {"token_ids": [], "extra_keys": None, "medium": "STORAGE"}


def stored(blocks, size=16, rng=None, **more):
    rng = rng or random.Random(1)
    extras = [None, ["salt", 7, [1.5, {"a": b"b"}]]]
    hashes = [rng.choice([rng.randbytes(32), rng.getrandbits(63)]) for _ in range(blocks)]
    given: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [rng.choice([3, 200, 70_000, 2**32 - 1]) for _ in range(blocks * size)],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": rng.choice([None, [rng.choice(extras) for _ in range(blocks)]]),
    }
    return BlockStored(**(given | more))


def message(*events):
    return pack([1.5, list(events), 0])


def raw(kind, **fields):
    return pack([1.5, [{"type": kind, "medium": None} | fields]])


def listed(event):
    """As vLLM 0.24 wrote it."""
    return [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]


def pictured(events):
    seen = Picture(1 << 20)
    whole(seen.apply(events))
    groups = {number: (group.known, group.held) for number, group in seen._groups.items()}
    return seen.blocks, groups


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_a_long_message_say_what_the_whole_says(seed):
    rng = random.Random(seed)
    long = stored(3000, 16, rng)
    events: list[Event] = [
        stored(5, 16, rng, parent_block_hash=b"x"),
        long,
        stored(700, 32, rng, parent_block_hash=long.block_hashes[-1], medium="CPU"),
        BlockRemoved(long.block_hashes[7:], "GPU"),
        stored(2, 16, rng),
        stored(3000, 0, rng, block_hashes=long.block_hashes, **NO_TOKENS),
    ]
    for payload in (message(*events), pack([1, [listed(one) for one in events], 0])):
        pieces = whole(decoding(payload))
        assert len(pieces) > 3000 // 128 + len(events)
        assert pictured(pieces) == pictured(decode(payload))


def test_a_short_message_is_decoded_as_it_is():
    payload = message(stored(100), AllBlocksCleared())
    assert whole(decoding(payload)) == decode(payload)


HEAD = b"\x92\xcb" + bytes(8)
MEGABYTE = 1 << 20
WRONG = {
    "endless array": HEAD + b"\xdd\xff\xff\xff\xff" + b"\xc0" * MEGABYTE,
    "endless string": HEAD + b"\x91\xdb\xff\xff\xff\xff" + b"\xc0" * MEGABYTE,
    "not an array": b"\x81\xa1a" + b"\xc0" * MEGABYTE,
    "events that are nothing": HEAD + b"\xc0" * MEGABYTE,
    "no msgpack": HEAD + b"\x91" + b"\xc1" * MEGABYTE,
    "deep": HEAD + b"\x91" * MEGABYTE + b"\x90",
    "unknown event": raw("Other", data=[None] * MEGABYTE),
    "a long word": message(stored(1000, session_id="x" * MEGABYTE)),
    "a long block": message(stored(1, MEGABYTE)),
    "many extra keys of a block": message(stored(1, extra_keys=[[None] * MEGABYTE])),
    "hashes that are words": raw("BlockRemoved", block_hashes=["x"] * 100_000),
    "a long hash": raw("BlockRemoved", block_hashes=[b"x" * MEGABYTE]),
    "cut short": message(stored(3000))[:-5],
    "a number for tokens": raw(
        "BlockStored", block_size=16, token_ids=7, block_hashes=[1] * 100_000
    ),
}


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG)
def test_a_long_message_without_sense_is_refused_in_pieces(payload):
    steps, count = decoding(payload), 0
    with pytest.raises((msgspec.DecodeError, ValueError)):
        while True:
            next(steps)
            count += 1
            assert count < 4096


def test_random_damage_of_a_long_message_raises_nothing_else():
    rng, good = random.Random(3), message(stored(1500), BlockRemoved([1] * 3, None))
    for _ in range(60):
        payload = bytearray(good)
        for _ in range(rng.choice([1, 3, 40])):
            place = rng.randrange(len(payload) if rng.random() < 0.5 else 200)
            payload[place] = rng.randrange(256)
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            whole(decoding(payload))
