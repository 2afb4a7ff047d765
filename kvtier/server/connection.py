"""Connection: one client's socket, from its greeting to its end. Only this file and server.py know
asyncio.

After its greeting a connection is a Session (same host, pool mapped) or a ChunkStream (another
host). It owns what the client asked for, and gives it back in one of two ways:

- Only this process touches a stream's slots. With its connection everything of it ends.
- An attached engine maps the pool in several processes (its scheduler and workers). Each of them
  keeps the write end of a pipe, the *witness*, open. So end-of-file at the server's end means that
  no process is left that could read or write a slot. A session's leases end when both its
  connection and its witness are closed, and no sooner: a worker may outlive its scheduler for a
  moment, and a live engine may lose its connection in the middle of a copy. There are no time-outs.
  Of an engine whose scheduler is on another host, each worker that joins has a witness of its own,
  and none is let in after the connection.

Nothing that a client sends can do more than close its own connection. Every connection gets its
turn: the server answers a question in pieces (:mod:`kvtier.core.steps`), for about a millisecond at
a time, and then serves all other connections first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import ConfigError, KVTierError, RefusedSize
from kvtier.core.steps import Steps
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.wire import client_proof, proven, server_proof
from kvtier.server.listeners import Listener
from kvtier.server.registry import SizeClass, SizeClasses
from kvtier.server.session import Publication, Session
from kvtier.server.strangers import client_of
from kvtier.server.stream import ChunkStream
from kvtier.server.witnesses import Witnesses, notice_lost_hosts

logger = logging.getLogger("kvtier.server")

_TURN_S = 0.001
"""Time of work on one connection, and a piece more, before the others get their turn."""
_UNSENT_BYTES = 1 << 20
"""Most unread answers. Beyond this an attached client is dropped, and a stream waits."""
_GREETING_S = 4.0
_CALL_S = 10.0
_SLOWEST_BYTES_S = 4 << 20
"""Slowest pace of a stream's chunk, beside ten seconds a question. Clients give up sooner."""
_MOST_WORKERS = 64
"""Most workers with one ticket: several for each GPU of a host. Each costs a descriptor."""
_LOOK_S = 5.0
_FLUSH_S = 2.0


