"""A long message of KV events in pieces: an event with many blocks is given as several events of
fewer blocks, which say the same. Pure.

msgspec decodes a message in one go, and nothing else of the process runs meanwhile. So a long
message is first walked along, from value to value, to find where its arrays can be cut.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvtier.core.steps import Steps
from kvtier.protocol.kv_events import BlockRemoved, BlockStored, Event, decode

_AT_ONCE_BYTES = 64 << 10
"""Longest message or event that is decoded in one go: about a millisecond."""
_VALUES = 4096
_BLOCKS, _TOKENS = 128, 8192
_MOST_TOKENS = 1 << 16
_MOST_WORD_BYTES = 4096
"""Longest field outside the arrays that are cut."""
_FORMS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}
_MOST_FIELDS = 64
_LISTS = ("block_hashes", "token_ids", "extra_keys")
_NIL = 0xC0
_ARRAYS, _MAPS = (0xDC, 0xDD), (0xDE, 0xDF)

# Bytes of a msgpack value by its first byte. 0: the length follows from the bytes behind it.
_LENGTHS = bytearray(256)
for _kind in (*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)):
    _LENGTHS[_kind] = 1
for _kind in range(0xA0, 0xC0):
    _LENGTHS[_kind] = _kind - 0x9F
for _number in range(4):
    _LENGTHS[0xCC + _number] = _LENGTHS[0xD0 + _number] = 1 + (1 << _number)
_LENGTHS[0xCA], _LENGTHS[0xCB] = 5, 9
for _number in range(5):
    _LENGTHS[0xD4 + _number] = 2 + (1 << _number)
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Types whose length in bytes follows -> bytes of that length."""
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Types whose number of elements follows -> bytes of that number."""


def decoding(payload: bytearray | bytes) -> Steps[list[Event]]:
    """Decode the events of one message, in order, long ones cut. Raises msgspec.DecodeError."""
    if len(payload) <= _AT_ONCE_BYTES:
        return decode(payload)
    try:
        found: list[Event] = yield from _long(payload)
    except IndexError:
        raise msgspec.DecodeError("the message ends too soon") from None
    return found


def _long(data: bytearray | bytes) -> Steps[list[Event]]:
    _, at = _array(data, 0)
    at = yield from _behind(data, at, 1)
    count, at = _array(data, at)
    found: list[Event] = []
    for _ in range(count):
        end = yield from _behind(data, at, 1)
        if end - at <= _AT_ONCE_BYTES:
            found += decode(b"\x92\x00\x91" + data[at:end])
        else:
            found += yield from _cut(data, at)
        at = end
        yield 0.0
    return found


def _cut(data: bytearray | bytes, at: int) -> Steps[list[BlockStored | BlockRemoved]]:
    """Decode the long event at ``at`` as events of at most :data:`_BLOCKS` blocks."""
    places = yield from _fields(data, at)
    kind = _word(data, places["type"]) if "type" in places else None
    if kind not in _FORMS:
        raise msgspec.DecodeError("a long event that is not known")
    lists = {name: places.pop(name) for name in _LISTS if name in places}
    head = {name: _word(data, place) for name, place in places.items()}
    size = head.get("block_size", 0)
    if not isinstance(size, int) or not 0 <= size <= _MOST_TOKENS:
        raise msgspec.DecodeError(f"a block of more than {_MOST_TOKENS:,} tokens")
    blocks = max(1, min(_BLOCKS, _TOKENS // max(1, size)))
    columns: dict[str, list[bytes]] = {}
    for name, (begin, _) in lists.items():
        each = blocks * size if name == "token_ids" else blocks
        if each and data[begin] != _NIL:
            columns[name] = yield from _pieces(data, begin, each)
    found: list[BlockStored | BlockRemoved] = []
    for number in range(len(columns.get("block_hashes", ()))):
        fields = {"token_ids": [], **head} | {
            name: msgspec.msgpack.decode(pieces[number])
            for name, pieces in columns.items()
            if number < len(pieces)
        }
        if found:
            fields["parent_block_hash"] = found[-1].block_hashes[-1]
        found.append(msgspec.convert(fields, _FORMS[kind]))
        yield 0.0
    return found


def _fields(data: bytearray | bytes, at: int) -> Steps[dict[str, tuple[int, int]]]:
    """Find each field of the event at ``at``, a map or an old vLLM's list: name -> begin and
    end."""
    found: dict[str, tuple[int, int]] = {}
    is_map = data[at] in _MAPS or data[at] >> 4 == 0x8
    count, at = _opened(data, at)
    names = ["type"]
    for number in range(count // 2 if is_map else count):
        begin = at
        at = yield from _behind(data, at, 1)
        if is_map:
            name, begin = _word(data, (begin, at)), at
            at = yield from _behind(data, at, 1)
        elif number < len(names):
            name = names[number]
        else:
            continue  # of a newer vLLM
        found[str(name)] = begin, at
        if not is_map and number == 0:
            form = _FORMS.get(_word(data, (begin, at)))
            names += form.__struct_fields__ if form is not None else ()
        if len(found) > _MOST_FIELDS:
            raise msgspec.DecodeError(f"an event of more than {_MOST_FIELDS} fields")
    return found


def _word(data: bytearray | bytes, place: tuple[int, int]) -> Any:
    """Decode the short value at ``place``; None if it is no text, bytes or whole number."""
    begin, end = place
    if end - begin > _MOST_WORD_BYTES:
        raise msgspec.DecodeError(f"a field of more than {_MOST_WORD_BYTES:,} bytes")
    value = msgspec.msgpack.decode(data[begin:end])
    return value if isinstance(value, str | bytes | int | None) else None


def _pieces(data: bytearray | bytes, at: int, size: int) -> Steps[list[bytes]]:
    left, at = _array(data, at)
    found = []
    while left:
        count = min(size, left)
        end = yield from _behind(data, at, count)
        if end - at > 2 * _AT_ONCE_BYTES:
            raise msgspec.DecodeError("elements that are too long")
        found.append(b"\xdd" + count.to_bytes(4, "big") + data[at:end])
        left, at = left - count, end
    return found


def _array(data: bytearray | bytes, at: int) -> tuple[int, int]:
    if data[at] >> 4 != 0x9 and data[at] not in _ARRAYS:
        raise msgspec.DecodeError("expected an array")
    return _opened(data, at)


def _opened(data: bytearray | bytes, at: int) -> tuple[int, int]:
    """Return how many values the one at ``at`` contains, and where they or the next one begin."""
    kind = data[at]
    if kind >> 4 in (0x8, 0x9):
        return (kind & 0xF) * (2 if kind >> 4 == 0x8 else 1), at + 1
    if kind in _COUNTED:
        size = _COUNTED[kind]
        count = int.from_bytes(data[at + 1 : at + 1 + size], "big")
        return count * (2 if kind in _MAPS else 1), at + 1 + size
    if kind in _SIZED:
        size = _SIZED[kind]
        is_extension = 0xC7 <= kind <= 0xC9
        length = int.from_bytes(data[at + 1 : at + 1 + size], "big") + is_extension
        return 0, at + 1 + size + length
    raise msgspec.DecodeError("not msgpack")


def _behind(data: bytearray | bytes, at: int, values: int) -> Steps[int]:
    """Return the end of ``values`` values that begin at ``at``."""
    turn = _VALUES
    while values:
        if length := _LENGTHS[data[at]]:
            at += length
        else:
            inside, at = _opened(data, at)
            values += inside
        values -= 1
        turn -= 1
        if not turn:
            turn = _VALUES
            yield 0.0
    if at > len(data):
        raise IndexError
    return at
