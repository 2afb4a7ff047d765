"""What a request asks of documents from other prompts, and what was claimed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.core.chunk import ChunkKey
from kvtier.extensions.spans.plan import Section
from kvtier.spans import Range
from kvtier.store.lease import LoadLease

FIELD = "kvtier.spans"
"""In a request's ``kv_transfer_params``: its ranges. In the answer's: what came of them."""
FIRST = "kvtier.span_first"
"""Beside it: how many tokens at the beginning of each moved span are computed in place."""


@dataclass(slots=True)
class SpanRequest:
    """What a request asks for, and what was claimed for it."""

    ranges: list[Range]
    homes: list[list[ChunkKey]]
    """For each range after the anchor's: the keys of its home's chunks."""
    twins: list[tuple[int, int, int, int]]
    """``(source, chunk, one, other)``: places in a chunk of a home that have the same token. None
    when the rotation was checked before."""
    first: int = 0
    """Tokens of each moved span that are computed in place."""
    begin: int = -1
    """Tokens vLLM had by itself when the claims were made."""
    sections: list[Section] = field(default_factory=list)
    leases: dict[int, LoadLease] = field(default_factory=dict)
    """By the token at which its section begins."""
    until: float = 0.0
    missing: list[int] = field(default_factory=list)
    """Ranges whose homes are not there, or not to the end of the document."""
    reused: int = 0
    """Tokens that were loaded for it when some of them came from another place, without those that
    were computed in place."""
    declined: str = ""

    def drop(self) -> None:
        """Let go of what was claimed."""
        for lease in self.leases.values():
            lease.close()
        self.leases, self.sections, self.begin = {}, [], -1

    def told(self, request: Any) -> dict[str, Any]:
        """For the answer."""
        if not self.reused:
            return declined(self.declined or "failed", self.missing)
        computed = request.num_prompt_tokens - self.reused
        return {"reused": self.reused, "computed": computed, "missing": self.missing}


def declined(reason: str, missing: Sequence[int] = ()) -> dict[str, Any]:
    """For the answer to a request that was computed exactly."""
    return {"reused": 0, "declined": reason, "missing": list(missing)}
