"""Clients that may be there, and want more than is theirs: floods of questions, other tenants."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from kvtier.client.client import Client
from kvtier.client.connect import ServerAccess, enter
from kvtier.core.chunk import ChunkKey
from kvtier.protocol import wire
from tests.child_process import DEADLINE_S
from tests.server_process import LAYOUT, attached, run, save

_MOST_SESSIONS = 16
_AT_ONCE = 100


def questions(
    access: ServerAccess, keys: Sequence[ChunkKey], *, sessions: int, seconds: float
) -> int:
    """Look these up without waiting for an answer, on at most 16 sessions. Returns the bytes of
    answers that came."""
    asking = wire.frame(wire.LookupCall(1, wire.joined(keys)))
    came, until = 0, time.monotonic() + seconds
    with ExitStack() as stack:
        sent = {
            stack.enter_context(enter_raw(access)): 0 for _ in range(min(sessions, _MOST_SESSIONS))
        }
        for one in sent:
            one.setblocking(False)
        while time.monotonic() < until and sent:
            for one in list(sent):
                try:
                    sent[one] += one.send(asking[sent[one] % len(asking) :])
                    came += len(one.recv(1 << 16))
                except BlockingIOError:
                    continue
                except OSError:
                    del sent[one]
    return came


def enter_raw(access: ServerAccess) -> socket.socket:
    """A socket past its greeting, to say on it what we want; it keeps no pool and no witness."""
    welcomed = enter(access)
    for descriptor in welcomed.descriptors:
        os.close(descriptor)
    welcomed.socket.settimeout(DEADLINE_S)
    return welcomed.socket


def clears(access: ServerAccess, known: Sequence[ChunkKey]) -> None:
    """Drop ``known``, of which it knows the names, then all chunks that there are, as vLLM's
    ``/reset_prefix_cache`` does."""
    with attached(access) as client:
        client.invalidate(known)
        client.invalidate_all()
        client.stats()  # the others have no answer, and this one comes after them


def fills(access: ServerAccess, chunks: int) -> int:
    """Save so many chunks that nobody has had, a hundred at once. Returns how many were taken."""
    with attached(access) as client:
        return sum(
            save(client, run(1_000_000 + first, min(_AT_ONCE, chunks - first)))
            for first in range(0, chunks, _AT_ONCE)
        )


def guesses(access: ServerAccess, tokens: Sequence[int], salts: Sequence[bytes]) -> int:
    """Look for a prompt whose text it knows under each of these salts. Returns the chunks found."""
    with closing(Client(access, 2.0)) as client:
        return sum(client.lookup(LAYOUT.keys(tokens, salt)).known for salt in salts)
