"""The optimum, which knows the future: the chunk whose next use comes last leaves first (Belady, *A
study of replacement algorithms*, IBM Systems Journal 5(2), 1966). It is an upper bound with which
policies are compared."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Result
from kvtier.core.chunk import ChunkKey

_NEVER = 1 << 60


def belady(trace: Sequence[Request], slots: int) -> Result:
    """Hits with room for ``slots`` chunks, all in RAM. Chunks that will never be used again are not
    taken."""
    after = _next_uses(trace)
    held: dict[ChunkKey, int] = {}
    leaving: list[tuple[int, int, ChunkKey]] = []
    hits = 0
    for at, request in enumerate(trace):
        run = request.run
        hits += next((place for place, key in enumerate(run) if key not in held), len(run))
        for place, key in enumerate(run):
            use = after[at][place]
            held.pop(key, None)
            if use < _NEVER:
                held[key] = use
                heapq.heappush(leaving, (-use, -place, key))
        while len(held) > slots:
            use, _, key = heapq.heappop(leaving)
            if held.get(key) == -use:
                del held[key]
    asked = sum(len(request.run) for request in trace)
    return Result(len(trace), asked, hits, 0, 0, 0, 0, 0, {})


def _next_uses(trace: Sequence[Request]) -> list[list[int]]:
    """For each chunk of each request, the number of the next request that contains it."""
    seen: dict[ChunkKey, int] = {}
    uses: list[list[int]] = []
    for at in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(key, _NEVER) for key in trace[at].run])
        seen.update(dict.fromkeys(trace[at].run, at))
    return uses[::-1]
