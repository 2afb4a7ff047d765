"""The engines of ``admin.engines``: followed beside a server, and asked by its admin interface."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from kvtier.admin.forms import EngineLookup, EngineTierLookup
from kvtier.admin.status import EngineIndex, EngineStatus
from kvtier.config.keys import Config
from kvtier.config.values import Stream, parse_streams
from kvtier.extensions.engine_index.follow import EVENTS, Followed, following
from kvtier.extensions.engine_index.picture import PromptBlocks
from kvtier.server.extension import ServerExtension, in_turns
from kvtier.server.server import Server

_MOST_BLOCKS = 1 << 21
"""Of all engines together: about 460 MB."""


def beside_server(config: Config) -> FollowedEngines | None:
    return FollowedEngines(parse_streams(config.admin.engines)) if config.admin.engines else None


class FollowedEngines(EngineIndex, ServerExtension):
    def __init__(self, streams: Sequence[Stream]) -> None:
        self._engines = [Followed(stream, _MOST_BLOCKS // len(streams)) for stream in streams]

    def beside(self, server: Server) -> AbstractAsyncContextManager[None]:
        return following(self._engines, server.trouble)

    def status(self) -> list[EngineStatus]:
        return [
            EngineStatus(
                engine=engine.name,
                followed=engine.followed,
                blocks=dict(engine.picture.blocks),
                ignored_blocks=engine.picture.ignored,
                events={event: engine.counts[event] for event in EVENTS},
            )
            for engine in self._engines
        ]

    async def lookup(self, tokens: Sequence[int], salt: str | None) -> list[EngineLookup]:
        prompt, found = PromptBlocks(tokens, salt), []
        for engine in self._engines:
            leading = await in_turns(engine.picture.lookup(prompt))
            tiers = [EngineTierLookup(*pair) for pair in leading.items()]
            found.append(EngineLookup(engine.name, leading.tokens, tiers, engine.followed))
        return found
