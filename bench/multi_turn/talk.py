"""The conversations as clients hold them. A client thinks, asks through the router, reads the
answer, and asks again what failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.bench.multi_turn.arms import Conversations
from kvtier.bench.requests.client import Ask, Client, Outcome, as_prompt

if TYPE_CHECKING:
    import aiohttp

SESSION_HEADER = "X-Session-Id"
_TRIES, _PAUSE_S = 6, 0.5


@dataclass(slots=True)
class Turn(Outcome):
    """``document`` is the conversation, and ``question`` the number of the turn, from 1 on. TTFT
    counts from the first try."""

    tries: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """All conversations wait for each other after turn ``after``. ``act`` runs before they go
    on."""

    after: int
    act: Callable[[], None]


class Talk:
    """All conversations of one arm. ``named``: the router is told which one asks."""

    def __init__(
        self,
        asker: Client,
        work: Conversations,
        named: bool,
        on_done: Callable[[], None],
        pause: Pause | None = None,
    ) -> None:
        self._asker = asker
        self._work = work
        self._named = named
        self._on_done = on_done
        self._pause = pause

    def run(self) -> list[Turn]:
        return asyncio.run(self._run())

    async def _run(self) -> list[Turn]:
        begun = time.perf_counter()
        together = asyncio.Barrier(self._work.sessions)
        each = [self._converse(session, begun, together) for session in range(self._work.sessions)]
        return [turn for turns in await asyncio.gather(*each) for turn in turns]

    async def _converse(self, session: int, begun: float, together: asyncio.Barrier) -> list[Turn]:
        import aiohttp

        said: list[int | str] = []
        turns: list[Turn] = []
        headers = {SESSION_HEADER: f"conversation-{session}"} if self._named else {}
        limits = aiohttp.ClientTimeout(total=self._asker.timeout_s)
        async with aiohttp.ClientSession(
            timeout=limits, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=2**20
        ) as connection:
            for number in range(1, self._work.turns + 1):
                await asyncio.sleep(self._work.thinks(session, number))
                said += self._work.says(session, number)
                ask = Ask(session, number, as_prompt(said), self._work.output_len)
                turn = await self._ask(connection, ask, begun)
                said += [turn.text] if isinstance(said[0], str) else turn.tokens
                turns.append(turn)
                self._on_done()
                if self._pause is not None and self._pause.after == number:
                    if await together.wait() == 0:
                        await asyncio.to_thread(self._pause.act)
                    await together.wait()
        return turns

    async def _ask(self, connection: aiohttp.ClientSession, ask: Ask, begun: float) -> Turn:
        start = time.perf_counter() - begun
        for number in range(1, _TRIES + 1):
            turn = Turn(ask.document, ask.question, start, tries=number)
            await self._asker.ask(connection, ask, turn, begun)
            if turn.successful:
                break
            await asyncio.sleep(_PAUSE_S)
        return turn
