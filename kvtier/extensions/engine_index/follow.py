"""Follow: the engines' event streams, by ZeroMQ.

A picture holds for one connection, and is made anew from the engine's replay buffer. Messages are
numbered. Where the replay endpoint has not got what is missing, the picture is dropped, and goes on
with what comes next. The last messages of a burst can be missing without a sign, so a stream that
is quiet is asked, too. An engine is not believed: what is wrong with a message ends the connection
at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from kvtier.admin.forms import EngineLookup, EngineTierLookup
from kvtier.admin.status import EngineIndex, EngineStatus
from kvtier.config.keys import Config
from kvtier.config.values import Stream, parse_streams
from kvtier.extensions import zmtp
from kvtier.extensions.engine_index.kv_event_pieces import decoding
from kvtier.extensions.engine_index.picture import Picture, PromptBlocks
from kvtier.server.extension import ServerExtension, in_turns, running
from kvtier.server.server import Server
from kvtier.server.strangers import LogLimit

logger = logging.getLogger("kvtier.admin.engines")
_strangers = logging.getLogger("kvtier.admin.engines.follow")
"""Logger for faults that engines cause, with a limit."""
_strangers.addFilter(LogLimit(20, 60.0))

EVENTS = ("message", "gap", "dropped", "refused")
"""Counted events: messages applied, gaps between them, pictures dropped, messages refused."""
QUIET_S = 5.0
"""Silence after which the replay endpoint is asked whether messages are missing."""
ALONE_S = 10.0
"""Time without a connection after which an engine is reported as trouble."""
_REPLY_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Pauses between attempts to connect. Doubled until a message was understood."""
_PING_S = 1.0
"""Interval at which a silent connection is asked for a sign of life."""
_SILENT_PINGS = 3
"""Intervals without a sign of life after which a connection ends."""
_QUIET_PINGS = int(QUIET_S / _PING_S)
_LONGEST_CATCH_UP_S = 60.0
_MOST_TEXTS = 8
_MESSAGE_BYTES = 8 << 20
"""Longest message. vLLM publishes one for each step."""
_MOST_NUMBER = 1 << 63
"""Bound of messages' numbers. vLLM counts from 0."""
_END_OF_REPLAY = (2**64 - 1).to_bytes(8, "big")
_FAULTS = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""Errors that a malformed message can cause."""


class _Follower:
    """Follower of one engine. ``followed``: its stream is connected, and the picture up to date."""

    def __init__(self, stream: Stream, most_blocks: int) -> None:
        self.stream = stream
        self.picture = Picture(most_blocks)
        self.followed = False
        self.counts: Counter[str] = Counter()
        self._trouble: MutableMapping[str, str] = {}
        self._next: int | None = None
        """Number of the message due next, or None for any."""
        self._pause = _FIRST_PAUSE_S
        self._said: set[str] = set()

    def _drop(self) -> None:
        self.picture.clear()
        self.counts["dropped"] += 1

    async def run(self, trouble: MutableMapping[str, str]) -> None:
        """Follow, until cancelled. ``trouble`` gets by subject what cannot be followed."""
        loop, self._trouble = asyncio.get_running_loop(), trouble
        alone = loop.time()
        while True:
            why = "it ended"
            try:
                await self._connection()
            except (OSError, TimeoutError, zmtp.ZmtpError) as error:
                why = str(error) or "it does not answer"
            except Exception as error:
                why = f"a bug, {type(error).__name__}"
                logger.exception("%s: a bug: its stream cannot be read", self.stream.name)
            was_followed, self.followed = self.followed, False
            if was_followed or self.picture.blocks:
                self._drop()
            if was_followed:
                alone = loop.time()
                self._tell(f"its stream of KV events has ended: {why}")
            elif loop.time() - alone >= ALONE_S:
                self._is_alone(why)
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _is_alone(self, why: str) -> None:
        stream = self.stream
        text = (
            f"{self.stream.name}: its KV events cannot be followed at {stream.endpoint}: "
            f"{why:.200}; /v1/lookup knows nothing of it. Is the engine up? vLLM listens only at "
            "ipc:// endpoints and at those with a *, and connects to others: see "
            "deploy/routing/README.md"
        )
        if self._trouble.get(self._subject) is None:
            logger.error("%s", text)
        self._trouble[self._subject] = text

    @property
    def _subject(self) -> str:
        return f"engine {self.stream.name}"

    async def _connection(self) -> None:
        peer = await zmtp.connected(self.stream.endpoint, _MESSAGE_BYTES)
        try:
            await peer.greet("SUB", ("PUB", "XPUB"))
            await peer.send([b"\x01"])  # a subscription to everything
            self._next = None
            if self.stream.replay is not None:
                self._next = 0
                await self._catch_up()
            self.followed = True
            self._trouble.pop(self._subject, None)
            logger.info("%s: its KV events are followed", self.stream.name)
            await self._listen(peer)
        finally:
            peer.close()

    async def _listen(self, peer: zmtp.Peer) -> None:
        """Apply messages until the connection ends or gives no sign of life."""
        quiet = silent = 0
        heard_at = peer.heard_at
        coming = asyncio.create_task(peer.receive())
        try:
            while True:
                if (await asyncio.wait({coming}, timeout=_PING_S))[0]:
                    await self._heard(coming.result())
                    coming = asyncio.create_task(peer.receive())
                    quiet = silent = 0
                    continue
                quiet += 1
                silent = silent + 1 if heard_at == peer.heard_at else 0
                heard_at = peer.heard_at
                if silent == _SILENT_PINGS:
                    raise TimeoutError("it gives no sign of life")
                await peer.ping()
                if quiet % _QUIET_PINGS == 0:
                    await self._catch_up()
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _heard(self, frames: Sequence[bytearray]) -> None:
        number = _number(frames[1]) if len(frames) == 3 else None
        if number is None:
            self._refuse("no message of vLLM's")
            return
        if self._next is not None and number > self._next:
            self.counts["gap"] += 1
            await self._catch_up()
            if number > self._next:
                self._drop()
        if self._next is None or number >= self._next:
            await self._apply(number, frames[2])

    async def _apply(self, number: int, payload: bytearray) -> None:
        try:
            await in_turns(self.picture.apply(await in_turns(decoding(payload))))
        except _FAULTS as error:
            self._refuse(str(error))
        else:
            self._pause = _FIRST_PAUSE_S
            self._said.clear()
        self.counts["message"] += 1
        self._next = number + 1

    def _refuse(self, why: str) -> None:
        self.counts["refused"] += 1
        self._drop()
        self._tell(f"a message of its stream was refused: {why[:200]!r}")

    def _tell(self, text: str) -> None:
        """Log ``text`` once until a message is understood again: an engine could flood the log."""
        if text not in self._said and len(self._said) < _MOST_TEXTS:
            self._said.add(text)
            _strangers.warning("%s: %s", self.stream.name, text)

    # ---- what was missed -------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Replay the missed messages. Raises TimeoutError for an answer without end."""
        ended, begun = False, None
        async with asyncio.timeout(_LONGEST_CATCH_UP_S):
            while not ended and self._next != begun and self.stream.replay is not None:
                begun = self._next
                ended = await self._replay(self.stream.replay)

    async def _replay(self, endpoint: str) -> bool:
        """Apply a replay's messages. Returns False if it broke off and must be asked for again."""
        try:
            peer = await zmtp.connected(endpoint, _MESSAGE_BYTES)
        except OSError:
            return self._not_replayed()
        try:
            await peer.greet("DEALER", ("ROUTER",))
            await peer.send([b"", (self._next or 0).to_bytes(8, "big")])
            first = True
            while True:
                async with asyncio.timeout(_REPLY_S):
                    frames = await peer.receive()
                if len(frames) > 1 and frames[-2] == _END_OF_REPLAY:
                    return True
                if (number := _number(frames[-2]) if len(frames) > 1 else None) is None:
                    self._refuse("no replay of vLLM's")
                    return False
                next_ = self._next or 0
                if number > next_ and not first:
                    return False
                if number > next_:
                    self._drop()
                if number >= next_:
                    await self._apply(number, frames[-1])
                    first = False
        except zmtp.ZmtpError as error:
            self._refuse(f"replay: {error}")
            return False
        except (OSError, TimeoutError):
            return self._not_replayed() if first else False
        finally:
            peer.close()

    def _not_replayed(self) -> bool:
        self._tell("its replay endpoint does not answer")
        return False


def _number(frame: bytearray) -> int | None:
    number = int.from_bytes(frame, "big")
    return number if len(frame) == 8 and number < _MOST_NUMBER else None


_MOST_BLOCKS = 1 << 21
"""Blocks in the pictures of all engines together: about 460 MB."""


def beside_server(config: Config) -> FollowedEngines | None:
    return FollowedEngines(parse_streams(config.admin.engines)) if config.admin.engines else None


class FollowedEngines(EngineIndex, ServerExtension):
    def __init__(self, streams: Sequence[Stream]) -> None:
        self._engines = [_Follower(stream, _MOST_BLOCKS // len(streams)) for stream in streams]

    def beside(self, server: Server) -> AbstractAsyncContextManager[None]:
        """Follow the engines. Tells ``server.trouble``, by subject, which cannot be followed."""
        return running(*(engine.run(server.trouble) for engine in self._engines))

    def status(self) -> list[EngineStatus]:
        return [
            EngineStatus(
                engine=engine.stream.name,
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
            found.append(EngineLookup(engine.stream.name, leading.tokens, tiers, engine.followed))
        return found
