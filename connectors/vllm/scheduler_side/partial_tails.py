"""Hits that end within a block: what is kept of the last, unfinished block of a prompt.

With ``prefix_match_unit`` below a hybrid model's block vLLM caches a prompt up to its last multiple
of that unit, and takes such hits from a connector too. Its blocks of recurrent states are long, 784
tokens for Qwen3.6, so a prompt of 900 tokens has a hit of 896 instead of 784.

A partial tail is one more chunk that is shorter than the others: a block of each group of full
attention, of which the first tokens count, and the states behind the last of them. Each piece is
named by the tokens up to its own end (:meth:`~kvtier.core.chunk.KeyChain.within`), so a tail that
ends earlier or later, or the whole chunk, is another one. A hit has all pieces of one end.

Everything is in memory. vLLM's scheduling loop, on one thread.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from kvtier.api import KVStore
from kvtier.connectors.vllm.groups import Geometry, Kind, Piece
from kvtier.connectors.vllm.scheduler_side.hit_table import WholeHit
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.connectors.vllm.tables import NULL_BLOCK, State, Tables, blocks_of
from kvtier.core.chunk import ChunkKey, KeyChain

_MOST_TAILS = 128
"""Most ends within a chunk at which a tail is looked for, the last ones, once for each prompt. With
a server one message asks of all of them."""


def hit_unit(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> int:
    """Return the unit in tokens of the ends that hits may have within a block, 0 if they end with
    blocks. vLLM settles it with the groups. kvtier was tried where all blocks are as long as a
    chunk, with full attention and states and without drafts."""
    unit = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 0
    size = geometry.chunk_tokens
    proven = all(
        group.kind in (Kind.FULL, Kind.STATE) and group.block_tokens == size
        for group in geometry.groups
    )
    if not proven or not geometry.has_state or vllm_config.speculative_config is not None:
        return 0
    return unit if unit < size and not size % max(1, unit) else 0


class _Found(NamedTuple):
    chain: KeyChain
    ends: dict[int, list[tuple[int, ChunkKey]]]
    """Chunk -> ends within it that the store knows, the longest first, and their keys."""


class PartialTails:
    """Partial tails of one engine. ``unit``: see :func:`hit_unit`."""

    def __init__(self, store: KVStore, geometry: Geometry, unit: int) -> None:
        self._store, self._geometry, self._unit = store, geometry, unit

    # ---- what is kept ----------------------------------------------------------------------------

    def pieces(
        self, prompt: Prompt, keys: Sequence[ChunkKey], told: Sequence[State], tables: Tables
    ) -> tuple[dict[ChunkKey, Piece], Tables]:
        """Return pieces of the tail whose states vLLM leaves in this step, and the tables with the
        blocks of these states in them. ``told``: where they lie. vLLM has put each into a block of
        its own, which it keeps for this step."""
        size = self._geometry.chunk_tokens
        ends = {tokens for *_, tokens in told if tokens % size}
        if not self._unit or len(ends) != 1:
            return {}, tables
        (end,) = ends
        chunk, part = divmod(end, size)
        if end % self._unit or end > prompt.request.num_prompt_tokens or chunk > len(keys):
            return {}, tables
        own = [list(table) for table in tables]
        for group in self._geometry.others:
            table = own[group.number]
            table += [NULL_BLOCK] * (chunk + 1 - len(table))
            table[chunk] = NULL_BLOCK
        for number, block, tokens in told:
            if tokens == end:
                own[number][chunk] = block
        key = self._names(prompt, chunk, end)[part // self._unit - 1]
        named = [*keys[:chunk], key]
        found = self._geometry.trunk(chunk, chunk + 1) + self._geometry.behind((chunk + 1) * size)
        if any(blocks_of(self._geometry, piece, own) is None for piece in found):
            return {}, tables
        return {self._geometry.key(piece, named): piece for piece in found}, own

    # ---- what a hit has --------------------------------------------------------------------------

    def hit(
        self, prompt: Prompt, keys: Sequence[ChunkKey], tokens: int, without: Container[int] = ()
    ) -> WholeHit | None:
        """Return the longest hit that ends within the chunk behind the first ``tokens`` tokens, and
        of which the store knows all pieces. ``without``: ends that turned out not to be there."""
        if not self._unit:
            return None
        size, begin = self._geometry.chunk_tokens, prompt.claim.begin
        chunk = tokens // size
        for end, key in self._stored(prompt, chunk):
            if end <= begin or end in without:
                continue
            named = [*keys[:chunk], key]
            run = self._geometry.run(named, begin, (chunk + 1) * size)._replace(end=end)
            found = WholeHit(run, self._store.lookup(run.wanted))
            if found.is_known:
                return found
        return None

    def _stored(self, prompt: Prompt, chunk: int) -> list[tuple[int, ChunkKey]]:
        assert prompt.chain is not None
        found: _Found | None = prompt.notes.get(self)
        if found is None or found.chain is not prompt.chain:
            found = prompt.notes[self] = _Found(prompt.chain, {})
        if chunk not in found.ends:
            request, begin = prompt.request, chunk * self._geometry.chunk_tokens
            most = min(request.num_prompt_tokens, request.num_tokens) - 1
            names = self._names(prompt, chunk, min(most, begin + self._geometry.chunk_tokens - 1))
            ends = [(begin + n * self._unit, key) for n, key in enumerate(names, 1)]
            ends = ends[: -_MOST_TAILS - 1 : -1]
            known = self._store.known([key for _, key in ends]) if ends else ()
            found.ends[chunk] = [end for end, is_known in zip(ends, known, strict=True) if is_known]
        return found.ends[chunk]

    def _names(self, prompt: Prompt, chunk: int, end: int) -> list[ChunkKey]:
        assert prompt.chain is not None
        return prompt.chain.within(chunk, prompt.request.all_token_ids[:end], self._unit)
