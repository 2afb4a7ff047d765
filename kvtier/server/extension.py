"""The seam of what runs beside a server and is no part of it, kvtier's own and other packages'.

A package names a function in the entry point group ``kvtier.server_extensions``. It gets the
server's configuration before anybody is let in, and gives a :class:`ServerExtension`, or None where
nothing of it is configured::

    [project.entry-points."kvtier.server_extensions"]
    audit = "acme_audit:beside_server"

Beside its connections a server notices, without requests, a tier that is well again: on an idle
server alerts would fire until the next request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.errors import ConfigError, KVTierError
from kvtier.core.steps import Steps, T
from kvtier.tiers.base import Tier

if TYPE_CHECKING:
    from kvtier.server.server import Server

logger = logging.getLogger("kvtier.server")

GROUP = "kvtier.server_extensions"
_OURS = {
    "engine_index": "kvtier.extensions.engine_index.follow:beside_server",
    "event_stream": "kvtier.extensions.event_stream.publishing:beside_server",
}


class ServerExtension:
    def beside(self, server: Server) -> AbstractAsyncContextManager[None]:
        """Return a context that is entered on the server's loop before engines are let in, and left
        when the server has ended. Nothing in it may hold the loop for longer than a millisecond."""
        raise NotImplementedError


def server_extensions(config: Any) -> list[ServerExtension]:
    """Make the extensions that a configuration asks for. Raises ConfigError, also if one fails."""
    points = [EntryPoint(name, where, GROUP) for name, where in _OURS.items()]
    points += sorted(entry_points(group=GROUP), key=lambda point: point.name)
    made = (_made(point, config) for point in points)
    return [extension for extension in made if extension is not None]


def _made(point: EntryPoint, config: Any) -> ServerExtension | None:
    try:
        extension: ServerExtension | None = point.load()(config)
    except KVTierError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the server's extension {point.name} ({point.value}) cannot be used: "
            f"{type(error).__name__}: {error}; repair or uninstall its package"
        ) from error
    return extension


_LOOK_S = 3.0
_QUESTIONS = 8
"""Most questions of a look: several machines may have failed, and each question goes to one."""


async def noticing_recovery(server: Server) -> None:
    """Look at tiers with faults, until cancelled: on the tier's lane, one look at a time."""
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
    """Ask a tier for chunks that do not exist. A machine that is left alone is not asked early."""
    try:
        for _ in range(_QUESTIONS):
            tier.find([ChunkKey(secrets.token_bytes(KEY_BYTES))])
            if not tier.open_breakers:
                break
    finally:
        done()


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run these coroutines as tasks, and cancel them at the end of the context. Logs which fails: a
    bug."""
    tasks = [asyncio.create_task(work) for work in works]
    for task in tasks:
        task.add_done_callback(_ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a bug: %r has ended", task.get_coro(), exc_info=task.exception())


async def in_turns(steps: Steps[T]) -> T:
    """Run ``steps`` piece by piece. The loop serves others in between."""
    while True:
        try:
            await asyncio.sleep(next(steps))
        except StopIteration as done:
            result: T = done.value
            return result
