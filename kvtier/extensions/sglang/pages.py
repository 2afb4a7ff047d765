"""SGLang's host pages as chunks: their names, and which of them make a hit. Pure: no I/O, clock,
lock, log, torch or sglang.

A chunk is one page of one host pool, its pieces one after another. Of a pool that is kept by head
groups (SGLang's ``page_head`` with ``tp_lcm_size``) it is one group of a page, so engines of every
tensor-parallel size that divides ``tp_lcm_size`` share chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint, flat_key
from kvtier.core.errors import ConfigError

_FORMAT = 1
"""Version of a chunk's bytes and of what names them. Raise it when their meaning changes."""
_MAGIC = b"kvtier/sglang/1"
_SHARDED = ("MHA", "Mamba")
"""Names of host pools' classes whose bytes differ by rank, also where the model's KV is the same
on all."""

Form = Literal["pieces", "flat", "heads"]
"""A chunk is copied from the pool's memory, piece by piece, or made by the pool as one flat
tensor, or has the pieces of one head group. The order of bytes differs."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """The pages of one host pool of one rank. ``sizes`` are the bytes of a chunk's pieces. A page
    has the ``groups`` chunks from number ``first_group`` on."""

    pool: str
    layout: str
    dtype: str
    page_tokens: int
    form: Form
    sizes: tuple[int, ...]
    groups: int = 1
    first_group: int = 0

    def chunks(self, engine: Mapping[str, Any], ranks: Any, classes: Sequence[str]) -> ChunkLayout:
        """Size and fingerprint of the pool's chunks. ``engine``: the identity without the pool.
        ``ranks``: SGLang's HiCacheStorageConfig. ``classes``: names of the pool's class and of
        those it derives from."""
        arguments = dict(engine["arguments"])
        sharded = not ranks.is_mla_model or any(kind in one for one in classes for kind in _SHARDED)
        tp = [ranks.tp_size, sharded and ranks.tp_rank]
        if self.form == "heads":
            arguments.pop("tp_size", None)
            tp = ["heads", ranks.tp_lcm_size]
        others = [ranks.pp_rank, ranks.pp_size, ranks.attn_cp_rank, ranks.attn_cp_size]
        own = fingerprint(
            {
                **engine,
                "arguments": arguments,
                "sglang": [_FORMAT, self.form],
                "ranks": [*tp, *others, ranks.dcp_rank, ranks.dcp_size],
                "pool": [self.pool, self.layout, self.dtype, self.page_tokens, *self.sizes],
            }
        )
        return ChunkLayout(own, self.page_tokens, self.page_tokens, (sum(self.sizes),), "SGLang")

    def keys(self, own: bytes, hashes: Sequence[str]) -> list[ChunkKey]:
        """Keys of the pages that SGLang calls ``hashes`` (each over all tokens up to the page's
        end, LoRA adapter and salt), group by group. They are flat: a reader knows no parent."""
        groups = range(self.first_group, self.first_group + self.groups)
        ends, head = [group.to_bytes(4) for group in groups], _MAGIC + own
        return [flat_key(head + name.encode() + end) for name in hashes for end in ends]

    def whole(self, chunks: Sequence[bool]) -> list[bool]:
        """Of each page, whether all its chunks are True."""
        return [all(chunks[at : at + self.groups]) for at in range(0, len(chunks), self.groups)]


def head_groups(ranks: Any, layout: str, pool: str, heads: int) -> tuple[int, int]:
    """Head groups of a page of this rank, and the number of the first. (0, 0): the pool is not kept
    by head groups. Raises ConfigError where heads cannot be divided so."""
    lcm, size = ranks.tp_lcm_size, ranks.tp_size
    if not lcm or ranks.is_mla_model or layout != "page_head" or pool != "kv":
        return 0, 0
    groups = lcm // size
    if lcm % size or heads % groups:
        raise ConfigError(
            f"tp_lcm_size={lcm} with --tp-size {size}: a rank has {heads} KV heads, which "
            f"are not divisible by {groups}; give a tp_lcm_size that divides the model's KV heads"
        )
    return groups, ranks.tp_rank * groups


def legal_ends(policy: str, held: Sequence[bool], trailing: int) -> set[int] | None:
    """The prefix lengths, in pages, for which a side pool has what ``policy`` asks for: all pages,
    or the last ``trailing``. None: an unknown policy."""
    if policy == "all_pages":
        return set(range(1, sum(1 for _ in takewhile(bool, held)) + 1))
    if policy != "trailing_pages":
        return None
    ends, run = set[int](), 0
    for end, is_held in enumerate(held, 1):
        run = run + 1 if is_held else 0
        if run >= min(end, max(1, trailing)):
            ends.add(end)
    return ends
