"""What is asked of one arm: a few requests that decode, and a long one that comes meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier.bench.compare.latency.windows import Pair, Window
from kvtier.bench.requests.client import Client, Outcome, RequestError, all_succeeded
from kvtier.bench.requests.prompts import Ask, as_prompt, draw

SHORT_LENGTH = 2048
"""Tokens of one of the documents that push the long one out."""
_OUT = 1.8
"""How many times the long request the short documents have together. vLLM's own cache holds 1.5 of
it. So does the RAM of an arm that is named for a lower place."""
_DECODED_LENGTH, _DECODED_MOST = 64, 2000
_FIRST = 8
"""The first tokens of a request that do not count."""
_AFTER = 2
"""How many more tokens each request gets after the window."""


@dataclass(frozen=True, slots=True)
class Work:
    """Lengths are in tokens. ``words`` is what prompts are drawn from. ``streams``: how many
    requests decode. ``quiet``: how many tokens each of them gets before the long request comes."""

    words: Sequence[int | str]
    document_length: int
    question_length: int
    streams: int
    quiet: int

    def long(self, question: int) -> Ask:
        words = self._draw("document", self.document_length)
        words += self._draw(("question", question), self.question_length)
        return Ask(0, question, as_prompt(words), 1)

    def short(self) -> list[Ask]:
        """These push the long document out of vLLM's own cache, and out of RAM that is small."""
        count = math.ceil(_OUT * (self.document_length + self.question_length) / SHORT_LENGTH)
        return [
            Ask(1 + index, 0, as_prompt(self._draw(("short", index), SHORT_LENGTH + 1)), 1)
            for index in range(count)
        ]

    def decoding(self, turn: int) -> list[Ask]:
        """Requests that nothing else shares. They are ended before their answers are."""
        return [
            Ask(
                -1 - index,
                turn,
                as_prompt(self._draw(("decoding", turn, index), _DECODED_LENGTH)),
                _DECODED_MOST,
            )
            for index in range(self.streams)
        ]

    def _draw(self, what: object, length: int) -> list[int | str]:
        return draw(self.words, length, 0, what)


def pairs(asker: Client, work: Work, loads: int) -> list[Pair]:
    """Fill the caches, and measure ``loads`` pairs. Raises RequestError when a request fails."""
    found = []
    first = replace(work.decoding(-2)[0], output_len=1)
    _window(asker, work.decoding(-1), first, work)  # what only a server's first requests cost
    _all(asker, [work.long(-1)])
    for turn in range(loads):
        _all(asker, work.short())
        loaded, warm = (
            _window(asker, work.decoding(number), work.long(number), work)
            for number in (2 * turn, 2 * turn + 1)
        )
        found.append(Pair(loaded, warm))
    return found


def _all(asker: Client, asks: Sequence[Ask]) -> None:
    all_succeeded("latency", asker.run(asks, 1, lambda: None))


def _window(asker: Client, decoding: Sequence[Ask], long: Ask, work: Work) -> Window:
    try:
        return asyncio.run(_watched(asker, decoding, long, work.quiet))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


@dataclass(slots=True)
class _Stream:
    """One request that decodes. ``times``: when each token came."""

    outcome: Outcome
    times: list[float] = field(default_factory=list)


async def _watched(asker: Client, decoding: Sequence[Ask], long: Ask, quiet: int) -> Window:
    import aiohttp

    begun, news = time.perf_counter(), asyncio.Event()
    streams = [_Stream(Outcome(ask.document, ask.question, False, 0.0)) for ask in decoding]
    limits = aiohttp.ClientTimeout(total=asker.timeout_s)
    async with (
        aiohttp.ClientSession(timeout=limits, read_bufsize=2**20) as session,
        asyncio.TaskGroup() as group,
    ):

        async def decode(ask: Ask, stream: _Stream) -> None:
            def heard() -> None:
                now, known = time.perf_counter() - begun, len(stream.times)
                stream.times += [now] * (len(stream.outcome.tokens) - known)
                news.set()

            await asker.ask(session, ask, stream.outcome, begun, heard)
            raise RequestError(f"a request ended too early: {stream.outcome.error or 'no error'}")

        async def decoded(more: int) -> None:
            """Wait until each request has so many more tokens."""
            least = [len(one.times) + more for one in streams]
            while any(len(one.times) < count for one, count in zip(streams, least, strict=True)):
                news.clear()
                await news.wait()

        tasks = [group.create_task(decode(*each)) for each in zip(decoding, streams, strict=True)]
        await decoded(_FIRST + quiet)
        asked = Outcome(long.document, long.question, False, time.perf_counter() - begun)
        await asker.ask(session, long, asked, begun)
        await decoded(_AFTER)
        for task in tasks:
            task.cancel()
    all_succeeded("latency", [asked])
    assert asked.ttft is not None
    arrival, times = asked.request_start, [one.times for one in streams]
    window = Window.of(times, _FIRST, arrival, asked.ttft, asked.cached_tokens or 0)
    since = begun + max(one[_FIRST] for one in times)
    return replace(window, since=since, began=begun + arrival)
