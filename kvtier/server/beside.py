"""Work on a server's loop beside its connections: a tier that is well again is noticed even
without requests, and long work is done in turns.

A tier finds out what became of its machine by the calls that it serves. On an idle server there are
none, and its trouble would be told on, and alerts fire, until the next request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.tiers.base import Tier

if TYPE_CHECKING:
    from kvtier.server.server import Server


from kvtier.core.steps import Steps, T

_LOOK_S = 3.0
_QUESTIONS = 8
"""Several machines may have failed, and a question goes to one of them."""


async def noticing_recovery(server: Server) -> None:
    """Until cancelled, on the tiers' own lanes, one look at a time."""
    looking: set[int] = set()
    while True:
        await asyncio.sleep(_LOOK_S)
        for size_class in server.size_classes.open.values():
            store = size_class.store
            for tier, lane in zip(store.tiers, store.lanes, strict=True):
                if (tier.open_breakers or tier.trouble) and id(tier) not in looking:
                    looking.add(id(tier))
                    done = partial(server.loop.call_soon_threadsafe, looking.discard, id(tier))
                    if not lane.submit(partial(_ask, tier, done)):
                        looking.discard(id(tier))


def _ask(tier: Tier, done: Callable[[], object]) -> None:
    """Ask for chunks that nobody has. A machine that is left alone is not asked before its time
    comes."""
    try:
        for _ in range(_QUESTIONS):
            tier.find([ChunkKey(secrets.token_bytes(KEY_BYTES))])
            if not tier.open_breakers:
                break
    finally:
        done()


async def in_turns(steps: Steps[T]) -> T:
    """Run ``steps`` piece by piece. The loop serves others in between."""
    while True:
        try:
            await asyncio.sleep(next(steps))
        except StopIteration as done:
            result: T = done.value
            return result
