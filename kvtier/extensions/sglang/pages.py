"""SGLang's host pages as chunks: their names, and which of them make a hit. Pure: no I/O, clock,
lock, log, torch or sglang.

A chunk is one page of one host pool, its pieces one after another. Of a pool that is kept by head
groups (SGLang's ``page_head`` with ``tp_lcm_size``) it is one group of a page, so engines of every
tensor-parallel size that divides ``tp_lcm_size`` share chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint, flat_key
from kvtier.core.errors import ConfigError

_FORMAT = 1
"""Version of a chunk's bytes and of its key. Raise it when their meaning changes."""
_MAGIC = b"kvtier/sglang/1"
_SHARDED = ("MHA", "Mamba")
"""Parts of host pools' class names whose bytes differ by rank, even if the model's KV is the same
on all."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of one host pool of one rank. ``sizes`` are the bytes of a chunk's pieces. A page has a
    chunk for each of its head ``groups``, or is one chunk if it is not divided by heads."""

    pool: str
    layout: str
    dtype: str
    page_tokens: int
    sizes: tuple[int, ...]
    groups: range = range(0)
    own: bytes = b""
    """Fingerprint of :meth:`chunks`, once it is known."""

    @property
    def count(self) -> int:
        """Number of chunks in a page."""
        return max(1, len(self.groups))

    def chunks(self, engine: Mapping[str, Any], ranks: Any, classes: Sequence[str]) -> ChunkLayout:
        """Make the size and fingerprint of the pool's chunks. ``engine``: the identity without the
        pool. ``ranks``: SGLang's HiCacheStorageConfig. ``classes``: names of the pool's class and
        its bases."""
        arguments = dict(engine["arguments"])
        sharded = not ranks.is_mla_model or any(kind in one for one in classes for kind in _SHARDED)
        tp = [ranks.tp_size, sharded and ranks.tp_rank]
        if self.groups:
            arguments.pop("tp_size", None)
            tp = ["heads", ranks.tp_lcm_size]
        others = [ranks.pp_rank, ranks.pp_size, ranks.attn_cp_rank, ranks.attn_cp_size]
        own = fingerprint(
            {
                **engine,
                "arguments": arguments,
                "sglang": [_FORMAT, "heads" if self.groups else "pieces"],
                "ranks": [*tp, *others, ranks.dcp_rank, ranks.dcp_size],
                "pool": [self.pool, self.layout, self.dtype, self.page_tokens, *self.sizes],
            }
        )
        return ChunkLayout(own, self.page_tokens, self.page_tokens, (sum(self.sizes),), "SGLang")

    def keys(self, hashes: Sequence[str]) -> list[ChunkKey]:
        """Make the keys of pages that SGLang calls ``hashes`` (each over all tokens up to the
        page's end, LoRA adapter and salt), group by group. They are flat: a reader knows no
        parent."""
        ends, head = [one.to_bytes(4) for one in self.groups or (0,)], _MAGIC + self.own
        return [flat_key(head + name.encode() + end) for name in hashes for end in ends]

    def whole(self, chunks: Sequence[bool]) -> list[bool]:
        """Return for each page whether all its chunks are True."""
        return [all(chunks[at : at + self.count]) for at in range(0, len(chunks), self.count)]


def head_groups(ranks: Any, layout: str, pool: str, heads: int) -> range:
    """Number this rank's head groups. Empty if the pool is not kept by head groups. Raises
    ConfigError if heads cannot be divided so."""
    lcm, size = ranks.tp_lcm_size, ranks.tp_size
    if not lcm or ranks.is_mla_model or layout != "page_head" or pool != "kv":
        return range(0)
    groups = lcm // size
    if lcm % size or heads % groups:
        raise ConfigError(
            f"tp_lcm_size={lcm} with --tp-size {size}: a rank has {heads} KV heads, which "
            f"are not divisible by {groups}; give a tp_lcm_size that divides the model's KV heads"
        )
    return range(ranks.tp_rank * groups, (ranks.tp_rank + 1) * groups)


def legal_ends(policy: str, held: Sequence[bool], trailing: int) -> set[int] | None:
    """Return the prefix lengths, in pages, for which a side pool has what ``policy`` asks for: all
    pages, or the last ``trailing``. None for an unknown policy."""
    if policy not in ("all_pages", "trailing_pages"):
        return None
    ends, run, needed = set[int](), 0, max(1, trailing) if policy != "all_pages" else len(held)
    for end, is_held in enumerate(held, 1):
        run = run + 1 if is_held else 0
        if run >= min(end, needed):
            ends.add(end)
    return ends
