"""Parcels: what LMCache saved comes back byte by byte, or not at all."""

import os

import msgspec
import pytest

from kvtier.core.chunk import KEY_BYTES, parent_half
from kvtier.extensions.lmcache_remote import packing
from kvtier.extensions.lmcache_remote.packing import HEAD_BYTES, Head

DATA = bytes(range(256)) * 3
HEAD = Head(len(DATA), [[2, 3, 4, 16]], ["torch.bfloat16"], "KV_2LTD")
KEY = packing.chunk_key(bytes(32), "model", 1, 0, "ab", "torch.bfloat16", [])
OTHER = packing.chunk_key(bytes(32), "model", 1, 1, "ab", "torch.bfloat16", [])


@pytest.fixture
def slot():
    """Larger than the chunk, and not empty: others' bytes were there before."""
    view = memoryview(bytearray(os.urandom(HEAD_BYTES + len(DATA) + 100)))
    assert packing.pack(view, KEY, HEAD, memoryview(DATA))
    return view


def read(slot, key=KEY):
    head = packing.head_of(slot)
    if head is None:
        return None
    into = memoryview(bytearray(head.size))
    return bytes(into) if packing.unpack(slot, key, into) else None


def test_a_shorter_chunk_comes_back_with_its_own_shape(slot):
    assert packing.head_of(slot) == HEAD
    assert read(slot) == DATA


def test_each_wrong_bit_is_seen(slot):
    words = len(msgspec.msgpack.encode(HEAD))
    meant = [*range(34 + words), *range(HEAD_BYTES, HEAD_BYTES + len(DATA))]
    for place in meant:
        slot[place] ^= 1 << place % 8
        assert read(slot) is None, place
        slot[place] ^= 1 << place % 8
    assert read(slot) == DATA


def test_nothing_of_what_the_slot_held_before_is_left(slot):
    """One buffer carries many chunks, and a slot had another tenant's."""
    assert not any(slot[34 + len(msgspec.msgpack.encode(HEAD)) : HEAD_BYTES])
    assert not any(slot[HEAD_BYTES + len(DATA) :])


def test_the_bytes_of_another_chunk_are_no_hit(slot):
    assert read(slot, OTHER) is None


def test_a_slot_that_never_was_a_parcel_is_a_miss():
    assert read(memoryview(bytes(8192))) is None
    assert read(memoryview(os.urandom(8192))) is None


def test_a_head_may_not_claim_more_than_the_slot_has(slot):
    assert packing.head_of(slot[: HEAD_BYTES + len(DATA) - 1]) is None


def test_a_head_that_does_not_fit_its_page_is_not_saved():
    huge = Head(1, [[1] * 8] * 64, ["x" * 100] * 64, "KV_2LTD")
    assert not packing.pack(memoryview(bytearray(8192)), KEY, huge, memoryview(b"1"))


def test_keys_tell_apart_whatever_lmcache_tells_apart():
    names = [
        ("m", 1, 0, "ab", "torch.half", []),
        ("m", 2, 0, "ab", "torch.half", []),
        ("m", 1, 1, "ab", "torch.half", []),
        ("m", 1, 0, "ac", "torch.half", []),
        ("m", 1, 0, "ab", "torch.float", []),
        ("m", 1, 0, "ab", "torch.half", [["a", "x"], ["b", "y"]]),
        ("m", 1, 0, "ab", "torch.half", [["a", "x@b%y"]]),
        ("m@1", 0, "ab", "torch.half", []),
    ]
    keys = {packing.chunk_key(own, *name) for name in names for own in (bytes(32), b"1" * 32)}
    assert len(keys) == 2 * len(names)
    assert {len(key) for key in keys} == {KEY_BYTES} and {parent_half(key) for key in keys} == {
        bytes(8)
    }
