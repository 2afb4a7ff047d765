"""vLLM's messages of KV events, as far as they are read and written here.

vLLM's own classes are not imported: that would bring torch and seconds to a server that needs
neither. A test compares these with the classes of the vLLM that is installed. vLLM 0.24 and older
write an event as a list, and later ones as a map.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

Hash: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)] | int
"""Hash of a block, by which vLLM names it."""
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that follow ``parent_block_hash`` in a prompt, and can be had from ``medium``."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[_Token]
    block_size: int
    lora_id: int | None
    medium: _Word | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: _Word | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: _Word | None = None
    ownership: _Word | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[Hash]
    medium: _Word | None
    group_idx: int | None = None
    locality: _Word | None = None
    ownership: _Word | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """vLLM's own prefix cache is empty. Other tiers withdraw their blocks one by one."""


class _StoredList(BlockStored, frozen=True, tag="BlockStored", array_like=True):
    pass


class _RemovedList(BlockRemoved, frozen=True, tag="BlockRemoved", array_like=True):
    pass


class _ClearedList(AllBlocksCleared, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[Event]


class _ListBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredList | _RemovedList | _ClearedList]


_maps = msgspec.msgpack.Decoder(_Batch)
_lists = msgspec.msgpack.Decoder(_ListBatch)


def decode(payload: bytes | bytearray) -> list[Event]:
    """Decode the events of one message. Raises msgspec.DecodeError for anything else."""
    try:
        return list(_maps.decode(payload).events)
    except msgspec.ValidationError:
        return list(_lists.decode(payload).events)


def where(place: int, name: str, *, shared: bool) -> dict[str, str | None]:
    """Return an event's fields for a place of a Store: RAM is vLLM's medium CPU, and a lower tier
    STORAGE. ``shared``: other hosts reach it too. Then it is owned by the tier's name. Without an
    owner it is this host's: NVIDIA Dynamo passes over blocks of another one."""
    if place == 0:
        return {"medium": "CPU", "locality": "LOCAL", "ownership": None}
    if shared:
        return {"medium": "STORAGE", "locality": "REMOTE", "ownership": name}
    return {"medium": "STORAGE", "locality": "LOCAL", "ownership": None}
