"""KV events of an engine: what its cache holds, for routers that follow vLLM's event stream.

An event needs the tokens of a chunk. They are known while a prompt names the chunk, and kept as
long as the chunk is in RAM. No tier stores tokens: after a restart a chunk is announced when the
next prompt names it. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier.api import Watched
from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.connectors.vllm.groups import Geometry, Kind, Piece
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import RAM_PLACE, Change
from kvtier.protocol.kv_events import where
from kvtier.tiers.registry import is_shared


class EventGroup(NamedTuple):
    hash_tokens: int
    """Tokens that one of a request's block hashes covers."""
    block_tokens: int
    kind: str
    """Kind of its KV cache spec, as vLLM calls it."""


@dataclass(slots=True)
class _Described:
    """Fields of ``BlockStored`` for one piece, the same for every place. ``tokens`` is None when
    the piece left RAM. ``places``: where it was announced."""

    fields: dict[str, Any]
    tokens: array[int] | None = None
    places: set[int] = field(default_factory=set)


class Announcer(Extension):
    def __init__(
        self, store: Watched, geometry: Geometry, groups: Mapping[int, EventGroup]
    ) -> None:
        self._store, self._geometry, self._groups = store, geometry, groups
        self._names = store.place_names
        self._described: dict[ChunkKey, _Described] = {}
        self._ready: list[Any] = []
        store.changes()  # a connection begins with a loss, which would cost the first prompt's

    @property
    def waits(self) -> bool:
        return bool(self._ready) or self._store.has_changes

    def saving(
        self, prompt: Prompt, saved: int, computed: int, pieces: Mapping[ChunkKey, Piece]
    ) -> None:
        for key, piece in pieces.items() if not prompt.is_hidden else ():
            self._describe(prompt.request, key, piece)

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        """Forget pieces whose save failed."""
        is_kept = job.save is None or not (job.failed or job.dropped)
        for key in () if is_kept else job.keys:
            described = self._described.get(key)
            if described is not None and not described.places:
                del self._described[key]

    def asked(self, prompt: Prompt, keys: Sequence[ChunkKey]) -> None:
        """Announce those of the chunks that are held and not announced yet, once a prompt."""
        if prompt.is_hidden or prompt.claim.was_looked_up:
            return
        geometry, request = self._geometry, prompt.request
        pieces = dict(
            zip(geometry.trunk_keys(keys, len(keys)), geometry.trunk(0, len(keys)), strict=True)
        )
        bare = [key for key in pieces if not self._is_announced(key)]
        for key, places in zip(bare, self._store.places(bare), strict=True):
            if not places:
                break
            described = self._describe(request, key, pieces[key])
            for place in places if described is not None else ():
                self._stored(key, place)

    def events(self) -> list[Any]:
        changes = self._store.changes()
        if changes is None:
            self._withdraw_all()
            self._names = self._store.place_names
        left = {key for change in changes or () if (key := self._change(change)) is not None}
        for key in left:
            if not self._described[key].places:
                del self._described[key]
        events, self._ready = self._ready, []
        return events

    # ---- steps -----------------------------------------------------------------------------------

    def _is_announced(self, key: ChunkKey) -> bool:
        """Whether the chunk is announced, and would be at each further place."""
        described = self._described.get(key)
        return described is not None and described.tokens is not None and bool(described.places)

    def _change(self, change: Change) -> ChunkKey | None:
        """Announce or withdraw one change. Returns the chunk's key if it left a place."""
        place, key, there = change
        if there:
            self._stored(key, place)
            return None
        described = self._described.get(key)
        if described is None:
            return None
        if place == RAM_PLACE:
            described.tokens = None
        if place in described.places:
            described.places.discard(place)
            self._ready.append(self._removed(described, place))
        return key

    def _stored(self, key: ChunkKey, place: int) -> None:
        described = self._described.get(key)
        if described is None or described.tokens is None or place in described.places:
            return
        from vllm.distributed.kv_events import BlockStored

        described.places.add(place)
        event = described.fields | self._where(place)
        event["token_ids"] = described.tokens.tolist()
        self._ready.append(_made(BlockStored, event))
        self._store.announce(key, place, event)

    def _where(self, place: int) -> dict[str, str | None]:
        name = self._names[place]
        return where(place, name, shared=is_shared(name))

    def _removed(self, described: _Described, place: int) -> Any:
        from vllm.distributed.kv_events import BlockRemoved

        return _made(BlockRemoved, described.fields | self._where(place))

    def _withdraw_all(self) -> None:
        """Withdraw all chunks, because changes were lost. Prompts announce them anew."""
        for described in self._described.values():
            self._ready += [self._removed(described, place) for place in sorted(described.places)]
        self._described.clear()

    def _describe(self, request: Any, key: ChunkKey, piece: Piece) -> _Described | None:
        group = self._groups.get(piece.group.number)
        if group is None or piece.group.kind is not Kind.FULL:
            return None
        size = self._geometry.piece_tokens
        begin, end = piece.number * size, (piece.number + 1) * size
        hashes = self._hashes(request, group, begin, end)
        if len(hashes) * group.block_tokens != size:
            return None  # vLLM has not hashed these tokens yet.
        known = self._described.get(key)
        if known is None:
            adapter = request.lora_request
            fields = {
                "block_hashes": hashes,
                "parent_block_hash": self._parent(request, group, begin),
                "block_size": group.block_tokens,
                "lora_id": None if adapter is None else adapter.adapter_id,
                "lora_name": None if adapter is None else adapter.name,
                "extra_keys": _extras(request, begin, end, group.block_tokens),
                "group_idx": piece.group.number,
                "kv_cache_spec_kind": group.kind,
                "session_id": getattr(request, "session_id", None),
            }
            known = self._described[key] = _Described(fields)
        if known.tokens is None:
            known.tokens = array("I", request.all_token_ids[begin:end])
        return known

    @staticmethod
    def _hashes(request: Any, group: EventGroup, begin: int, end: int) -> list[Any]:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

        found = resolve_block_hashes(request.block_hashes, group.hash_tokens, group.block_tokens)
        most = len(request.block_hashes) * group.hash_tokens // group.block_tokens
        first, last = begin // group.block_tokens, min(end // group.block_tokens, most)
        return [maybe_convert_block_hash(found[index]) for index in range(first, last)]

    def _parent(self, request: Any, group: EventGroup, begin: int) -> Any:
        before = begin - group.block_tokens
        return self._hashes(request, group, before, begin)[0] if before >= 0 else None


