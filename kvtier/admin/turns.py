"""Turns: a Store's work in pieces on the server's loop."""

from __future__ import annotations

import asyncio

from kvtier.core.steps import Steps, T


async def in_turns(steps: Steps[T]) -> T:
    """Do it piece by piece, so that all other work on the loop runs in between."""
    while True:
        try:
            await asyncio.sleep(next(steps))
        except StopIteration as done:
            result: T = done.value
            return result