class Host(Protocol):
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float]
    token: bytes | None
    size_classes: SizeClasses
    announced: Publication | None
    name: bytes
    steered: dict[bytes, Connection]

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` on the loop. Any thread."""
        ...

    def dropped(self, listener: Listener, reason: str) -> None: ...

    def greeted(self, one: Connection) -> None: ...

    def closed(self, one: Connection) -> None:
        """Note that a connection has ended, though it may still linger."""
        ...

    def retired(self, one: Connection) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One client's socket. All methods run on the loop."""

    def __init__(self, host: Host, listener: Listener, sock: socket.socket) -> None:
        self._host = host
        self.listener = listener
        self._sock = sock
        self._inbox: Inbox[Any] = Inbox(wire.Hello, wire.MAX_GREETING_BYTES)
        self._challenge = wire.Challenge(wire.VERSION, os.urandom(wire.NONCE_BYTES))
        self._transport: asyncio.Transport
        self._client = ""
        self._size_class: SizeClass | None = None
        self._session: Session | None = None
        self._stream: ChunkStream | None = None
        self._greeted = False
        self._payload = False
        self._turning = self._flowing = self._choked = self._finishing = False
        self._closed = self._lost = self._scheduled = False
        self._rest: asyncio.TimerHandle | None = None
        self._work: Steps[wire.Answer | None] | None = None
        self._ended = False
        self._witnesses = Witnesses(host.loop, self._retire)
        self._ticket = b""
        self._waiting: int | None = None
        self._waiting_until: asyncio.TimerHandle | None = None
        self._arrivals_seen = 0
        self._asked_at = time.monotonic()
        self._call_s = _CALL_S
        self._timers: list[asyncio.TimerHandle] = []
        """Timers to cancel at the end: one would keep a closed connection in memory."""

    # ---- asyncio's calls -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._client = client_of(transport, self._sock)
        transport.set_write_buffer_limits(_UNSENT_BYTES)
        self._send(self._challenge)
        self._timers = [self._host.loop.call_later(_GREETING_S, self._expect_progress)]

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._stream.room() if self._stream is not None else None
        self._payload = room is not None
        return self._inbox.room() if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        if self._payload:
            assert self._stream is not None
            self._stream.filled(nbytes)
            return
        self._inbox.filled(nbytes)
        if not self._turning:
            self._turn()

    def pause_writing(self) -> None:
        self._choked = True
        if self._session is not None:
            self.drop("it does not read its answers")

    def resume_writing(self) -> None:
        self._choked = False
        self._flow()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = self._lost = True
        for timer in self._timers:
            timer.cancel()
        self._host.steered.pop(self._ticket, None)
        self._stop_waiting()
        if self._stream is not None:
            self._work = None  # its claims return with it
            self._stream.end()
            self._leave()
        if self._session is not None and not self._session.leases and self._work is None:
            self.let_go()
        self._host.closed(self)
        self._retire()

    # ---- messages --------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._scheduled = False
        until = self._host.clock() + _TURN_S
        try:
            while self._works_on():
                if self._rest is not None or self._host.clock() >= until:
                    self._turn_again()
                    return
        except wire.WireError as error:
            self._work = None
            self.drop(str(error))
        except Exception:
            logger.exception("a bug: the connection that met it is closed")
            self._work = None
            self.drop("internal error")
        if self._turning and not self._closed:
            self._transport.resume_reading()
        self._turning = False
        self._end_turn()

    def _works_on(self) -> bool:
        """Do a piece of the open question, or of the next message. False if there is neither."""
        self._rest = None
        if self._work is None:
            message = None if self._closed else self._inbox.next()
            if message is None:
                return False
            self._take(message)
        if self._work is None:
            return True
        try:
            pause = next(self._work)
        except StopIteration as done:
            self._work = None
            if done.value is not None:
                self._send(done.value)
            return True
        if pause:
            self._rest = self._host.loop.call_later(pause, self._turn)
        return True

    def _turn_again(self) -> None:
        """Schedule another turn, and stop reading until this work is done."""
        if not self._turning:
            self._turning = True
            if not self._closed:
                self._transport.pause_reading()
        if self._rest is None and not self._scheduled:
            self._scheduled = True
            self._host.loop.call_soon(self._turn)

    def _end_turn(self) -> None:
        if self._finishing and not self.busy and not self._closed:
            self.close()
        if self._lost:
            self._retire()

    def _take(self, message: Any) -> None:
        if self._session is not None:
            if isinstance(message, wire.Wait):
                self._wait(message)
                return
            self._work = self._session.begin(message)
        elif self._stream is not None:
            if not self._streams:  # a Seal belongs to the question before it
                self._asked_at = time.monotonic()
            self._work = self._stream.begin(message)
        elif self._greeted or not isinstance(message, wire.Hello):
            raise wire.WireError(f"{type(message).__name__} before the Welcome")
        else:
            self._greeted = True
            self._greet(message)

    def _send(self, message: wire.Message) -> None:
        self._write(wire.frame(message))

    def _write(self, data: bytes | memoryview) -> None:
        if not self._closed:
            self._transport.write(data)

    def drop(
        self,
        reason: str,
        *,
        later: bool = False,
        slot_bytes: list[int] | None = None,
        told: bool = True,
    ) -> None:
        """End a connection that breaks the rules, or that cannot be served now (``later``).
        ``slot_bytes``: sizes that the client could have asked for. ``told``: logged and counted."""
        if not self._closed:
            self._closed = True
            if told:
                self._host.dropped(self.listener, reason)
            self._transport.write(wire.frame(wire.Refused(reason[:900], later, slot_bytes)))
            self.close()

    def finish(self) -> None:
        """End as soon as no question is open and no chunk is on its way."""
        self._finishing = True
        if not self.busy:
            self.close()

    def close(self) -> None:
        """End when all written bytes have been sent, or cannot be sent within two seconds."""
        self._closed = True
        self._transport.close()
        self._timers.append(self._host.loop.call_later(_FLUSH_S, self._transport.abort))

    def cut(self) -> None:
        """End at once and without a message, also in the middle of a TLS handshake."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def leases(self) -> int:
        return self._session.leases if self._session is not None else int(self.busy)

    @property
    def busy(self) -> bool:
        """Whether a question is open or a chunk is on its way."""
        return self._work is not None or self._streams

    @property
    def _streams(self) -> bool:
        return self._stream is not None and self._stream.busy

    def _expect_progress(self) -> None:
        """Drop a greeting or a chunk that makes no progress. Called from time to time."""
        if self._closed:
            return
        if not self._greeted:
            self.drop(f"no greeting within {_GREETING_S:.0f} s")
        elif self._streams and time.monotonic() - self._asked_at > self._call_s:
            self.drop(f"a chunk has not come through in {self._call_s:.0f} s")
        else:
            self._timers = [self._host.loop.call_later(_LOOK_S, self._expect_progress)]

    # ---- greeting --------------------------------------------------------------------------------

    def _greet(self, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            raise wire.WireError(
                f"the server speaks version {wire.VERSION}, the client {hello.version}: install "
                "the same kvtier"
            )
        if hello.mode in {"attach", "join"} and not self.listener.local:
            raise wire.WireError(
                f"{hello.mode} is for Unix sockets: another host cannot map the pool"
            )
        token = self._host.token
        if self.listener.needs_token:
            assert token is not None
            if not proven(client_proof(token, self._challenge, hello), hello.proof):
                raise wire.WireError(
                    "the client does not know the server's token (server_token_file)"
                )
        self._host.greeted(self)
        proof = b"" if token is None else server_proof(token, self._challenge, hello)
        if hello.mode == "join":
            self._join(hello.ticket, proof)
        else:
            self._ask_for_size_class(hello, proof)

    def _join(self, ticket: bytes, proof: bytes) -> None:
        """Answer a worker of this host: who the server is, or the pool of its engine."""
        if not ticket:
            self._send(wire.Welcome(0, 0, [], 0, proof, server=self._host.name))
        elif (engine := self._host.steered.get(ticket)) is None:
            self.drop("no engine steers with this ticket: its scheduler was lost", later=True)
            return
        elif engine.workers >= _MOST_WORKERS:
            self.drop(f"{_MOST_WORKERS} workers of this engine have the pool mapped", later=True)
            return
        else:
            try:
                engine.let_in(self._sock, proof)
            except OSError as error:
                self.drop(str(error))
                return
        self.close()

    @property
    def workers(self) -> int:
        """Number of a steering engine's workers on this host that may have the pool mapped."""
        return self._witnesses.open

    def let_in(self, sock: socket.socket, proof: bytes) -> None:
        """Give the pool to a worker of this engine on its socket. Raises OSError and WireError."""
        assert self._size_class is not None
        pool = self._size_class.store.pool
        welcome = wire.Welcome(pool.slots, pool.slot_bytes, [], 0, proof, server=self._host.name)
        self._witnesses.lend(sock, welcome, pool.fd)

    def _ask_for_size_class(self, hello: wire.Hello, proof: bytes) -> None:
        slot_bytes = -(-hello.chunk_bytes // PAGE_BYTES) * PAGE_BYTES

        def opened(future: Future[SizeClass]) -> None:
            self._host.call_soon(lambda: self._opened(hello, future, proof))

        self._host.size_classes.get(slot_bytes, self._client).add_done_callback(opened)

    def _opened(self, hello: wire.Hello, future: Future[SizeClass], proof: bytes) -> None:
        if self._closed:
            return
        try:
            size_class = future.result()
            if not self._host.size_classes.enter(size_class):
                # its room was given to another size just now
                self._ask_for_size_class(hello, proof)
                return
            self._size_class = size_class
            owner = size_class.owner(hello.fingerprint, hello.namespace, hello.client)
            self._host.size_classes.warn_if_apart(size_class, (hello.fingerprint, hello.namespace))
            welcome = self._welcome(size_class, proof)
            if hello.mode == "attach":
                self._session = Session(
                    size_class, owner, self._host.announced, chunk_bytes=hello.chunk_bytes
                )
                self._witnesses.lend(self._sock, welcome, size_class.store.pool.fd)
                self._inbox.expect(wire.Question)
            elif hello.mode == "steer":
                self._session = Session(
                    size_class,
                    owner,
                    self._host.announced,
                    self._client,
                    lambda: bool(self._witnesses.open),
                    hello.chunk_bytes,
                )
                self._steer(welcome)
            else:
                self._call_s = _CALL_S + hello.chunk_bytes / _SLOWEST_BYTES_S
                self._stream = ChunkStream(
                    size_class, owner, hello.chunk_bytes, self._write, self._flow, self._client
                )
                self._inbox.expect(wire.StreamQuestion)
                self._send(welcome)
        except RefusedSize as error:
            asks = hello.chunk_bytes == wire.NO_SIZE
            self.drop(str(error), slot_bytes=error.kept, told=not asks)
            return
        except (KVTierError, OSError) as error:
            self.drop(str(error), later=not isinstance(error, ConfigError))
            return
        except Exception:
            logger.exception("a bug: a store could not be opened")
            self.drop("internal error")
            return
        logger.info(
            "%s: %s %s, client %r",
            self.listener.address,
            hello.mode,
            hello.fingerprint.hex()[:12],
            hello.client,
        )

    def _welcome(self, size_class: SizeClass, proof: bytes) -> wire.Welcome:
        store = size_class.store
        return wire.Welcome(
            store.pool.slots,
            store.pool.slot_bytes,
            store.place_names,
            store.pool.slots + sum(tier.capacity for tier in store.tiers),
            proof,
            self._host.announced is not None,
            server=self._host.name,
        )

    def _steer(self, welcome: wire.Welcome) -> None:
        self._ticket = os.urandom(wire.TICKET_BYTES)
        self._host.steered[self._ticket] = self
        notice_lost_hosts(self._sock)
        self._inbox.expect(wire.Question)
        self._send(msgspec.structs.replace(welcome, ticket=self._ticket))

    # ---- an attached engine's end ----------------------------------------------------------------

    def _retire(self) -> None:
        """End the session if its engine can touch no slot any more and no work of it runs."""
        if self._work is not None or not self._lost or self._session is None:
            return
        self._session.gone()
        if self._witnesses.open:
            return
        if not self._ended:
            self._ended = True
            self._work = self._session.ending()
            self._turn_again()
            return
        self._session = None
        self._leave()
        self._host.retired(self)

    def _leave(self) -> None:
        if self._size_class is not None:
            self._host.size_classes.leave(self._size_class)

    @property
    def lingers(self) -> bool:
        """Whether processes of the engine may still map the pool, or leases have yet to end."""
        return self._session is not None

    def let_go(self) -> None:
        """Do not wait for witnesses: there are no leases, or the pool itself ends."""
        self._witnesses.let_go()

    # ---- waiting for promotions ------------------------------------------------------------------

    def _wait(self, question: wire.Wait) -> None:
        assert self._size_class is not None
        if self._waiting is not None:
            raise wire.WireError("a second Wait before the first was answered")
        self._waiting = question.id
        if self._size_class.arrivals != self._arrivals_seen:
            self._end_wait()
            return
        self._size_class.subscribers.add(self._end_wait)
        self._waiting_until = self._host.loop.call_later(question.timeout_ms / 1000, self._end_wait)

    def _end_wait(self) -> None:
        assert self._size_class is not None
        waiting = self._waiting
        self._stop_waiting()
        self._arrivals_seen = self._size_class.arrivals
        if waiting is not None:
            self._send(wire.Done(waiting))

    def _stop_waiting(self) -> None:
        self._waiting = None
        if self._size_class is not None:
            self._size_class.subscribers.discard(self._end_wait)
        if self._waiting_until is not None:
            self._waiting_until.cancel()
            self._waiting_until = None

    # ---- a stream's bytes ------------------------------------------------------------------------

    def _flow(self) -> None:
        if self._stream is not None and self._stream.sending and not self._flowing:
            self._flowing = True
            self._host.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send one piece in each turn of the loop, as long as the socket takes it."""
        stream = self._stream
        assert stream is not None
        self._flowing = False
        if stream.sending and not self._choked and not self._closed:
            stream.pump()
            self._flow()
            self._end_turn()