def extensions(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    """Make the announcer where vLLM's configuration asks for events."""
    wanted = getattr(facts.vllm_config, "kv_events_config", None)
    if not getattr(wanted, "enable_kv_cache_events", False):
        return ()
    groups = groups_of(facts.vllm_config, facts.kv_cache_config, tools.geometry)
    return (Announcer(tools.store.watch(), tools.geometry, groups),)


def groups_of(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> dict[int, EventGroup]:
    """Return the groups of full attention by number, as events describe them."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return {
        group.number: EventGroup(
            hash_tokens, group.block_tokens, get_kv_cache_spec_kind(specs[group.number]).value
        )
        for group in geometry.groups
        if group.kind is Kind.FULL
    }


def _extras(
    request: Any, begin: int, end: int, block_tokens: int
) -> list[tuple[Any, ...] | None] | None:
    """Return the values that vLLM hashed into each block besides tokens, as vLLM publishes them."""
    from vllm.v1.core import kv_cache_utils

    media, extras = 0, list[tuple[Any, ...] | None]()
    for first in range(begin, end, block_tokens):
        one, media = kv_cache_utils.generate_block_hash_extra_keys(
            request, first, first + block_tokens, media
        )
        extras.append(one)
    published = getattr(kv_cache_utils, "to_event_extra_keys", list)
    found: list[tuple[Any, ...] | None] | None = published(extras)
    return found


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Make an event of the ``fields`` that this vLLM's version has."""
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})
